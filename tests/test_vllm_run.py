from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier_vllm_run.process import EngineFailed, EngineProcess, Served, transfer

if TYPE_CHECKING:
    from pathlib import Path

FAKE = """
import os, sys
from kvtier_vllm_run.engine import answer_all

class Fake:
    def start(self, arguments):
        print("starting", file=sys.stderr)
        if arguments.get("refuse"):
            raise ValueError("no such model")
        return {"given": arguments}
    def serve(self, requests):
        one = {"times_s": [0.5, 0.75], "cached": 3}
        served = [{"tokens": [each["ids"][0], 7], **one} for each in requests]
        return {"served": served, "held": 0.5}
    def meanwhile(self, others, request):
        return self.serve([request, *others])
    def forget(self):
        raise RuntimeError("blocks are still in use")
    def leaked(self):
        print("the last thing it said", file=sys.stderr)
        os._exit(9)
    def counts(self):
        import time
        time.sleep(60)

answer_all(Fake(), sys.stdin, sys.stdout)
print("flushed", file=sys.stderr)
"""


def engine(folder: Path, **arguments: Any) -> EngineProcess:
    """Start a process that answers as an engine would."""
    log = folder / "engine.log"
    return EngineProcess(sys.executable, arguments, log=log, env={}, command=("-c", FAKE))


def test_an_engine_is_started_asked_and_ended(tmp_path: Path) -> None:
    """Each verb's answer comes back as what it is, and the end lets the engine flush."""
    with engine(tmp_path, model="m") as one:
        assert one.started == {"given": {"model": "m"}}
        (served,) = one.serve([{"ids": [4], "max_tokens": 2}])
        assert served == Served((4, 7), (0.5, 0.75), 3)
        assert (served.ttft_s, served.gaps_s, one.held) == (0.5, [0.25], 0.5)
        mine, others = one.meanwhile([{"ids": [5], "max_tokens": 2}], {"ids": [6], "max_tokens": 1})
        assert (mine.tokens, [each.tokens for each in others]) == ((6, 7), [(5, 7)])
    assert (tmp_path / "engine.log").read_text().splitlines() == ["starting", "flushed"]


def test_what_a_verb_raises_is_raised_here_and_the_engine_lives(tmp_path: Path) -> None:
    """A failed call does not end the process."""
    with engine(tmp_path) as one:
        with pytest.raises(EngineFailed, match="forget: RuntimeError: blocks are still in use"):
            one.forget()
        assert one.serve([{"ids": [4], "max_tokens": 2}])[0].cached == 3


def test_an_engine_that_ends_is_said_with_its_last_words(tmp_path: Path) -> None:
    """Nobody waits for an answer that cannot come."""
    with engine(tmp_path) as one:
        with pytest.raises(EngineFailed, match=r"(?s)leaked: the engine ended.*last thing it said"):
            one.leaked()
        with pytest.raises(EngineFailed, match="the engine"):
            one.forget()


def test_an_engine_that_does_not_start_is_ended(tmp_path: Path) -> None:
    """Its reason is what is raised."""
    with pytest.raises(EngineFailed, match="start: ValueError: no such model"):
        engine(tmp_path, refuse=True)
    assert "flushed" in (tmp_path / "engine.log").read_text()


def test_a_call_has_its_time(tmp_path: Path) -> None:
    """An engine that hangs is killed, not waited for."""
    with engine(tmp_path) as one, pytest.raises(EngineFailed, match="counts: no answer in 1 s"):
        one._ask("counts", 1.0)


def test_settings_reach_the_connector_as_the_readme_has_them() -> None:
    """Whatever is measured is measured as it is documented."""
    config = transfer("/nvme/kvtier", host_bytes="1GiB")
    assert config["kv_connector_extra_config"] == {"path": "/nvme/kvtier", "host_bytes": "1GiB"}
    assert config["kv_load_failure_policy"] == "recompute"
