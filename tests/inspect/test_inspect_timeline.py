from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from kvtier.trace import Trace
from kvtier.trace_files import to_json_lines
from kvtier_inspect.cli import run
from kvtier_inspect.render import ExitCode
from kvtier_inspect.tracing import read_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a file with a read, its copy, a step meanwhile, and another restore's step."""
    noted = Trace()
    read = noted.add("read", "ssd", 1.0, 3.0, session=1, start=4, stop=5, nbytes=1 << 20)
    noted.add("recompute", "compute", 1.0, 3.5, session=1, start=0, stop=3)
    noted.add("copy", "host", 3.0, 4.0, session=1, start=4, stop=5, nbytes=1 << 20, after=(read,))
    noted.add("recompute", "compute", 2.0, 9.0, session=2, start=0, stop=9)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(to_json_lines(noted.events)))
    return path


def test_every_form_is_written_and_read_again(trace: Path, tmp_path: Path) -> None:
    """Pictures, Perfetto's JSON, Chakra and JSON lines, each private; ours can be read back."""
    out = {kind: tmp_path / f"o.{kind}" for kind in ("svg", "html", "perfetto", "chakra", "jsonl")}
    asked = [part for kind, path in out.items() for part in (f"--{kind}", str(path))]
    assert run(["timeline", str(trace), *asked]) == ExitCode.FINE
    assert out["svg"].read_text().startswith("<svg")
    assert "<svg" in out["html"].read_text()
    assert len(json.loads(out["perfetto"].read_text())["traceEvents"]) > 4
    assert read_trace(str(out["jsonl"])) == read_trace(str(trace))
    assert [e.what for e in read_trace(str(out["chakra"]))] == [
        e.what for e in read_trace(str(trace))
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.values()} == {0o600}


def test_what_is_shown(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per lane and restore, and what each lane did, within the terminal."""
    assert run(["timeline", str(trace)]) == ExitCode.FINE
    shown = capsys.readouterr().out
    assert "compute 1" in shown
    assert "compute 2" in shown
    assert "while compute was" in shown
    assert run(["timeline", str(trace), "--session", "1", "--json"]) == ExitCode.FINE
    value = json.loads(capsys.readouterr().out)
    assert (value["events"], value["seconds"]) == (3, pytest.approx(3.0))
    lanes = {lane["lane"]: lane for lane in value["lanes"]}
    assert lanes["ssd"] == {
        "lane": "ssd", "events": 1, "busy_s": pytest.approx(2.0), "overlap_s": pytest.approx(2.0),
        "bytes": 1 << 20,
    }  # fmt: skip


def test_what_a_faster_lane_would_be_worth(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the SSD twice as fast the copy begins after one second; the step is the longest."""
    assert run(["timeline", str(trace), "--session", "1", "--faster", "ssd=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("content", "faster", "code", "says"),
    [
        (b"", (), ExitCode.CANNOT_OPEN, "t.bad"),
        (b"{}\n", (), ExitCode.CANNOT_OPEN, "line 1"),
        (b"\xff\xff\xff\xff", (), ExitCode.CANNOT_OPEN, "t.bad"),
        (None, (), ExitCode.CANNOT_OPEN, "t.bad"),
        ("good", ("gpu=2",), ExitCode.USAGE, "gpu=2"),
        ("good", ("ssd=x",), ExitCode.USAGE, "ssd=x"),
        ("good", ("ssd=0",), ExitCode.USAGE, "positive"),
    ],
)
def test_what_cannot_be_shown_is_said(
    trace: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes | str | None,
    faster: tuple[str, ...],
    code: ExitCode,
    says: str,
) -> None:
    """A missing, empty or foreign file and a wrong lane give a line and a code, no traceback."""
    path = trace
    if content != "good":
        path = trace.with_name("t.bad")
        if isinstance(content, bytes):
            path.write_bytes(content)
    asked = [part for each in faster for part in ("--faster", each)]
    assert run(["timeline", str(path), *asked]) == code
    assert says in capfd.readouterr().err
