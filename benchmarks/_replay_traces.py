"""Traces of real requests, as prompts of chained block hashes (``data/README.md``).

Every id counts as a whole block, also that of tokens which do not fill one: so do the numbers that
these traces are known by. ``Request.tokens`` has what they really were.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

DATA: Final = Path(__file__).parent / "data"
TRACE_BYTES_MAX: Final = 64 << 20
"""A file that unpacks to more is not one of ours."""
MOONCAKE_TOKENS: Final = 512
AGENTIC_IDS: Final = 4
AGENTIC_TOKENS: Final = 64 * AGENTIC_IDS
SESSIONS: Final = ("0219", "0222")
USERS: Final = 60
USERS_WITHIN_S: Final = 3 * 3600.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, its blocks' hashes, and how many tokens it really has."""

    at_s: float
    hashes: tuple[bytes, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they came, in blocks of ``block_tokens``."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    @property
    def asked(self) -> int:
        """How many blocks all prompts have."""
        return sum(len(request.hashes) for request in self.requests)

    @property
    def unique(self) -> int:
        """How many different blocks there are."""
        return len({digest for request in self.requests for digest in request.hashes})

    @property
    def longest(self) -> int:
        """How many blocks the longest prompt has."""
        return max(len(request.hashes) for request in self.requests)

    def first(self, requests: int) -> Trace:
        """Return the beginning of the trace."""
        return Trace(self.name, self.block_tokens, self.requests[:requests])


class _Chain:
    """Hashes of blocks from what each holds and the hash before; equal ones are one object."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def of(self, root: str, blocks: Iterable[object]) -> tuple[bytes, ...]:
        digest, hashes = root.encode(), []
        for block in blocks:
            digest = hashlib.sha256(digest + repr(block).encode()).digest()
            hashes.append(digest := self._known.setdefault(digest, digest))
        return tuple(hashes)


def read(name: str, folder: Path = DATA) -> bytes:
    """Return one of the files, unpacked."""
    packed = (folder / f"{name}.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=TRACE_BYTES_MAX)


def mooncake(name: str, lines: bytes) -> Trace:
    """Read a trace of a line a request."""
    chain = _Chain()
    requests = [
        Request(each["timestamp"] / 1e3, chain.of(name, each["hash_ids"]), each["input_length"])
        for each in map(json.loads, lines.splitlines())
    ]
    return Trace(name, MOONCAKE_TOKENS, tuple(requests))


def nested(requests: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the requests that have a prompt, those of sub-agents after the one that began them."""
    for request in requests:
        if request.get("hash_ids"):
            yield request
        yield from nested(request.get("requests", ()))


def agentic(
    name: str, sessions: Mapping[str, Any], users: Sequence[tuple[str, float, float]]
) -> Trace:
    """Return what ``users`` ask for: each one's session, when it begins, and how long a second is.

    Ids mean something within their session only, so users share what every session begins with:
    tools and system prompt. Tokens that do not fill a block are left out.
    """
    chain, requests = _Chain(), []
    for number, (session, begin_s, pace) in enumerate(users):
        found = sessions[session]
        common = (found["tool_tokens"] + found["system_tokens"]) // AGENTIC_TOKENS
        for each in nested(found["requests"]):
            ids = each["hash_ids"]
            groups = [ids[at : at + AGENTIC_IDS] for at in range(0, len(ids), AGENTIC_IDS)]
            if len(groups[-1]) < AGENTIC_IDS:
                groups.pop()
            blocks = [
                (session if at < common else (session, number), group)
                for at, group in enumerate(groups)
            ]
            at_s = begin_s + pace * each["t"]
            requests.append(Request(at_s, chain.of(name, blocks), len(blocks) * AGENTIC_TOKENS))
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, AGENTIC_TOKENS, tuple(requests))


def _sessions() -> dict[str, Any]:
    return {each: json.loads(read(f"agentic_coding_trace_{each}.json")) for each in SESSIONS}


def _pair() -> Trace:
    return agentic("agentic", _sessions(), [(each, 0.0, 1.0) for each in SESSIONS])


def _users() -> Trace:
    # The two sessions as those of many: begun at any time within hours, faster and slower.
    draw = random.Random(7)  # noqa: S311 - a benchmark repeats itself
    users = [
        (draw.choice(SESSIONS), draw.uniform(0, USERS_WITHIN_S), draw.uniform(0.2, 1.5))
        for _ in range(USERS)
    ]
    return agentic("agentic-users", _sessions(), users)


TRACES: Final[Mapping[str, Callable[[], Trace]]] = {
    "conversation": lambda: mooncake("conversation", read("mooncake_conversation_first4000.jsonl")),
    "synthetic": lambda: mooncake("synthetic", read("mooncake_synthetic.jsonl")),
    "agentic": _pair,
    "agentic-users": _users,
}
"""What there is by name. ``agentic-users`` is made of the two agentic sessions, not recorded."""


@cache
def trace(name: str) -> Trace:
    """Return a trace by name."""
    return TRACES[name]()
