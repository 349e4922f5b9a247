"""The engine's side: an ``LLM`` in this process, asked by lines of JSON; needs vLLM.

Requests are token ids. A time is taken after each engine step, as a client beside the engine would
see its tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any, Final, Self

from kvtier_vllm.tally import PREFIX

__all__ = ["Engine", "answer_all", "counts_of", "main"]

IDLE_STEPS_MAX: Final = 100_000
"""Steps without requests that what is under way may take to end."""
DECODED_MIN: Final = 4
"""Tokens that each of the others has before the measured request comes."""


class Engine:
    """One ``vllm.LLM``, and what is asked of it; the verbs are ``EngineProcess``'s."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._requests = 0

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start the engine; say what it resolved."""
        from vllm import LLM, __version__
        from vllm.config import KVTransferConfig

        given = dict(arguments)
        if given.get("kv_transfer_config") is not None:
            given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
        begun = time.perf_counter()
        self._llm = LLM(**given, skip_tokenizer_init=True, disable_log_stats=False)
        config = self._llm.llm_engine.vllm_config
        return {
            "seconds": time.perf_counter() - begun,
            "vllm": __version__,
            "scheduler": type(self._scheduler).__name__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "block_size": config.cache_config.block_size,
            "blocks": self._pool.num_gpu_blocks,
        }

    def serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer requests, all at once."""
        with _Core() as core:
            names = [self._add(each) for each in requests]
            served = {name: _Request() for name in names}
            while any(not each.done for each in served.values()):
                self._step(served)
        self._settle()
        return {"served": [served[name].to_json() for name in names], "held": core.held}

    def meanwhile(self, others: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request while others decode."""
        names = [self._add(each) for each in others]
        served = {name: _Request() for name in names}
        while any(len(each.tokens) < DECODED_MIN for each in served.values()):
            self._step(served)
        for each in served.values():
            each.restart()
        with _Core() as core:
            mine = self._add(request)
            served[mine] = _Request()
            while not served[mine].tokens:
                self._step(served)
        self._llm.llm_engine.abort_request([*names, mine], internal=True)
        self._settle()
        found = [served[name].to_json() for name in (mine, *names)]
        return {"served": found, "held": core.held}

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self._settle()
        if not self._llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: blocks are still in use")

    def leaked(self) -> int:
        """Return how many blocks are not free, besides vLLM's own null block."""
        self._settle()
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def counts(self) -> dict[str, float]:
        """Return kvtier's metrics."""
        return counts_of(self._llm)

    def stop(self) -> None:
        """End the engine: its store is flushed."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        self._requests += 1
        name = f"request-{self._requests}"
        params = request.get("params")
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": request["ids"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        self._llm.llm_engine.add_request(name, prompt, sampling)
        return name

    def _step(self, served: dict[str, _Request]) -> None:
        outputs = self._llm.llm_engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in served:
                served[output.request_id].take(output, now)

    def _settle(self) -> None:
        """Step until nothing is left: neither requests nor what the connector has under way."""
        for _ in range(IDLE_STEPS_MAX):
            if not (
                self._scheduler.has_requests() or self._llm.llm_engine.has_unfinished_requests()
            ):
                return
            self._llm.llm_engine.step()
        raise RuntimeError(f"the engine is still busy after {IDLE_STEPS_MAX} steps")


_VLLM_LABELS: Final = frozenset({"model_name", "engine"})


class _Core:
    """Tells how much of the time that this thread wanted its core it had it."""

    held = 1.0

    def __enter__(self) -> Self:
        self._cpu_s, self._delay_s = time.thread_time(), _run_delay_s()
        return self

    def __exit__(self, *_: object) -> None:
        cpu_s, delay_s = time.thread_time() - self._cpu_s, _run_delay_s() - self._delay_s
        self.held = cpu_s / (cpu_s + delay_s) if cpu_s + delay_s else 1.0


def _run_delay_s() -> float:
    """Return how long this thread waited for a core so far; 0 if the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def counts_of(llm: Any) -> dict[str, float]:
    """Return kvtier's metrics of an ``LLM``, as its endpoint would have them."""
    from vllm.v1.metrics.reader import Counter, Histogram

    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not metric.name.startswith(PREFIX):
            continue
        labels = [f'{k}="{v}"' for k, v in metric.labels.items() if k not in _VLLM_LABELS]
        name = metric.name.removeprefix(PREFIX)
        tail = "{" + ",".join(labels) + "}" if labels else ""
        if isinstance(metric, Counter):
            found[name + tail] = metric.value
        elif isinstance(metric, Histogram):
            found[f"{name}_count{tail}"] = metric.count
            found[f"{name}_sum{tail}"] = metric.sum
    return found


class _Request:
    """The tokens of one request so far, and when each was there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.done = False
        self._begun_s = time.perf_counter()
        self._times_s: list[float] = []
        self._skipped = 0
        self._cached = 0

    def take(self, output: Any, now: float) -> None:
        """Take over a step's output."""
        tokens = list(output.outputs[0].token_ids)[self._skipped :]
        self._times_s += [now - self._begun_s] * (len(tokens) - len(self.tokens))
        self.tokens = tokens
        self.done = output.finished
        self._cached = output.num_cached_tokens or 0

    def restart(self) -> None:
        """Count tokens and time from now on."""
        self._skipped += len(self.tokens)
        self._begun_s = time.perf_counter()
        self.tokens, self._times_s = [], []

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"tokens": self.tokens, "times_s": self._times_s, "cached": self._cached}


def answer_all(engine: Any, asked: IO[str], answers: IO[str]) -> None:
    """Answer each line until there are no more; what a verb raises is an answer as well."""
    for line in asked:
        question = json.loads(line)
        try:
            found = {"value": getattr(engine, question["what"])(**question["given"])}
        except Exception as error:  # noqa: BLE001 - the asking side decides what to make of it
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def main() -> None:
    """Answer on what was standard output; what vLLM prints goes to the log."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = Engine()
    try:
        answer_all(engine, sys.stdin, answers)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
