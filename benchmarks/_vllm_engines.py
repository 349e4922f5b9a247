"""What the vLLM benchmark's parts share: the engines, prompts, and what must hold at every end."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from _harness import PAIRS_MIN, Bar, Bench, Ratio, Trial

from kvtier_demo.model import smollm2
from kvtier_vllm_run.process import CPU_ENVIRONMENT, EngineProcess, Served, transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = 256
PAGE: Final = 32
"""Tokens of one of vLLM's blocks: the least that its CPU backend takes."""
SUFFIX: Final = 32
"""Tokens behind a prompt's blocks."""
BLOCK_BYTES: Final = 2 * 30 * 3 * 64 * 4 * BLOCK
"""K and V of 30 layers, 3 heads of 64 float32."""
ARGUMENTS: Final = {
    "dtype": "float32",  # restored and recomputed tokens are compared; chunking changes bfloat16's
    "enforce_eager": True,
    "block_size": PAGE,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "seed": 0,
}
SCHEDULER: Final = "kvtier_vllm.scheduler.HybridScheduler"
MISSING: Final = (
    "vLLM is not installed in {python}: tools/test makes .venv-vllm/ where it can be had, or name "
    "an interpreter that has it with --python"
)


def chosen_python(given: str) -> str:
    """Return the interpreter that has vLLM; ``SystemExit`` says what to do if there is none."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    python = given or (str(own) if own.exists() else sys.executable)
    if not has_module(python, "vllm"):
        raise SystemExit(MISSING.format(python=python))
    return python


def has_module(python: str, name: str) -> bool:
    """Whether an interpreter has a module."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        done = subprocess.run([python, "-c", look], check=False, timeout=60)  # noqa: S603 - chosen
    except OSError:
        return False
    return done.returncode == 0


def prompt(seed: int, tokens: int) -> list[int]:
    """Return token ids that share no block with those of another seed."""
    return [3 + (seed * 7919 + i * 31 + i * i // 7 + seed * i) % 40_000 for i in range(tokens)]


def request(ids: Sequence[int], max_tokens: int = 1) -> dict[str, Any]:
    """Return a request for greedy tokens."""
    return {"ids": list(ids), "max_tokens": max_tokens}


@dataclass(slots=True)
class Verdicts:
    """What must be nothing at the end of every scenario, added up over the run."""

    wrong_tokens: int = 0
    compared: int = 0
    leaked_blocks: int = 0
    pools: int = 0
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Prompts and their answers by stock vLLM."""

    def stock(self, ids: Sequence[int], served: Served) -> None:
        """Take stock vLLM's answer, which must always be the same."""
        wanted = self.known.setdefault(tuple(ids), served.tokens)
        self.compare(wanted, served.tokens)

    def same(self, ids: Sequence[int], served: Served) -> None:
        """Compare an answer with stock vLLM's to the same prompt."""
        self.compare(self.known[tuple(ids)], served.tokens)

    def compare(self, wanted: Sequence[int], got: Sequence[int]) -> None:
        """Count tokens that differ; of answers of two lengths, those that both have."""
        self.compared += min(len(wanted), len(got))
        self.wrong_tokens += sum(a != b for a, b in zip(wanted, got, strict=False))

    def ratios(self) -> list[Ratio]:
        """Return both counts; nothing compared decides nothing."""
        return [
            Ratio("wrong_tokens", self.wrong_tokens, Bar(high=0), 0.0, min(self.compared, 99)),
            Ratio(
                "leaked_blocks", self.leaked_blocks, Bar(high=0), 0.0, max(self.pools, PAIRS_MIN)
            ),
        ]


class Engines:
    """The engines of a scenario; each is a process, looked at for leaks when the scenario ends."""

    def __init__(self, bench: Bench, python: str, folder: Path, verdicts: Verdicts) -> None:
        self.bench = bench
        self.verdicts = verdicts
        self.folder = folder
        self._python = python
        self._model = str(smollm2())
        self._stack = ExitStack()
        self._running: list[EngineProcess] = []
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                for engine in self._running:
                    self._look(engine)

    def stock(self, max_model_len: int, **arguments: Any) -> EngineProcess:
        """Start vLLM without a connector."""
        return self._start({"max_model_len": max_model_len, **arguments})

    def kvtier(
        self,
        store: str,
        max_model_len: int,
        settings: Mapping[str, Any],
        **arguments: Any,
    ) -> EngineProcess:
        """Start vLLM with a store of that name and kvtier's scheduler."""
        config = transfer(self.folder / store, **settings)
        given = {"scheduler_cls": SCHEDULER, "kv_transfer_config": config, **arguments}
        return self._start({"max_model_len": max_model_len, **given})

    def other(
        self,
        config: Mapping[str, Any],
        max_model_len: int,
        env: Mapping[str, str],
        **arguments: Any,
    ) -> EngineProcess:
        """Start vLLM with another connector."""
        given = {"max_model_len": max_model_len, "kv_transfer_config": config, **arguments}
        return self._start(given, env)

    def stop(self, engine: EngineProcess) -> None:
        """End one before the scenario does."""
        self._look(engine)
        self._running.remove(engine)
        engine.close()

    def _start(
        self, arguments: dict[str, Any], env: Mapping[str, str] | None = None
    ) -> EngineProcess:
        self._started += 1
        log = self.folder / f"engine-{self._started}.log"
        given = {"model": self._model, **ARGUMENTS, **arguments}
        env = {**CPU_ENVIRONMENT, **(env or {})}
        engine = EngineProcess(self._python, given, log=log, env=env)
        self._stack.callback(engine.close)
        self._running.append(engine)
        self.bench.settings.setdefault("vllm", engine.started["vllm"])
        return engine

    def _look(self, engine: EngineProcess) -> None:
        self.verdicts.leaked_blocks += engine.leaked()
        self.verdicts.pools += 1


def ttft(
    engine: EngineProcess, ids: Sequence[int], check: Callable[[Sequence[int], Served], None]
) -> Trial:
    """Serve one prompt that is not in the engine's own cache; its time to the first token."""
    engine.forget()
    (served,) = engine.serve([request(ids)])
    check(ids, served)
    return Trial(served.ttft_s, engine.held, {"cached": served.cached})
