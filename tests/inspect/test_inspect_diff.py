"""`diff`: why one spec does not hit what another one stored."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SPEC, variant

import kvtier
from kvtier_inspect import cli
from kvtier_inspect.diff import differences, read_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHANGES: dict[str, Any] = {
    "model": "test/other",
    "weights": "sha256:1",
    "dtype": "bfloat16",
    "layers": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "v_head_dim": 4,
    "quantization": "gptq",
    "kv_scales": "sha256:2",
    "layout": "nhd",
    "rope": (("theta", 1e6),),
    "tp_size": 2,
    "pp_size": 2,
    "block_tokens": 32,
}


@pytest.fixture
def stores(open_store: Callable[..., Any], store_path: str) -> tuple[str, str]:
    """Make two stores of specs that differ in dtype and layout."""
    open_store(store_path + "a").close()
    open_store(store_path + "b", variant(dtype="bfloat16", layout="nhd")).close()
    return store_path + "a", store_path + "b"


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_is_named_with_a_reason(name: str) -> None:
    """One field that differs is one difference, in both directions, and it says why no hit."""
    other = variant(**{name: CHANGES[name]})
    for a, b in ((SPEC, other), (other, SPEC)):
        found = differences(a, b)
        assert [each.field for each in found] == [name]
        assert found[0].why
        assert found[0].a != found[0].b
    hashes = kvtier.BlockKeys.of(SPEC, [1] * 64).hashes
    same = kvtier.BlockKeys.of(other, [1] * 64).hashes == hashes
    assert found[0].hashes is not same


def test_every_field_has_its_reason() -> None:
    """A field that is added to the spec needs one."""
    from kvtier_inspect.diff import _WHY

    assert set(_WHY) == {field.name for field in fields(kvtier.KVSpec)}


@given(st.dictionaries(st.sampled_from(sorted(CHANGES)), st.booleans()))
def test_no_difference_means_one_namespace(chosen: dict[str, bool]) -> None:
    """Specs have differences exactly where their namespaces differ."""
    changes = {name: CHANGES[name] for name, change in chosen.items() if change}
    other = variant(**changes)
    assert {each.field for each in differences(SPEC, other)} == set(changes)
    assert (not changes) == (other.namespace == SPEC.namespace)


def test_layers_that_differ_are_named() -> None:
    """Models whose layers differ are compared layer by layer."""
    shape = ((2, 8), (2, 8))
    a = replace(SPEC, kv_heads=0, head_dim=0, v_head_dim=0, parts=(shape, ((4, 8), (4, 8)), shape))
    b = replace(a, parts=(shape, ((4, 8), (4, 8)), ((1, 8), (1, 8))), kv_heads=0)
    found = differences(a, b)
    assert [(each.field, each.a, each.b) for each in found] == [
        ("parts", "layer 2: 2x8 2x8", "layer 2: 1x8 1x8")
    ]


def test_rope_settings_that_differ_are_named() -> None:
    """Only what differs of the rotary settings, types included."""
    a = variant(rope=(("theta", 1e6), ("factor", 8), ("kind", "yarn")))
    b = variant(rope=(("theta", 1e6), ("factor", 9)))
    (found,) = differences(a, b)
    assert (found.a, found.b) == ("factor=8.0, kind=yarn", "factor=9.0")


def test_stores_files_and_namespaces(
    stores: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store, a store's namespace, a spec's file and JSON are the same spec; 1 if they differ."""
    a, b = stores
    digits = SPEC.namespace.hex()
    (tmp_path / "spec.json").write_text(
        json.dumps({"model": "test/tiny", "weights": "sha256:0", "dtype": "float32", "layers": 3,
                    "kv_heads": 2, "head_dim": 8, "block_tokens": 16})
    )  # fmt: skip
    same = [a, f"{a}@{digits[:6]}", f"{a}/specs/{digits}.msgpack", str(tmp_path / "spec.json")]
    for name in same:
        assert read_spec(name) == SPEC
        assert cli.run(["diff", a, name]) == 0
        assert "the same namespace" in capsys.readouterr().out
        assert cli.run(["diff", name, b]) == 1
        text = capsys.readouterr().out
        assert "dtype" in text
        assert "layout" in text
    assert cli.run(["diff", a, b, "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["same"] is False
    assert [each["field"] for each in value["differences"]] == ["dtype", "layout"]
    assert value["specs"][0]["namespace"] == digits


def test_the_two_specs_of_one_store(
    open_store: Callable[..., Any], store_path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A store that holds two is enough; one that holds more says which there are; live too."""
    open_store().close()
    store = open_store(store_path, variant(dtype="bfloat16"))
    assert cli.run(["diff", store_path]) == 1
    assert "dtype" in capfd.readouterr().out
    store.close()
    open_store(store_path, variant(model="test/third")).close()
    assert cli.run(["diff", store_path]) == 2
    assert "test/third" in capfd.readouterr().err
    assert cli.run(["diff", store_path, store_path]) == 2
    assert "@DIGITS" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", 2), (b"{}", 2), (b'{"model": 1}', 2), (b"\x93abc", 2), (b"{" * 9999, 2), (None, 3)],
)
def test_what_is_no_spec(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes | None, code: int
) -> None:
    """A message that names the file, never a traceback."""
    path = tmp_path / "spec"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["diff", str(path), str(path)]) == code
    assert "spec" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07evil", "<img src=x>", "[red]x[/red]"])
def test_names_are_not_interpreted(
    open_store: Callable[..., Any], store_path: str, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """A model's name reaches neither terminal nor HTML as anything but text."""
    open_store().close()
    open_store(store_path, variant(model=name)).close()
    assert cli.run(["diff", store_path]) == 1
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]" in shown or "[red]" not in name
    assert cli.run(["diff", store_path, "--json"]) == 1
    assert not set("\x1b\x07<>") & set(capfd.readouterr().out)
