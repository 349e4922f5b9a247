"""The policies by the name that ``open`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.policy import Lru, Sieve
from kvtier.priced import PrefixClosed, Priced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.policy import MakePolicy

__all__ = ["POLICY"]

POLICY: Final[Mapping[str, MakePolicy]] = {
    "priced": Priced,
    "prefix-closed": PrefixClosed,
    "sieve": Sieve,
    "lru": Lru,
}
