"""What the ranks have stored, as the scheduler knows it.

A rank's store is the truth. Here is what it said last; a block that is gone by the time it is
wanted is a load that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier import CostModel, KVSpec, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier import CatalogChanges
    from kvtier_vllm.messages import Hello

__all__ = ["Mirror"]

_SPEED: Final = {Tier.HOST: 0, Tier.SSD: 1}


@dataclass(slots=True)
class _Rank:
    namespace: bytes
    spec: KVSpec
    block_bytes: int
    costs: CostModel
    resets: int
    tiers: dict[bytes, Tier]


class Mirror:
    """The residency of every rank; a block is stored where all ranks hold it.

    Belongs to the scheduler's thread.
    """

    def __init__(self, ranks: int) -> None:
        self._expected = ranks
        self._ranks: dict[int, _Rank] = {}
        self._resets = 0

    def hello(self, hello: Hello) -> bool:
        """Take a rank's account of its store, instead of all it said before.

        Returns whether the weights are others than those it named last.
        """
        spec = KVSpec.from_bytes(hello.spec)
        before = self._ranks.get(hello.rank)
        self._ranks[hello.rank] = _Rank(
            spec.namespace, spec, hello.block_bytes, hello.costs, hello.resets, {}
        )
        self.changed(hello.rank, hello.stored)
        return before is not None and before.spec.weights != spec.weights

    def changed(self, rank: int, changes: CatalogChanges) -> None:
        """Take over what changed in a rank's store; nothing before its hello counts."""
        mine = self._ranks.get(rank)
        if mine is None:
            return
        if changes.complete:
            mine.tiers.clear()
        for namespace, digest, tiers in changes.blocks:
            if namespace != mine.namespace:
                continue
            loadable = next((tier for tier in tiers if tier in _SPEED), None)
            if loadable is None:
                mine.tiers.pop(digest, None)
            else:
                mine.tiers[digest] = loadable

    def recosted(self, rank: int, costs: CostModel) -> None:
        """Take over what a rank has learned."""
        if rank in self._ranks:
            self._ranks[rank].costs = costs

    def reset(self, resets: int) -> None:
        """Say nothing any more until every rank has said hello again after this reset."""
        self._resets = resets

    @property
    def heard(self) -> bool:
        """Whether all ranks have answered the last reset."""
        return all(rank.resets >= self._resets for rank in self._ranks.values())

    @property
    def ready(self) -> bool:
        """Whether all ranks are heard since the last reset, and speak of the same weights."""
        weights = {rank.spec.weights for rank in self._ranks.values()}
        return len(self._ranks) == self._expected and self.heard and len(weights) == 1

    @property
    def spec(self) -> KVSpec:
        """One rank's spec: every rank derives the same keys. Only when ``ready``."""
        return self._ranks[min(self._ranks)].spec

    @property
    def block_bytes(self) -> int:
        """Bytes of one rank's share of a block. Only when ``ready``."""
        return max(rank.block_bytes for rank in self._ranks.values())

    @property
    def costs(self) -> CostModel:
        """What restores cost: of every link the slowest rank's counts. Only when ``ready``."""
        costs = [rank.costs for rank in self._ranks.values()]
        nbytes = self.block_bytes
        slowest = {
            tier: max(costs, key=lambda each: each.load_seconds(tier, nbytes)).link(tier)
            for tier in _SPEED
        }
        compute = max(costs, key=lambda each: each.compute.seconds(0, self.spec.block_tokens))
        return CostModel(
            compute.compute,
            slowest[Tier.HOST],
            slowest[Tier.SSD],
            max(each.interference for each in costs),
        )

    def tiers(self, hashes: Iterable[bytes]) -> list[Tier | None]:
        """Return for each block the slowest tier among the ranks; None where one lacks it."""
        held = [rank.tiers for rank in self._ranks.values()]
        if len(held) == 1:
            return [held[0].get(digest) for digest in hashes]
        found = []
        for digest in hashes:
            each = [tiers.get(digest) for tiers in held]
            whole = [tier for tier in each if tier is not None]
            found.append(max(whole, key=_SPEED.__getitem__) if len(whole) == len(each) else None)
        return found
