"""What is shown is plain to see, and says the same to people and to programs."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_inspect.render import ago, console, emit, safe, size, span


@given(name=st.text(st.characters(), max_size=300) | st.text("\x1b\x9b\u202e [a]", max_size=300))
def test_a_safe_name_moves_no_cursor(name: str) -> None:
    """Nothing in it is invisible or acts on a terminal; plain names stay as they are."""
    shown = safe(name)
    assert all(unicodedata.category(each)[0] != "C" for each in shown)
    assert not {"\u2028", "\u2029"} & set(shown)
    shown.encode()
    if name.isascii() and name.isprintable() and len(name) <= 200:
        assert shown == name
    assert len(shown) <= 200 * 10 + 1


@given(name=st.text(max_size=100))
def test_json_is_harmless_in_a_page_and_says_the_same(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No byte of it opens a tag or an entity, and a parser gets back what went in."""
    emit({"name": name, name: [1, None]})
    out = capsys.readouterr().out
    assert out.isascii()
    assert not set("<>&") & set(out)
    assert json.loads(out) == {"name": name, name: [1, None]} | (
        {"name": [1, None]} if name == "name" else {}
    )


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[red]", ":smile:", "[/]", "[link=http://a]b"])
def test_markup_is_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A console takes no name for markup, in or out of a table."""
    from kvtier_inspect.render import columns, facts

    out = console()
    out.print(text)
    out.print(columns(("name",), [(text,)]))
    out.print(facts([("name", text)]))
    assert capsys.readouterr().out.count(text) == 3


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (100 << 20, "100 MiB"),
        (2 << 30, "2.0 GiB"), (1 << 60, "1.0 EiB"), (1 << 72, "4096 EiB"),
    ],
)  # fmt: skip
def test_sizes(nbytes: int, words: str) -> None:
    """Sizes for people have three digits and a binary unit."""
    assert size(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (5e-9, "5 ns"), (2.5e-6, "2.5 µs"), (0.0015, "1.5 ms"), (59.0, "59.0 s"),
        (90, "1.5 min"), (7200, "2.0 h"), (86400 * 3.2, "3.2 d"),
    ],
)  # fmt: skip
def test_spans(seconds: float, words: str) -> None:
    """Times for people have the largest unit that fits."""
    assert span(seconds) == words


def test_ages() -> None:
    """What never was is never, what lies in the future (another clock) is now."""
    assert ago(0, 10**18) == "never"
    assert ago(10**18 + 5, 10**18) == "now"
    assert ago(10**18 - 2 * 10**9, 10**18) == "2.0 s"
