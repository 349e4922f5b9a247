"""What a client asks of kvtier for one request, in vLLM's ``kv_transfer_params``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAME", "NOTHING_ASKED", "Asked", "asked_of"]

NAME: Final = "kvtier"
"""The name under which a request's parameters are kvtier's; the others' are not looked at."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Both are used by ``two_step``: a head that is computed while its prompt's tail is fetched."""

    restore: bool = True
    """Whether what is stored of the request's prompt may be loaded."""
    prefetch: tuple[int, ...] = ()
    """Token ids of the prompt whose stored blocks are promoted to host memory, last block first,
    until this request has finished."""


NOTHING_ASKED: Final = Asked()


def asked_of(params: Mapping[str, Any] | None, *, tokens_max: int) -> Asked:
    """Return what a request asks; a client's nonsense, or too long a prompt, asks nothing."""
    given = (params or {}).get(NAME)
    if not isinstance(given, dict):
        return NOTHING_ASKED
    restore, prefetch = given.get("restore", True), given.get("prefetch", ())
    well_formed = (
        isinstance(restore, bool)
        and isinstance(prefetch, list | tuple)
        and len(prefetch) <= tokens_max
        and all(type(each) is int and 0 <= each < 1 << 32 for each in prefetch)
    )
    return Asked(restore, tuple(prefetch)) if well_formed else NOTHING_ASKED
