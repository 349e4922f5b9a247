"""What ``kv_connector_extra_config`` may say, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from kvtier import LinkThrottle, StoreConfig, Tier
from kvtier.config import parse_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings"]

_SIZES_SHARED: Final = (
    "host_bytes",
    "ssd_bytes",
    "device_bytes",
    "ssd_write_bytes_per_day",
    "prefetch_bytes_max",
    "prefetch_bytes_per_s",
)
_DEFAULTS: Final = {"host_bytes": "1GiB", "ssd_bytes": "10GiB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The connector's settings; ``ValueError`` or ``TypeError`` names the one that is wrong."""

    path: str
    """Each rank opens ``<path>/rank-<r>-of-<n>``."""
    compute_price_per_request: float = 1.0
    """What a second of compute is worth to each other request that computes or waits: with many of
    them a restore loads more and recomputes less. 0: only the restored request counts."""
    save: bool = True
    """Whether blocks are stored (where ``kv_role`` allows it)."""
    restore: bool = True
    """Whether stored blocks are restored (where ``kv_role`` allows it)."""
    hybrid: bool = True
    """Whether a head may be recomputed while its tail loads; False: plain asynchronous loads."""
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """{tier: {"bytes_per_s": ..., "latency_s": ...}}: slows a tier's loads down, for benchmarks."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Every other setting, as ``kvtier.open`` takes it, for all ranks together."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"path: {self.path!r} is not a directory's path")
        for name in ("save", "restore", "hybrid"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: {getattr(self, name)!r} is not true or false")
        price = self.compute_price_per_request
        if isinstance(price, bool) or not isinstance(price, (int, float)):
            raise TypeError(f"compute_price_per_request: {price!r} is not a number")
        if not (price >= 0 and math.isfinite(price)):
            raise ValueError(f"compute_price_per_request: {price!r} is negative or not finite")
        self.throttles()
        StoreConfig(**self.of_rank(1))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Check what the user wrote; an unknown name raises ``ValueError`` listing the known."""
        own = {each.name for each in fields(cls)} - {"store"}
        store = {each.name for each in fields(StoreConfig)}
        unknown = sorted(set(given) - own - store)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(unknown)} unknown; "
                f"known are {', '.join(sorted(own | store))}"
            )
        if "path" not in given:
            raise ValueError("kv_connector_extra_config: path is missing; name a directory for it")
        rest = {name: value for name, value in given.items() if name in store}
        mine = {name: value for name, value in given.items() if name in own}
        return cls(**mine, store=rest)

    def of_rank(self, ranks: int) -> dict[str, Any]:
        """Return what one of ``ranks`` ranks passes to ``kvtier.open``: sizes are divided."""
        sizes = parse_sizes({**_DEFAULTS, **self.store})
        return {
            name: value // ranks if name in _SIZES_SHARED and isinstance(value, int) else value
            for name, value in sizes.items()
        }

    def throttles(self) -> dict[Tier, LinkThrottle]:
        """Return a new throttle for each of ``links``, as ``kvtier.open`` takes them."""
        made = {}
        for tier, link in self.links.items():
            known = {"bytes_per_s", "latency_s"}
            if tier not in (Tier.SSD, Tier.HOST) or not isinstance(link, dict) or set(link) - known:
                raise ValueError(
                    f"links: {tier!r}: {link!r} is not "
                    '"ssd" or "host": {"bytes_per_s": ..., "latency_s": ...}'
                )
            if "bytes_per_s" not in link:
                raise ValueError(f"links: {tier!r}: bytes_per_s is missing")
            made[Tier(tier)] = LinkThrottle(**link)
        return made
