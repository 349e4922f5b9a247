"""The driving side: start an engine's process, ask it, and end it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CPU_ENVIRONMENT",
    "EngineFailed",
    "EngineProcess",
    "Served",
    "environment",
    "transfer",
]

ROOT: Final = Path(__file__).parents[2]
START_S_MAX: Final = 300.0
"""How long an engine may take until it answers; a model on a slow disk takes a minute."""
CALL_S_MAX: Final = 600.0
"""How long one call may take."""
STOP_S_MAX: Final = 60.0
"""How long an engine may take to flush its store and end."""
LOG_LINES_SHOWN: Final = 15

CPU_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads collapse beside anything else that runs
}
_COMMON: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineFailed(Exception):
    """The engine's process said no, ended, or was too slow; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request. Times are seconds since it was added."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    """When each token was there."""
    cached: int
    """Prompt tokens that the engine did not compute, as vLLM counts them."""

    @property
    def ttft_s(self) -> float:
        """The time to the first token."""
        return self.times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """The times between tokens."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's environment: this process's, quiet and offline, and ``extra``."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), str(ROOT / "tools")])
    return {**os.environ, **_COMMON, **extra, "PYTHONPATH": path}


def transfer(path: Path | str, **settings: Any) -> dict[str, Any]:
    """Return vLLM's transfer configuration for a kvtier store, as the README has it."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": str(path), **settings},
    }


class EngineProcess:
    """An engine in a process; for one thread. Close it, or use it as a scope.

    ``python`` has vLLM; ``arguments`` are ``vllm.LLM``'s. Each call raises ``EngineFailed`` if the
    engine does.
    """

    def __init__(
        self,
        python: str,
        arguments: Mapping[str, Any],
        *,
        log: Path,
        env: Mapping[str, str] = CPU_ENVIRONMENT,
        command: Sequence[str] = ("-m", "kvtier_vllm_run.engine"),
        start_s_max: float = START_S_MAX,
    ) -> None:
        self.held = 1.0
        """The share of the last call's computing in which the engine's thread had a core."""
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, in the chosen Python
                [python, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(env),
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process without its pipes")
        self._questions: IO[bytes] = self._process.stdin
        self._answers: queue.Queue[str] = queue.Queue()
        self._pump = threading.Thread(
            target=_pump, args=(self._process.stdout, self._answers), daemon=True
        )
        self._pump.start()
        try:
            self.started: dict[str, Any] = self._ask(
                "start", start_s_max, {"arguments": dict(arguments)}
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(
        self, requests: Sequence[Mapping[str, Any]], timeout_s: float = CALL_S_MAX
    ) -> list[Served]:
        """Answer requests, all at once: {"ids", "max_tokens"}, and if wanted "salt", "params"."""
        return self._served("serve", timeout_s, requests=list(requests))

    def meanwhile(
        self,
        others: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
        timeout_s: float = CALL_S_MAX,
    ) -> tuple[Served, list[Served]]:
        """Serve ``request`` once ``others`` are decoding; stop all when its first token is there.

        Returns what came of it, and the tokens that the others got from then on.
        """
        found = self._served("meanwhile", timeout_s, others=list(others), request=request)
        return found[0], found[1:]

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the store keeps what it has."""
        self._ask("forget", CALL_S_MAX)

    def leaked(self) -> int:
        """Return how many of the engine's blocks are not free, once nothing is under way."""
        return int(self._ask("leaked", CALL_S_MAX))

    def counts(self) -> dict[str, float]:
        """Return kvtier's metrics as the engine's endpoint has them: name{label,...} -> value."""
        counts: dict[str, float] = self._ask("counts", CALL_S_MAX)
        return counts

    def close(self) -> None:
        """End the engine; its store is flushed."""
        with suppress(OSError):
            self._questions.close()  # the other side ends with its input
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S_MAX)
        self._pump.join(STOP_S_MAX)

    def _served(self, what: str, timeout_s: float, **given: Any) -> list[Served]:
        found = self._ask(what, timeout_s, given)
        self.held = float(found["held"])
        return [
            Served(tuple(each["tokens"]), tuple(each["times_s"]), each["cached"])
            for each in found["served"]
        ]

    def _ask(self, what: str, timeout_s: float, given: Mapping[str, Any] | None = None) -> Any:
        line = json.dumps({"what": what, "given": dict(given or {})}) + "\n"
        try:
            self._questions.write(line.encode())
            self._questions.flush()
            line = self._answers.get(timeout=timeout_s)
        except OSError as error:
            raise EngineFailed(self._say(what, f"the engine is gone ({error})")) from error
        except queue.Empty:
            self._process.kill()
            raise EngineFailed(self._say(what, f"no answer in {timeout_s:.0f} s")) from None
        if not line:
            self._answers.put(line)  # for whoever asks next
            raise EngineFailed(self._say(what, "the engine ended"))
        answer = json.loads(line)
        if "value" not in answer:
            raise EngineFailed(self._say(what, answer["error"]))
        return answer["value"]

    def _say(self, what: str, why: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"{what}: {why}", *lines[-LOG_LINES_SHOWN:]])


def _pump(stream: IO[bytes], into: queue.Queue[str]) -> None:
    """Pass on lines, and an empty one at the end, so that a wait for an answer can end in time."""
    with stream:
        for line in stream:
            into.put(line.decode())
    into.put("")
