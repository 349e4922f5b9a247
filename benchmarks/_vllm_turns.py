"""Conversations of several turns, with the engine restarted half-way."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from _harness import NO_BAR, PAIRS_MIN, Bar, Bench, Ratio
from _vllm_engines import BLOCK, Engines, Verdicts, has_module, prompt, request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_vllm_run.process import EngineProcess

SYSTEM: Final = 2 * BLOCK + 40
"""Tokens of the system prompt that all conversations share."""
ANSWER: Final = 48
POOL_PAGES: Final = 400
"""The engine's own cache: 12,800 tokens, of about three times as many that are in use."""
LMCACHE: Final = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
LMCACHE_ENVIRONMENT: Final = {
    "LMCACHE_CHUNK_SIZE": str(BLOCK),
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
    "LMCACHE_MAX_LOCAL_DISK_SIZE": "8",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
}
"""As much host memory and disk as kvtier has."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the conversation's number, its turn's, and what the user says."""

    conversation: int
    number: int
    says: tuple[int, ...]


def turns_of(conversations: int, turns: int) -> list[Turn]:
    """Return all turns in the order in which they come: every conversation's first, and so on."""
    return [
        Turn(each, number, tuple(prompt(100 + each * turns + number, 60 + (each * 37) % 120)))
        for number in range(turns)
        for each in range(conversations)
    ]


class IdealCache:
    """What a cache of whole blocks would have, if it had room for everything at once."""

    def __init__(self) -> None:
        self._held: set[bytes] = set()

    def hits(self, ids: Sequence[int]) -> int:
        """Return how many of a prompt's full blocks it has."""
        return sum(digest in self._held for digest in _chain(ids))

    def keep(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Take in a prompt and its answer; of the last token there is no KV."""
        self._held.update(_chain([*ids, *answer[:-1]]))


def _chain(ids: Sequence[int]) -> list[bytes]:
    chain, digest = [], b""
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        block = b"".join(each.to_bytes(4, "little") for each in ids[start : start + BLOCK])
        digest = hashlib.sha256(digest + block).digest()
        chain.append(digest)
    return chain


@dataclass(slots=True)
class Session:
    """What one engine made of the conversations."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_blocks: int = 0
    ideal_hits: int = 0
    restarted_with: int = -1
    """Tokens that the first request after the restart found: with an own cache that is empty."""
    counts: dict[str, float] = field(default_factory=dict)

    def take_counts(self, counts: dict[str, float]) -> None:
        """Add what an engine counted in its life."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    @property
    def hits(self) -> float:
        """Blocks that the engine held or the store had."""
        found = [self.counts.get(f'prompt_blocks{{source="{each}"}}', 0) for each in _FOUND]
        return sum(found)


_FOUND: Final = ("local", "host", "ssd", "recomputed")


def converse(
    turns: Sequence[Turn],
    start: Callable[[], EngineProcess],
    stop: Callable[[EngineProcess], None],
    verdicts: Verdicts,
    tick: Callable[[], None],
) -> Session:
    """Serve all turns one after the other; the engine is restarted half-way."""
    session, ideal = Session(), IdealCache()
    talk: dict[int, list[int]] = {}
    engine = start()
    for index, turn in enumerate(turns):
        if index == len(turns) // 2:
            session.take_counts(engine.counts())
            stop(engine)
            engine = start()
        said = talk.setdefault(turn.conversation, prompt(7, SYSTEM))
        ids = [*said, *turn.says]
        (served,) = engine.serve([request(ids, ANSWER)])
        verdicts.stock(ids, served)  # the first engine is stock vLLM
        session.ttft_s.append(served.ttft_s)
        if index == len(turns) // 2:
            session.restarted_with = served.cached
        session.prompt_blocks += len(ids) // BLOCK
        session.ideal_hits += ideal.hits(ids)
        ideal.keep(ids, served.tokens)
        talk[turn.conversation] = [*ids, *served.tokens]
        tick()
    session.take_counts(engine.counts())
    stop(engine)
    return session


def conversations(bench: Bench, engines: Engines, python: str) -> None:
    """Compare kvtier with an ideal cache, with vLLM's own cache alone, and with LMCache."""
    options = bench.options
    shape = (2, 2) if options.smoke else (8, 4) if options.quick else (20, 5)
    turns = turns_of(*shape)
    length = SYSTEM + shape[1] * (180 + ANSWER) + BLOCK
    pages = {"num_gpu_blocks_override": max(POOL_PAGES, length // 32 + 8)}
    settings = {"host_bytes": "1GiB", "ssd_bytes": "8GiB"}
    ways: dict[str, Callable[[], EngineProcess]] = {
        "own_cache": lambda: engines.stock(length, **pages),
        "kvtier": lambda: engines.kvtier("turns", length, settings, **pages),
    }
    if has_module(python, "lmcache"):
        disk = {"LMCACHE_LOCAL_DISK": f"file://{engines.folder}/lmcache/"}
        env = {**LMCACHE_ENVIRONMENT, **disk}
        ways["lmcache"] = lambda: engines.other(LMCACHE, length, env, **pages)
    else:
        bench.console.print(f"LMCache's connector is not compared: {python} has no lmcache")
    sessions: dict[str, Session] = {}
    with bench.progress("conversations", len(ways) * len(turns)) as tick:
        for name, start in ways.items():
            sessions[name] = converse(turns, start, engines.stop, engines.verdicts, tick)
    if "lmcache" in sessions and not sessions["lmcache"].restarted_with:
        bench.console.print("LMCache's connector found nothing after the restart: not compared")
        del sessions["lmcache"]
    _add(bench, sessions, len(turns))


def _add(bench: Bench, sessions: dict[str, Session], requests: int) -> None:
    mine = sessions["kvtier"]
    ideal = mine.ideal_hits / mine.prompt_blocks
    rate = mine.hits / mine.prompt_blocks
    enough = max(requests, PAIRS_MIN)
    values: dict[str, Any] = {"hit_rate": rate, "ideal_hit_rate": ideal}
    reached = rate / ideal if ideal else 1.0
    bench.add(Ratio("hit_rate_vs_ideal", reached, Bar(low=0.999), 0.0, enough))
    for name, session in sessions.items():
        for percent in (50, 99):
            seconds = quantile(session.ttft_s, percent)
            values[f"{name}_ttft_p{percent}_s"] = seconds
            if name != "kvtier":
                gain = seconds / quantile(mine.ttft_s, percent)
                title = f"turns_{name}_vs_kvtier_p{percent}"
                bench.add(Ratio(title, gain, NO_BAR, 0.0, enough))
    for name, value in values.items():
        bench.console.print(f"  {name:<26} {value:.3f}", highlight=False)
    bench.results.append({"case": "turns", "requests": requests, "counts": mine.counts, **values})


def quantile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, between the two values next to it."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
