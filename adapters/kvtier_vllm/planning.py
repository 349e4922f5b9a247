"""Which restore a request gets: a pure decision from what is stored, held and busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvtier
from kvtier import Residency
from kvtier_vllm.restore import Restore
from kvtier_vllm.tracked import confirmed

if TYPE_CHECKING:
    from typing import Protocol

    from kvtier import BlockKeys
    from kvtier_vllm.mirror import Mirror

    class Prompt(Protocol):
        """What is consumed of a request."""

        request_id: str

        @property
        def num_tokens(self) -> int:
            """Known tokens."""


__all__ = ["Limits", "introduction", "plan_restore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine's configuration says; constant while it runs."""

    page_tokens: int
    """Tokens of one of the engine's blocks."""
    step_tokens_max: int
    ranks: int
    hybrid: bool
    """Whether our scheduler drives: the head may be computed while the tail loads."""
    pipelined: bool
    """Whether a step is scheduled while another one still runs."""
    prefix_caching: bool
    save: bool
    restore: bool
    compute_price_per_request: float
    where: str = ""
    """The store's path and sizes, for the log."""

    def describe(self) -> str:
        """Say in a few words what is on."""
        way = "recomputes heads while tails load" if self.hybrid else "plain asynchronous loads"
        uses = [name for name, on in (("restores", self.restore), ("saves", self.save)) if on]
        return f"{way}; {' and '.join(uses) or 'neither restores nor saves'}; {self.where}"


def introduction(limits: Limits, mirror: Mirror, io: str) -> str:
    """Return the log line that says what is on; ``io``: how a rank accesses its SSD."""
    spec = mirror.spec
    return (
        f"kvtier: {limits.describe()}; {io} I/O; blocks of {spec.block_tokens} tokens, "
        f"{mirror.block_bytes} bytes on each of {limits.ranks} rank(s); "
        f"namespace {spec.namespace.hex()[:16]}"
    )


def plan_restore(
    prompt: Prompt,
    keys: BlockKeys,
    local: int,
    *,
    limits: Limits,
    mirror: Mirror,
    busy: int,
    now: float,
    cover_s: float,
) -> Restore | None:
    """Plan a prompt of which the engine holds ``local`` tokens; None: compute it as usual.

    ``busy``: other requests that a second of compute delays. ``cover_s``: how much time the loads
    in flight must cover.

    A block of which the engine holds some pages is recomputed: others may read those pages. Of
    a prompt that is restored as a whole vLLM computes the last token again, to sample from it.
    """
    tokens = keys.block_tokens
    resident = local // tokens
    tiers = mirror.tiers(keys.hashes[: prompt.num_tokens // tokens])
    if local % tokens and resident < len(tiers):
        tiers[resident] = None
    if not limits.hybrid:
        tiers = _contiguous(tiers, resident)
    while len(tiers) > resident and tiers[-1] is None:
        tiers.pop()
    if len(tiers) <= resident:
        return None
    residency = Residency(confirmed(keys, len(tiers)), tuple(tiers), mirror.block_bytes)
    plan = kvtier.plan(
        residency,
        mirror.costs,
        resident=resident,
        step_blocks_max=max(1, limits.step_tokens_max // tokens),
        compute_price=limits.compute_price_per_request * busy,
    )
    if not plan.load:
        return None
    if not limits.hybrid:
        load = plan.predicted.load
        if load is not None and mirror.costs.compute.known and load > plan.predicted.recompute:
            return None
        plan = kvtier.plan(residency, mirror.costs, resident=resident, way="load")
    costs = mirror.costs
    return Restore(prompt.request_id, plan, costs, now, ranks=limits.ranks, cover_s=cover_s)


def _contiguous(tiers: list[kvtier.Tier | None], resident: int) -> list[kvtier.Tier | None]:
    missing = (block for block in range(resident, len(tiers)) if tiers[block] is None)
    return tiers[: next(missing, len(tiers))]
