"""`size`: how large a model's KV is, how far a budget goes, and which link its loads fill first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtier.config import parse_bytes
from kvtier.identity import BLOCK_TOKENS
from kvtier.profiles import LINKS, Link
from kvtier.tiers.segment import HEADER_PAGES_MAX, PAGE_BYTES, header_bytes
from kvtier_inspect.modelconfig import read_model
from kvtier_inspect.planning import link_cost
from kvtier_inspect.render import ExitCode, columns, console, count, emit, facts, safe
from kvtier_inspect.render import size as shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.table import Table

    from kvtier_inspect.modelconfig import ModelKV

__all__ = ["Budget", "LinkLoad", "Size", "budget", "link_loads", "run", "size"]


@dataclass(frozen=True, slots=True)
class Size:
    """The KV of ``concurrency`` requests of ``tokens`` tokens each.

    ``request_bytes`` and ``total_bytes`` are what an engine keeps, windows taken into account;
    ``blocks`` are the full blocks that a store keeps of one request, in slots of ``slot_bytes`` on
    an SSD.
    """

    model: ModelKV
    tokens: int
    concurrency: int
    block_tokens: int

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return self.model.kept_bytes(self.tokens)

    @property
    def total_bytes(self) -> int:
        """Bytes of all requests together."""
        return self.request_bytes * self.concurrency

    @property
    def blocks(self) -> int:
        """Full blocks of one request."""
        return self.tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's payload."""
        return self.model.block_bytes(self.block_tokens)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block on an SSD: header and payload in whole pages."""
        return header_bytes(self.model.layers) + _whole_pages(self.block_bytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many blocks, tokens and whole requests ``nbytes`` of a tier hold."""

    tier: str
    nbytes: int
    blocks: int
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a request rate asks of a link; ``share`` over 1 is more than it delivers."""

    name: str
    bytes_per_s: float
    share: float
    requests_per_s_max: float


def size(
    model: ModelKV, tokens: int, *, concurrency: int = 1, block_tokens: int = BLOCK_TOKENS
) -> Size:
    """Return the size of so many requests; ``ValueError`` if the model has no KV to speak of."""
    for name, value in (("tokens", tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name}: {value} is not positive")
    if not model.token_bytes:
        raise ValueError(f"{model.name}: no layer keeps anything per token: its KV does not grow")
    if header_bytes(model.layers) > HEADER_PAGES_MAX * PAGE_BYTES:
        raise ValueError(f"{model.name}: a record has no room for {model.layers} layers")
    return Size(model, tokens, concurrency, block_tokens)


def budget(made: Size, tier: str, nbytes: int) -> Budget:
    """Return how far ``nbytes`` go; "ssd" counts whole slots, "host" whole pages."""
    each = made.slot_bytes if tier == "ssd" else _whole_pages(made.block_bytes)
    blocks = nbytes // each
    # The last, unfinished block is not stored: a request shorter than one block needs none.
    requests = blocks // made.blocks if made.blocks else 0
    return Budget(tier, nbytes, blocks, blocks * made.block_tokens, requests)


def link_loads(
    request_bytes: int, rate: float, links: Iterable[Link] = tuple(LINKS.values())
) -> list[LinkLoad]:
    """Return what ``rate`` requests/s of so many bytes ask of each link, the fullest first."""
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate: {rate} is not a positive number of requests/s")
    loads = [
        LinkLoad(
            link.name,
            link.bytes_per_s,
            request_bytes * rate / link.bytes_per_s,
            link.bytes_per_s / request_bytes,
        )
        for link in links
    ]
    return sorted(loads, key=lambda load: (-load.share, load.name))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


# -- the command


def run(
    model: str,
    tokens: int,
    *,
    concurrency: int,
    dtype: str,
    budgets: Mapping[str, str],
    rate: float | None,
    links: Sequence[str],
    as_json: bool,
) -> int:
    """Print the size of a model's KV; ``budgets`` are sizes by tier, as text."""
    made = size(read_model(model, dtype), tokens, concurrency=concurrency)
    held = [
        budget(made, tier, parse_bytes(f"--{tier}", text)) for tier, text in budgets.items() if text
    ]
    chosen = [named_link(name) for name in links] if links else list(LINKS.values())
    loads = [] if rate is None else link_loads(made.request_bytes, rate, chosen)
    if as_json:
        emit(_plain(made, held, loads, rate))
        return ExitCode.FINE
    out = console()
    out.print(facts(_facts(made, rate)))
    for note in made.model.notes:
        out.print(safe(f"note: {note}", 500))
    if held:
        out.print(_budgets(held))
    if loads:
        out.print(_loads(loads))
        out.print(_verdict(loads))
    return ExitCode.FINE


def named_link(name: str) -> Link:
    """Return a link by its name, or one of a rate such as "25Gbit/s"."""
    cost = link_cost("--link", name)
    known = next((each for each in LINKS.values() if each.bytes_per_s == cost.bytes_per_s), None)
    return known if known is not None and cost.latency_s else Link(name, cost.bytes_per_s)


def _facts(made: Size, rate: float | None) -> Iterator[tuple[str, str]]:
    model = made.model
    yield (
        "model",
        f"{safe(model.name)}, {model.layers} layers, {model.attention}, KV in {model.dtype}",
    )
    for group in model.groups:
        if len(model.groups) > 1 or group.window:
            window = f", of the last {group.window} tokens" if group.window else ""
            yield "", f"{group.layers} x {group.kind}: {group.values} values a token{window}"
    yield "a token", f"{shown(model.token_bytes)} ({model.token_bytes} bytes)"
    yield (
        "a block",
        f"{shown(made.block_bytes)} of {made.block_tokens} tokens; {shown(made.slot_bytes)} on SSD",
    )
    yield (
        "a request",
        f"{both(made.request_bytes)} for {made.tokens} tokens: {made.blocks} full blocks",
    )
    if made.concurrency > 1:
        yield f"{made.concurrency} requests", both(made.total_bytes)
    if rate is not None:
        per_s = made.request_bytes * rate
        bits = f"{per_s * 8 / 1e9:.1f} Gbit/s = {per_s * 8 / 2**30:.1f} Gibit/s"
        asked = f"{per_s / 1e9:.2f} GB/s = {bits}, if every request loads all its tokens"
        yield f"{rate:g} requests/s", asked


def both(nbytes: int) -> str:
    """Return bytes in powers of 2 and of 10, since people compare them with both."""
    return (
        f"{shown(nbytes)} = {nbytes / 1e9:.3g} GB"
        if nbytes < 1e12
        else (f"{shown(nbytes)} = {nbytes / 1e12:.3g} TB")
    )


def _budgets(held: Sequence[Budget]) -> Table:
    rows = [
        (
            each.tier,
            shown(each.nbytes),
            count(each.blocks),
            count(each.tokens),
            count(each.requests),
        )
        for each in held
    ]
    return columns(["tier", "budget", "blocks", "tokens", "such requests"], rows, left=["tier"])


def _loads(loads: Sequence[LinkLoad]) -> Table:
    rows = [
        (
            each.name,
            f"{each.bytes_per_s / 1e9:.2f} GB/s",
            f"{each.share:.0%}",
            f"{each.requests_per_s_max:.3g}",
        )
        for each in loads
    ]
    return columns(["link", "delivers", "filled", "requests/s at most"], rows, left=["link"])


def _verdict(loads: Sequence[LinkLoad]) -> str:
    first = loads[0]
    most = (
        f"the first to saturate is {safe(first.name)}, at {first.requests_per_s_max:.3g} requests/s"
    )
    full = [each.name for each in loads if each.share >= 1]
    return f"{most}; too much for {safe(', '.join(full), 500)}" if full else most


def _plain(
    made: Size, held: Sequence[Budget], loads: Sequence[LinkLoad], rate: float | None
) -> dict[str, Any]:
    model = made.model
    return {
        "model": {
            "name": model.name,
            "dtype": model.dtype,
            "layers": model.layers,
            "attention": model.attention,
            "groups": [asdict(group) for group in model.groups],
            "notes": list(model.notes),
        },
        "tokens": made.tokens,
        "concurrency": made.concurrency,
        "block_tokens": made.block_tokens,
        "token_bytes": model.token_bytes,
        "block_bytes": made.block_bytes,
        "slot_bytes": made.slot_bytes,
        "blocks": made.blocks,
        "request_bytes": made.request_bytes,
        "total_bytes": made.total_bytes,
        "budgets": [asdict(each) for each in held],
        "rate": rate,
        "bytes_per_s": None if rate is None else made.request_bytes * rate,
        "links": [asdict(each) for each in loads],
    }
