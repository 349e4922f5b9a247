"""The page made of benchmarks' results: what is read, refused, shown and escaped."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from report_results import FOLDER, Outline, ratio, result, series, tiers, written

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = '<script>alert("x")</script>&$body${0}'


@pytest.fixture
def reading(modules: Any) -> Any:
    """Import what reads results."""
    return modules("_report_read")


@pytest.fixture
def page(modules: Any) -> Any:
    """Import what makes the page."""
    return modules("_report_page")


@pytest.fixture
def report(modules: Any) -> Any:
    """Import the script."""
    return modules("report")


# -- reading


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty: the benchmark did not end"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no benchmark's result"),
        ('{"ratios": {}}', "is no benchmark's result"),
        ('{"name": "x", "ratios": [1]}', "'ratios' is no object"),
        ('{"name": "x", "results": {}}', "'results' is no list"),
        ('{"name": "x", "settings": 3}', "'settings' is no object"),
    ],
)
def test_what_is_no_result_is_refused_by_name(
    reading: Any, tmp_path: Path, text: str, said: str
) -> None:
    """The file, and what is wrong with it."""
    path = written(tmp_path, text)
    with pytest.raises(reading.Unreadable, match=re.escape(said)) as found:
        reading.read(path)
    assert path.name in str(found.value)


def test_a_file_that_is_missing_or_no_text_is_refused(reading: Any, tmp_path: Path) -> None:
    """Without a traceback."""
    with pytest.raises(reading.Unreadable, match="cannot be read: No such file"):
        reading.read(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(reading.Unreadable, match="is no text in UTF-8"):
        reading.read(tmp_path / "bytes.json")


def test_ratios_and_cases_are_told_apart(reading: Any) -> None:
    """A number without a row of its own is there, but nobody judged it."""
    rows = ratio("good", 2.0, ">= 1.9", "met"), {"case": "read", "name": "disk"}, "no row"
    value = result("example", *rows[:2], ratios={"good": 2.0, "bare": 3, "odd": None})
    value["results"].append(rows[2])
    run = reading.run_of(value, "example.json")
    good, bare, odd = run.ratios
    assert (good.verdict, good.ends, good.spread) == ("met", (1.9, math.inf), 0.01)
    assert (bare.value, bare.verdict, bare.spread) == (3.0, "unknown", None)
    assert math.isnan(odd.value)
    assert [row["name"] for row in run.results] == ["disk"]


@pytest.mark.parametrize(
    ("bar", "ends"),
    [
        (">= 0.9", (0.9, math.inf)),
        ("<= 1e-3", (-math.inf, 1e-3)),
        ("0.9..1.1", (0.9, 1.1)),
        ("none", (-math.inf, math.inf)),
        (">= soon", (-math.inf, math.inf)),
    ],
)
def test_bars_are_read_back(reading: Any, bar: str, ends: tuple[float, float]) -> None:
    """As the harness writes them; what is no number bounds nothing."""
    assert reading.ends_of(bar) == ends


def test_bars_are_written_as_they_are_read(reading: Any, modules: Any) -> None:
    """The harness and the report agree on the text of a bar."""
    pytest.importorskip("rich")
    harness = modules("_harness")
    for bar in (harness.Bar(low=0.85), harness.Bar(high=2e6), harness.Bar(0.9, 1.1)):
        assert reading.ends_of(str(bar)) == (bar.low, bar.high)
    made = harness.Ratio("r", 1.0, harness.Bar(low=0.5), 0.1, 5).to_json()
    run = reading.run_of(result("example", made), "x")
    assert (run.ratios[0].verdict, run.results) == ("met", ())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1234.5, "1,234"),
        (3.0, "3"),
        (1_000_000, "1,000,000"),
        (True, "yes"),
        (None, ""),
        (1e-7, "1e-07"),
        (1e300, "1e+300"),
        (math.inf, "inf"),
        ({"a": [1, 2.5]}, "a: 1, 2.5"),
    ],
)
def test_numbers_as_text(reading: Any, value: Any, text: str) -> None:
    """Four digits, thousands apart."""
    assert reading.shown(value) == text


# -- tables of cases


def test_any_case_becomes_a_table(modules: Any) -> None:
    """Dictionaries are columns, trials and long lists their median and ends, the same said once."""
    rows = [
        {"case": "a", "gb": {"raw": 2.0}, "mib": 1, "trials": {"raw": series(1, 2, 6)}},
        {"case": "a", "gb": {"raw": 3.0}, "mib": 1, "more": [5, 1, 3, 2, 4]},
        {"case": "b", "trials": {"odd": [1, {"seconds": None}], "none": 3}},
        {"loose": "text"},
    ]
    a, b, loose = modules("_report_tables").cases(rows)
    assert (a.name, a.heads) == ("a", ["gb.raw", "raw, s", "more"])
    assert a.rows == [
        [("2", True), ("2 (1 to 6)", True), ("", False)],
        [("3", True), ("", False), ("3 (1 to 5)", True)],
    ]
    assert a.note == "In all rows: mib 1."
    assert b.rows == [[("1 values", True), ("0 values", True)]]
    assert (loose.name, loose.rows) == ("results", [[("text", False)]])


def test_what_has_no_columns_is_one_cell(modules: Any) -> None:
    """A ratio within a row, a list of rows, dictionaries whose keys differ from row to row."""
    stands = {"s": ratio("r", 1.5, ">= 1", "met")}
    rows = [
        {"case": "a", "numbers": {"x": 1, "y": 2}, "of": stands, "cases": [{"w": 1}, {"w": 2}]},
        {"case": "a", "numbers": {"z": 3}, "of": stands, "cases": []},
    ]
    (table,) = modules("_report_tables").cases(rows)
    assert table.note == "In all rows: of.s 1.5 (met)."
    assert table.heads == ["numbers", "cases"]
    assert [[text for text, _ in row] for row in table.rows] == [
        ["x: 1, y: 2", "w: 1; w: 2"], ["z: 3", ""]
    ]  # fmt: skip


# -- the page


def shown_page(page: Any, reading: Any, *values: dict[str, Any], **more: Any) -> str:
    """Return the page of some results."""
    found = [page.Section(reading.run_of(value, "x.json"), **more) for value in values]
    return str(page.page(found))


def test_a_ratio_is_shown_with_all_that_decides(page: Any, reading: Any) -> None:
    """Its bar, spread, pairs, verdict, and the run's commit, machine and settings."""
    rows = (
        ratio("good", 2.0, ">= 1.9", "met", 0.04),
        ratio("bad", 1.0, "<= 0.9", "missed"),
        {"case": "verdict", "text": "One sentence."},
    )
    settings = {"quick": True, "io": "direct", "threads": 1}
    text = shown_page(page, reading, result("example", *rows, settings=settings))
    words = [each.strip() for each in Outline(text).text if each.strip()]
    for word in (
        "good", "2", ">= 1.9", "± 0.04", "5", "✓ met", "✗ missed", "✗ bad", "0123456789ab",
        "CPU, 2 cores, Linux", "io", "direct", "1 met, 1 missed", "example, quick", "One sentence.",
    ):  # fmt: skip
        assert word in words, word


def test_what_came_from_a_file_is_text(page: Any, reading: Any) -> None:
    """No name, setting, verdict or case becomes markup, or a place of the template."""
    row = ratio(HOSTILE, 1.0, HOSTILE, HOSTILE) | {"pairs": HOSTILE}
    value = result(
        HOSTILE, row, {"case": HOSTILE, HOSTILE: HOSTILE}, {"case": "verdict", "text": HOSTILE}
    )
    value |= {"commit": HOSTILE, "machine": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    text = shown_page(page, reading, value, problems=[HOSTILE])
    outline = Outline(text)
    assert "script" not in outline.tags
    assert outline.open == []
    assert "".join(outline.text).count(HOSTILE) >= 10


def test_the_page_needs_nothing_from_outside(page: Any, reading: Any) -> None:
    """Every link is to a place on the page, and the browser is told to fetch nothing."""
    text = shown_page(page, reading, result("one"), result("one"))
    outline = Outline(text)
    assert outline.links == ["#run-1-one", "#run-2-one"]
    assert len(set(outline.ids)) == len(outline.ids)
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text


def test_what_would_mislead_is_said(page: Any, reading: Any) -> None:
    """Several commits or machines, changes without a commit, quick runs."""
    other = result("other", commit="ffff+", machine="another", settings={"quick": True})
    runs = [reading.run_of(value, "x") for value in (result("one"), other)]
    said = page.warnings(runs)
    assert said == [
        "These runs are of 2 commits: 0123456789ab; ffff+.",
        "These runs are of 2 machines: CPU, 2 cores, Linux; another.",
        "Some had changes that are not in their commit: other.",
        "Some were quick: smaller cases, for a first look: other.",
    ]
    assert page.warnings(runs[:1]) == []


def test_the_strip_shows_the_number_beside_its_bar(page: Any, reading: Any) -> None:
    """A number that misses lies outside of what is shaded, one that meets inside."""
    for value, bar, inside in (
        (1.0, ">= 0.9", True),
        (0.8, ">= 0.9", False),
        (-19.0, ">= 1", False),
        (5.0, "<= 4", False),
        (1.0, "0.9..1.1", True),
    ):
        text = page.gauge(reading.Measured("r", value, bar, 0.01))
        left, width = map(
            float, re.findall(r'<rect class="bar" x="([\d.]+)" y="1" width="([\d.]+)', text)[0]
        )
        (dot,) = map(float, re.findall(r'cx="([\d.]+)"', text))
        assert (left <= dot <= left + width) is inside, (value, bar)
    assert page.gauge(reading.Measured("r", 1.0, "none")) == ""
    assert page.gauge(reading.Measured("r", math.nan, ">= 1")) == ""


# -- the script


def test_the_rest_is_made_when_a_file_is_not(report: Any, tmp_path: Path) -> None:
    """Status 1, the problem on the page and said; two runs of one kind have plots of their own."""
    pytest.importorskip("matplotlib")
    paths = [
        written(tmp_path, tiers(), "one.json"),
        written(tmp_path, "", "empty.json"),
        written(tmp_path, tiers(), "two.json"),
    ]
    said: list[str] = []
    out, plots = tmp_path / "new" / "out.html", tmp_path / "plots"
    assert report.report(paths, out, plots, said.append) == 1
    assert len(said) == 1
    assert "empty.json: is empty" in said[0]
    text = out.read_text()
    outline = Outline(text)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids), "two plots share an id"
    assert said[0] in "".join(outline.text)
    assert len(list(plots.glob("*.png"))) == len(list(plots.glob("*.svg"))) == 2


def test_without_files_that_can_be_read_there_is_no_page(report: Any, tmp_path: Path) -> None:
    """Status 2."""
    said: list[str] = []
    out = tmp_path / "out.html"
    assert report.report([tmp_path / "none.json"], out, None, said.append) == 2
    assert not out.exists()
    assert "nothing to report" in said[-1]


def test_without_matplotlib_there_is_a_page_without_plots(report: Any, tmp_path: Path) -> None:
    """With its colours, and a word on what to install."""
    said: list[str] = []
    out = tmp_path / "out.html"
    paths = [written(tmp_path, tiers())]
    assert report.report(paths, out, None, said.append, find=lambda: None) == 1
    assert said == ["no plots: matplotlib is missing; pip install 'kvtier[bench]'"]
    assert "--ink:" in out.read_text()
    assert said[0] in "".join(Outline(out.read_text()).text)


def test_the_script_reports_on_a_benchmark_as_it_is(tmp_path: Path) -> None:
    """A smoke run's file, on the command line; asked for nothing, it says what to ask for."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    made, out = tmp_path / "replay.json", tmp_path / "out.html"
    script = [sys.executable, str(FOLDER / "replay.py"), "--smoke", "--only", "policies"]
    subprocess.run([*script, "--json", str(made)], capture_output=True, check=False, timeout=200)
    script = [sys.executable, str(FOLDER / "report.py"), str(made)]
    done = subprocess.run(
        [*script, "--html", str(out)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "Saved seconds of TTFT against budget" in out.read_text()
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "give --html, --plots or both" in done.stderr
