"""The page and plots made of benchmarks' results, and the runs that make the results."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
VOID = {"meta", "rect", "line", "circle", "br", "link"}
HOSTILE = '<script>alert("x")</script>&$body${0}'


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import modules as the benchmarks do: from their own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def reading(modules: Any) -> Any:
    """Import what reads results."""
    return modules("_report_read")


@pytest.fixture
def figures(modules: Any) -> Any:
    """Import what says what can be drawn."""
    return modules("_report_figures")


@pytest.fixture
def page(modules: Any) -> Any:
    """Import what makes the page."""
    return modules("_report_page")


@pytest.fixture
def runs(modules: Any) -> Any:
    """Import what runs benchmarks."""
    return modules("_report_runs")


@pytest.fixture
def report(modules: Any) -> Any:
    """Import the script."""
    return modules("report")


def ratio(name: str, value: float, bar: str, verdict: str, spread: float = 0.01) -> dict[str, Any]:
    """Return a ratio as the harness writes it."""
    return {
        "name": name, "value": value, "bar": bar, "spread": spread, "pairs": 5, "starved": 0.0,
        "verdict": verdict,
    }  # fmt: skip


def result(name: str = "example", *rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return one result as the harness writes it."""
    judged = [row for row in rows if "verdict" in row]
    value = {
        "name": name, "commit": "0123456789ab", "machine": "CPU, 2 cores, Linux",
        "settings": {"quick": False, "pairs": 5},
        "ratios": {row["name"]: row["value"] for row in judged}, "results": list(rows),
    }  # fmt: skip
    return value | changes


def series(*seconds: float) -> list[dict[str, float]]:
    """Return trials as the harness writes them."""
    return [{"seconds": each, "held": 1.0, "attempts": 1} for each in seconds]


def written(folder: Path, value: Any, name: str = "example.json") -> Path:
    """Write a result to a file."""
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


class Outline(HTMLParser):
    """Checks that elements nest; collects their text, ids, and what they would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [
            str(found[name]) for name in ("href", "src", "xlink:href") if found.get(name)
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open and close an element."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take text."""
        self.text.append(data)


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
    assert "In all rows: mib 1." in a.note
    assert b.rows == [[("1 values", True), ("0 values", True)]]
    assert (loose.name, loose.rows) == ("results", [[("text", False)]])


# -- figures


def tiers() -> dict[str, Any]:
    """Return a result of two block sizes."""
    rows = [
        {
            "case": "read", "mib": mib, "blocks": 1000 // mib,
            "trials": {"raw": series(0.5, 1.0, 2.0), "store": series(2.0), "again": series(2.0)},
        }
        for mib in (1, 10)
    ]  # fmt: skip
    return result("tiers", *rows)


def cell(blocks: int, factor: float, **values: Any) -> dict[str, Any]:
    """Return one cell of the restore benchmark's grid."""
    ways = {"stock": series(1.0), "load": series(factor), "hybrid": series(0.5)}
    trials = ways | {"again": series(0.75), "recompute": series(1.0)}
    return {
        "case": "grid",
        "blocks": blocks,
        "load_vs_recompute": factor,
        "trials": trials,
    } | values


def policies(blocks: int, policy: str, saved_s: float, *, hybrid: bool = True) -> dict[str, Any]:
    """Return one row of the replay benchmark."""
    return {
        "case": "policies, t", "trace": "t", "policy": policy, "saved_s": saved_s,
        "way": {"holes": False, "hybrid": hybrid, "price": 0.0},
        "blocks": {"host": 0, "ssd": blocks}, "block_bytes": 1 << 30,
    }  # fmt: skip


def demo() -> dict[str, Any]:
    """Return the demo's result, whose settings are a list."""
    each = {"recompute": [5.0], "load": [4.0, 6.0, 5.0], "planned": [2.0]}
    link = {"link": "equal", "link_bytes_per_s": 1e7, "ttft_s_each": each}
    return result("demo", settings=[link])


def replayed() -> dict[str, Any]:
    """Return a result of three budgets and a bound."""
    rows = [policies(4, "lru", 20.0, hybrid=False), policies(2, "lru", 10.0, hybrid=False)]
    return result("replay", *rows, policies(2, "priced", 15.0), policies(0, "infinite", 40.0))


def rivals() -> dict[str, Any]:
    """Return a result of two rivals."""
    trials = {"kvtier": series(0.5), "again": series(0.5), "disk": series(1.0)}
    return result("rivals", {"case": "read", "mib": 1000, "blocks": 1, "trials": trials})


def drawn(modules: Any, value: dict[str, Any]) -> list[Any]:
    """Return what can be drawn of a result, without problems."""
    run = modules("_report_read").run_of(value, "x.json")
    found, problems = modules("_report_figures").figures(run)
    assert problems == []
    return list(found)


def test_bandwidth_is_bytes_over_seconds(modules: Any) -> None:
    """The median of passes with the slowest and the quickest, by block size."""
    (figure,) = drawn(modules, tiers())
    (panel,) = figure.panels
    raw, store = panel.curves
    gb = 1000 * (1 << 20) / 1e9
    assert (raw.name, raw.x, raw.y) == ("raw disk", (1, 10), (gb, gb))
    assert (raw.low, raw.high) == ((gb / 2, gb / 2), (gb * 2, gb * 2))
    assert store.y == (gb / 2, gb / 2)


def test_restore_times_with_the_optimum(modules: Any) -> None:
    """Over link speed for each length, and over length for each link speed."""
    cells = [cell(b, f, optimal_s=[0.5, 0.7]) for b in (4, 8) for f in (2.0, 0.5)]
    link, length = drawn(modules, result("restore", *cells))
    assert [panel.title for panel in link.panels] == ["1,024 tokens", "2,048 tokens"]
    recompute, load, planned, best = link.panels[0].curves
    assert (load.x, load.y) == ((0.5, 2.0), (2.0, 0.5))
    assert (recompute.y, planned.y) == ((1.0, 1.0), (0.625, 0.625))
    assert (best.name, best.y, best.dashed) == ("best split", (0.6, 0.6), True)
    assert [panel.title for panel in length.panels] == ["link speed 0.5", "link speed 2"]
    assert length.panels[0].curves[0].x == (1024, 2048)
    older, _ = drawn(modules, result("restore", cell(4, 1.0)))
    assert [curve.name for curve in older.panels[0].curves] == ["recompute", "load", "planned"]


def test_saved_seconds_against_budget(modules: Any) -> None:
    """Budgets in bytes, in order; a cache without bounds is a line over all of them."""
    (figure,) = drawn(modules, replayed())
    lru, priced, bound = figure.panels[0].curves
    assert (lru.name, lru.x, lru.y) == ("lru, load only", (2, 4), (10.0, 20.0))
    assert priced.name == "priced, hybrid"
    assert (bound.x, bound.y, bound.dashed) == ((2, 4), (40.0, 40.0), True)


def test_rivals_are_in_order_and_kvtier_stands_out(modules: Any) -> None:
    """The quickest first; what was measured twice is shown once."""
    (figure,) = drawn(modules, rivals())
    (panel,) = figure.panels
    assert (panel.labels, panel.marked) == (["kvtier", "disk"], ("kvtier",))


def test_missing_rows_are_named(figures: Any, reading: Any) -> None:
    """No figure, and which case it would have needed; a wrong row is named by what it lacks."""
    run = reading.run_of(result("restore", {"case": "plan"}), "r.json")
    found, problems = figures.figures(run)
    assert found == []
    assert (
        "r.json: no plot of restore time against link speed: no result of case 'grid'"
        in (problems[0])
    )
    run = reading.run_of(result("tiers", {"case": "read", "mib": 1}), "t.json")
    found, problems = figures.figures(run)
    assert found == []
    assert problems == [
        "t.json: no plot of bandwidth against block size: a row lacks or has a wrong 'blocks'"
    ]
    assert figures.figures(reading.run_of(result("unheard of"), "u.json")) == ([], [])


def test_every_figure_is_drawn_in_both_kinds(modules: Any, tmp_path: Path) -> None:
    """A file of each; an element whose colours the page sets, without what would name the day."""
    pytest.importorskip("matplotlib")
    plots = modules("_plots")
    for value in (tiers(), result("restore", cell(4, 1.0)), replayed(), rivals(), demo()):
        for figure in drawn(modules, value):
            png, svg = plots.write(figure, tmp_path)
            assert png.read_bytes().startswith(b"\x89PNG")
            assert b"<dc:date>" not in svg.read_bytes()
            text = plots.inline(figure)
            outline = Outline(text)
            assert outline.open == []
            assert text.startswith("<svg")
            assert "var(--ink)" in text
            assert all(link.startswith("#") for link in outline.links)
            colours = set(re.findall(r"(?:fill|stroke): (#\w+)", text))
            assert colours <= {"#ffffff", "#000000"}, "a colour that the page cannot change"


def test_names_are_not_taken_for_formulas(modules: Any) -> None:
    """A dollar sign, an angle bracket: drawn as they are."""
    pytest.importorskip("matplotlib")
    figures = modules("_report_figures")
    panel = figures.Panel("a $x$ <b>", [figures.Curve("$\\frac{", [0], [1.0])], ["$^$ & <i>"])
    figure = figures.Figure("s", "t", "", "y", [panel], "n", kind="stacked")
    text = "".join(Outline(modules("_plots").inline(figure)).text)
    assert "a $x$ <b>" in text
    assert "$^$ & <i>" in text


# -- the page


def shown_page(page: Any, reading: Any, *values: dict[str, Any], **more: Any) -> str:
    """Return the page of some results."""
    found = [page.Section(reading.run_of(value, "x.json"), **more) for value in values]
    return str(page.page(found))


def test_a_ratio_is_shown_with_all_that_decides(page: Any, reading: Any) -> None:
    """Its bar, spread, pairs, verdict, and the run's commit, machine and settings."""
    rows = ratio("good", 2.0, ">= 1.9", "met", 0.04), ratio("bad", 1.0, "<= 0.9", "missed")
    settings = {"quick": True, "io": "direct", "threads": 1}
    text = shown_page(page, reading, result("example", *rows, settings=settings))
    words = [each.strip() for each in Outline(text).text if each.strip()]
    for word in (
        "good", "2", ">= 1.9", "± 0.04", "5", "✓ met", "✗ missed", "✗ bad", "0123456789ab",
        "CPU, 2 cores, Linux", "io", "direct", "1 met, 1 missed", "example, quick",
    ):  # fmt: skip
        assert word in words, word


def test_what_came_from_a_file_is_text(page: Any, reading: Any) -> None:
    """No name, setting, verdict or case becomes markup, or a place of the template."""
    row = ratio(HOSTILE, 1.0, HOSTILE, HOSTILE) | {"pairs": HOSTILE}
    value = result(HOSTILE, row, {"case": HOSTILE, HOSTILE: HOSTILE, "sentence": HOSTILE})
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


# -- running them all

SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--json") + 1])
value = {value!r}
value["settings"] = {{"arguments": sys.argv[1:]}}
{do}
"""


def scripts(folder: Path, **does: str) -> Path:
    """Write scripts that do what is said; ``WRITE`` stands for writing their result."""
    write = "out.write_text(json.dumps(value))"
    for name, do in does.items():
        value = result(name)
        text = SCRIPT.format(value=value, do=do.replace("WRITE", write))
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_benchmark_that_fails_stops_no_other(runs: Any, tmp_path: Path) -> None:
    """What became of each: fine, a bar missed, an exception, no result, nothing to compare with."""
    folder = scripts(
        tmp_path, a="WRITE", b="WRITE; sys.exit(1)", c="1 / 0", d="pass", e="sys.exit(3)", f="WRITE"
    )
    out = tmp_path / "out"
    out.mkdir()
    (out / "c.json").write_text("{}")  # of a run before
    asked = runs.Asked(out, quick=True)
    known = [runs.Benchmark(name, 60, 60) for name in "abcdef"]
    said: list[str] = []
    ended, interrupted = runs.run_all(known, asked, folder, said.append)
    assert not interrupted
    assert [(each.name, each.status) for each in ended] == [
        ("a", 0), ("b", 1), ("c", 2), ("d", 2), ("e", 0), ("f", 0)
    ]  # fmt: skip
    assert [each.said.partition(":")[0] for each in ended] == [
        "fine", "missed a bar", "FAILED with exit status 1",
        "FAILED with exit status 0 and no result", "left out", "fine",
    ]  # fmt: skip
    assert [path.name for path in runs.results(out, known)] == ["a.json", "b.json", "f.json"]
    assert said[0].startswith("6 benchmarks, at most 6 min in all")
    assert said[1:3] == ["[1/6] a: running, at most 60 s", "[1/6] a: fine, 0 s"]


def test_a_benchmark_beyond_its_limit_is_stopped_with_what_it_started(
    runs: Any, tmp_path: Path
) -> None:
    """It may tidy up first; a child of it that will not end is killed."""
    do = """
deaf = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\\n"
deaf += f"os.open({str(out.parent / 'alive')!r}, os.O_WRONLY); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
try:
    time.sleep(600)
finally:
    (out.parent / "tidy").touch()
"""
    folder = scripts(tmp_path, slow=do)
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        ended = runs.run(runs.Benchmark("slow", 5, 5), runs.Asked(tmp_path), folder)
        assert (ended.said, ended.status) == ("STOPPED after its limit of 5 s", 2)
        assert (tmp_path / "tidy").exists()
        os.set_blocking(alive, True)
        assert os.read(alive, 1) == b""  # waits for the end of who could still write
    finally:
        os.close(alive)


def test_what_is_passed_on(runs: Any, tmp_path: Path) -> None:
    """The disk to those who take one, extras to those who know them, another interpreter."""
    asked = runs.Asked(
        tmp_path, quick=True, extras=("lmcache",), disk="/x", pythons={"vllm": "/py"}
    )
    by_name = {each.name: each for each in runs.BENCHMARKS}
    rivals = asked.command(by_name["rivals"], FOLDER)
    assert rivals[1:] == [
        str(FOLDER / "rivals.py"), "--json", str(tmp_path / "rivals.json"),
        "--quick", "--dir", "/x", "--with", "lmcache",
    ]  # fmt: skip
    assert "--dir" not in asked.command(by_name["restore"], FOLDER)
    assert asked.command(by_name["vllm_ttft"], FOLDER)[0] == "/py"
    assert asked.limit_s(by_name["rivals"]) > runs.Asked(tmp_path, quick=True).limit_s(
        by_name["rivals"]
    )


def test_a_quick_run_of_all_takes_less_than_half_an_hour(runs: Any, tmp_path: Path) -> None:
    """Even if every benchmark that is not asked for by name runs into its limit."""
    asked = runs.Asked(tmp_path, quick=True)
    limits = [asked.limit_s(each) for each in runs.BENCHMARKS if not each.needs]
    assert sum(limits) < 1800


def test_what_cannot_run_is_left_out_with_its_reason(runs: Any, tmp_path: Path) -> None:
    """No script, no environment; a name that nobody knows is refused with those that are."""
    folder = scripts(tmp_path, a="WRITE", c="WRITE")
    known = [
        runs.Benchmark("a", 1, 1),
        runs.Benchmark("b", 1, 1),
        runs.Benchmark("c", 1, 1, needs="e"),
    ]
    chosen, left_out = runs.choose([], runs.Asked(tmp_path), folder, known)
    assert [each.name for each in chosen] == ["a"]
    assert left_out == ["b: left out: there is no b.py", "c: left out: needs --with e"]
    chosen, left_out = runs.choose(
        ["c", "c"], runs.Asked(tmp_path, pythons={"e": "/py"}), folder, known
    )
    assert ([each.name for each in chosen], left_out) == (["c"], [])
    with pytest.raises(SystemExit, match="unknown: nope; there are a, b, c"):
        runs.choose(["nope"], runs.Asked(tmp_path), folder, known)


def test_every_benchmark_of_the_folder_is_run(runs: Any) -> None:
    """A script that nobody runs is measured by nobody."""
    there = {path.stem for path in FOLDER.glob("[a-z]*.py")} - {"report"}
    assert there <= {each.name for each in runs.BENCHMARKS}


def test_every_benchmark_has_a_section_on_how_to_read_it() -> None:
    """In benchmarks/README.md."""
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("[a-z]*.py"):
        assert f"\n## {path.name}" in text, path.name


def test_tools_bench_is_there_and_runs_in_the_repository(tmp_path: Path) -> None:
    """Executable, with the environment's python, arguments passed on as they are."""
    script = ROOT / "tools" / "bench"
    assert script.stat().st_mode & 0o111
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bench").write_text(script.read_text())
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nfor each; do echo "$each" >>{tmp_path}/asked; done\n'
    )
    (tmp_path / "python").chmod(0o700)
    (tmp_path / "tools" / "_venv").write_text(f"cd '{tmp_path}'; python='{tmp_path}/python'\n")
    (tmp_path / "tools" / "_venv-vllm").write_text("python_vllm=/v/python\n")

    def asked(*arguments: str) -> list[str]:
        (tmp_path / "asked").unlink(missing_ok=True)
        command = ["bash", str(tmp_path / "tools" / "bench"), *arguments]
        subprocess.run(command, check=True, timeout=60)
        return (tmp_path / "asked").read_text().splitlines()[2:]

    runs = ["benchmarks/_report_runs.py"]
    assert asked("--out", "a b") == [*runs, "--out", "a b"]
    assert asked("--with", "lmcache,vllm") == [
        *runs, "--vllm-python", "/v/python", "--with", "lmcache,vllm"
    ]  # fmt: skip
    (tmp_path / "tools" / "_venv-vllm").write_text("no_vllm='no build'; python_vllm=/v\n")
    assert asked("--with", "vllm") == [*runs, "--with", "vllm"]
