"""What stands in for vLLM where a test needs none of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier import CatalogChanges, CostModel, KVSpec, Tier
from kvtier.cost import ComputeCost, LinkCost
from kvtier_vllm.messages import Hello
from kvtier_vllm.mirror import Mirror
from kvtier_vllm.planning import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK = 16
PAGE = 8


def spec_of(rank: int = 0, ranks: int = 1, weights: str = "sha256:1") -> KVSpec:
    """Return a small model's spec."""
    return KVSpec(
        model="fake",
        weights=weights,
        dtype="float32",
        layers=1,
        kv_heads=1,
        head_dim=4,
        block_tokens=BLOCK,
        tp_rank=rank,
        tp_size=ranks,
    )


def costs_of(compute_s: float = 0.01, load_s: float = 0.01) -> CostModel:
    """Return seconds per block, of which the compute side knows its own."""
    link = LinkCost(1e12, load_s, 9)
    return CostModel(ComputeCost(token_s=compute_s / BLOCK, samples=9), link, link)


def limits_of(**changes: Any) -> Limits:
    """Return an engine's limits."""
    usual = {
        "page_tokens": PAGE,
        "step_tokens_max": 32,
        "ranks": 1,
        "hybrid": True,
        "pipelined": False,
        "prefix_caching": True,
        "save": True,
        "restore": True,
        "compute_price_per_request": 0.0,
    }
    return Limits(**{**usual, **changes})


def hello_of(
    stored: Mapping[bytes, Tier],
    *,
    rank: int = 0,
    ranks: int = 1,
    weights: str = "sha256:1",
    resets: int = 0,
    costs: CostModel | None = None,
) -> Hello:
    """Return a rank's account of its store."""
    spec = spec_of(rank, ranks, weights)
    blocks = tuple((spec.namespace, digest, (tier,)) for digest, tier in stored.items())
    return Hello(
        rank,
        spec.to_bytes(),
        spec.block_layout.block_bytes,
        CatalogChanges(1, blocks, complete=True),
        costs or costs_of(),
        resets,
        io="direct",
    )


def mirror_of(stored: Mapping[bytes, Tier], costs: CostModel | None = None) -> Mirror:
    """Return the mirror of one rank."""
    mirror = Mirror(1)
    mirror.hello(hello_of(stored, costs=costs))
    return mirror


@dataclass
class FakeRequest:
    """A request, as far as it is looked at."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    prefill_stats: Any = None
    status: Any = None

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.all_token_ids)


@dataclass
class FakePages:
    """A pool of pages with references, and who has which."""

    count: int = 64
    prefix_cache_empty: bool = True
    references: Counter[int] = field(default_factory=Counter)
    owned: dict[str, list[int]] = field(default_factory=dict)

    @property
    def free_pages(self) -> list[int]:
        """Pages that nobody references."""
        return [page for page in range(self.count) if not self.references[page]]

    def of(self, request_id: str) -> Sequence[int]:
        """Return a request's pages."""
        return self.owned.get(request_id, [])

    def extend(self, request_id: str, tokens: int) -> bool:
        """Give a request pages."""
        mine = self.owned.setdefault(request_id, [])
        wanted = -(-tokens // PAGE) - len(mine)
        fresh = self.free_pages[: max(wanted, 0)]
        if len(fresh) < wanted:
            return False
        self.touch(fresh)
        mine += fresh
        return True

    def give_up(self, request_id: str) -> None:
        """Take a request's pages."""
        self.free(self.owned.pop(request_id, []))

    def touch(self, pages: Sequence[int]) -> None:
        """Add a reference to each."""
        self.references.update(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Drop a reference to each."""
        for page in pages:
            assert self.references[page] > 0, "a reference is dropped that nobody has"
            self.references[page] -= 1

    def unshared(self, pages: Sequence[int]) -> bool:
        """Whether one has a single reference."""
        return any(self.references[page] == 1 for page in pages)
