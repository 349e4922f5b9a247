"""What is asked for, and when: arrivals, prompt lengths, sharing. Pure, and the same every time.

A prompt is its blocks, each named by a digest; equal beginnings are equal prefixes, as in a trace.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _replay_traces import Trace

BLOCK: Final = 256
"""Tokens of a block."""
DIGEST_TOKENS: Final = 8
"""Token ids that a digest is: 32 bytes of u32."""
ARRIVALS: Final = ("poisson", "fixed", "bursty", "closed")
BURST: Final = 8
"""Requests that come at once in bursty arrivals."""
CONVERSATIONS: Final = 16
"""Conversations that take turns at a time."""
TOKENS_MAX: Final = 1 << 20
PERCENTILES: Final = (50, 95, 99)

Prompt = tuple[bytes, ...]


def percentiles(values: Sequence[float]) -> list[float]:
    """Return p50, p95 and p99: the smallest value that so many percent do not exceed; [] of none.

    Never an average of two, which would be a latency that nothing had.
    """
    ranked = sorted(values)
    return [ranked[math.ceil(each / 100 * len(ranked)) - 1] for each in PERCENTILES if ranked]


# -- when


def arrivals(kind: str, rate: float, count: int, seed: int) -> list[float]:
    """Return when ``count`` requests come, in seconds, at ``rate`` a second in the long run.

    "poisson": independent of each other; "fixed": evenly; "bursty": ``BURST`` at once, the bursts
    independent of each other.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate: {rate!r} is not a positive number of requests a second")
    if kind == "fixed":
        return [each / rate for each in range(count)]
    if kind not in ARRIVALS or kind == "closed":
        raise ValueError(f"arrivals: {kind!r} is not one of {', '.join(ARRIVALS[:-1])}")
    draw = random.Random(seed)  # noqa: S311 - a benchmark repeats itself
    size = BURST if kind == "bursty" else 1
    begins = accumulate(draw.expovariate(rate / size) for _ in range(-(-count // size)))
    return [begin for begin in begins for _ in range(size)][:count]


def rescaled(times: Sequence[float], rate: float) -> list[float]:
    """Return a trace's times from 0 on, faster or slower, so that their mean rate is ``rate``."""
    span = times[-1] - times[0]
    if span <= 0:
        return [0.0] * len(times)
    pace = (len(times) - 1) / rate / span
    return [(each - times[0]) * pace for each in times]


# -- how long


def lengths(text: str, count: int, seed: int) -> list[int]:
    """Return ``count`` prompt lengths in whole blocks, one at least.

    ``text`` is in tokens: "8192"; "uniform:1024-16384"; "lognormal:4096,0.5" (median, sigma);
    "list:1024,2048,..." (in turn). Raises ``ValueError`` naming what is wrong.
    """
    draw = random.Random(seed)  # noqa: S311 - a benchmark repeats itself
    kind, _, rest = text.partition(":")
    try:
        if kind == "uniform":
            low, high = (_tokens(each) for each in rest.split("-"))
            tokens = [draw.uniform(low, high) for _ in range(count)]
        elif kind == "lognormal":
            median, sigma = rest.split(",")
            spread = float(sigma)
            mean = math.log(_tokens(median))
            tokens = [min(draw.lognormvariate(mean, spread), TOKENS_MAX) for _ in range(count)]
        elif kind == "list":
            given = [_tokens(each) for each in rest.split(",")]
            tokens = [given[each % len(given)] for each in range(count)]
        else:
            tokens = [_tokens(text)] * count
    except ValueError as error:
        raise ValueError(
            f"lengths: {text!r} is not '8192', 'uniform:1024-16384', 'lognormal:4096,0.5' or "
            f"'list:1024,2048' ({error})"
        ) from None
    return [max(1, int(each) // BLOCK) for each in tokens]


def _tokens(text: str) -> float:
    value = float(text)
    if not 0 < value <= TOKENS_MAX:
        raise ValueError(f"{text} is not in (0, {TOKENS_MAX}]")
    return value


# -- who shares what with whom


@dataclass(frozen=True, slots=True)
class Sharing:
    """What prompts have in common.

    All begin with ``system`` blocks. Behind them comes one of ``prefixes`` texts, the k-th most
    liked asked for in proportion to k ** -``zipf``, and then ``fresh`` (a part) of the prompt that
    nobody else has; or, with ``turns``, a conversation that grows to its full length in so many.
    """

    system: int = 0
    zipf: float = 1.0
    prefixes: int = 64
    fresh: float = 0.1
    turns: int = 0

    @classmethod
    def parse(cls, text: str) -> Sharing:
        """Read "system:2048,zipf:1.1,prefixes:64,fresh:0.1" or "system:2048,turns:5"."""
        given: dict[str, Any] = {}
        for each in filter(None, text.split(",")):
            name, _, value = each.partition(":")
            kind = {"system": int, "zipf": float, "prefixes": int, "fresh": float, "turns": int}
            try:
                given[name] = kind[name](value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"share: {each!r} is none of system:TOKENS, zipf:S, prefixes:N, fresh:PART, "
                    "turns:N"
                ) from None
        given["system"] = given.get("system", 0) // BLOCK
        made = cls(**given)
        if made.prefixes < 1 or not 0 <= made.fresh <= 1 or min(made.system, made.turns) < 0:
            raise ValueError(f"share: {text!r} has a number that makes no sense")
        return made


def _block(*what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def _system(blocks: int, length: int) -> Prompt:
    return tuple(_block("system", each) for each in range(min(blocks, length)))


def prefix(sharing: Sharing, rank: int, blocks: int) -> Prompt:
    """Return the part that all who ask for the ``rank``-th text share, system prompt included."""
    shared = max(1, blocks - max(1, round(sharing.fresh * blocks)) if sharing.fresh else blocks)
    head = _system(sharing.system, shared)
    return head + tuple(_block("prefix", rank, each) for each in range(len(head), shared))


def prompts(sharing: Sharing, sizes: Sequence[int], count: int, seed: int) -> list[Prompt]:
    """Return ``count`` prompts; the k-th text or conversation is ``sizes[k % len]`` blocks long."""
    draw = random.Random(seed)  # noqa: S311 - a benchmark repeats itself
    made = _turns if sharing.turns else _texts
    found = made(sharing, sizes, draw)
    return [next(found) for _ in range(count)]


def _texts(sharing: Sharing, sizes: Sequence[int], draw: random.Random) -> Iterator[Prompt]:
    ranks = range(sharing.prefixes)
    weights = list(accumulate((rank + 1) ** -sharing.zipf for rank in ranks))
    number = 0
    while True:
        (rank,) = draw.choices(ranks, cum_weights=weights)
        blocks = sizes[rank % len(sizes)]
        head = prefix(sharing, rank, blocks)
        yield head + tuple(_block("fresh", number, each) for each in range(len(head), blocks))
        number += 1


def _turns(sharing: Sharing, sizes: Sequence[int], draw: random.Random) -> Iterator[Prompt]:
    begun = 0
    talks: list[tuple[int, int]] = []  # which conversation, and how many turns it had
    while True:
        while len(talks) < CONVERSATIONS:
            talks.append((begun, 0))
            begun += 1
        talk, had = talks.pop(draw.randrange(len(talks)))
        whole = sizes[talk % len(sizes)]
        blocks = max(1, round(whole * (had + 1) / sharing.turns))
        head = _system(sharing.system, blocks)
        yield head + tuple(_block("talk", talk, each) for each in range(len(head), blocks))
        if had + 1 < sharing.turns:
            talks.append((talk, had + 1))


def of_trace(trace: Trace, blocks_max: int) -> list[Prompt]:
    """Return a trace's prompts in blocks of ours, each cut to the first ``blocks_max``."""
    times = trace.block_tokens // BLOCK
    return [
        tuple(_block(digest, part) for digest in request.hashes for part in range(times))[
            :blocks_max
        ]
        for request in trace.requests
    ]


# -- what it comes to


def tokens(prompt: Prompt) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a prompt's token ids: every block repeats the numbers that its digest is."""
    digests = np.frombuffer(b"".join(prompt), np.uint32).reshape(len(prompt), DIGEST_TOKENS)
    return np.tile(digests, BLOCK // DIGEST_TOKENS).reshape(-1).astype(np.int64)


def working_set(asked: Sequence[Prompt]) -> int:
    """Return how many different blocks there are.

    A block's name must say what is before it: those of ``prompts`` and of traces do.
    """
    return len({digest for prompt in asked for digest in prompt})


def size(text: str, whole: int, parse: Callable[[str], int]) -> int:
    """Return bytes: "40%" of ``whole``, else what ``parse`` makes of it."""
    if not text.endswith("%"):
        return parse(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < math.inf:
        raise ValueError(f"{text!r} is not a part of the working set like '40%'")
    return round(share * whole)
