"""Which blocks a command is about: masks and rows over a table of entries. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier_inspect.table import parents, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.identity import KVSpec
    from kvtier.tiers.entries import Entries

__all__ = ["chain", "matching", "namespace_of", "read_age", "row_of"]

_AGES: Final = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def matching(
    entries: Entries,
    *,
    namespace: bytes | None = None,
    tenant_digest: bytes | None = None,
    used_before_ns: int | None = None,
) -> Mask:
    """Return which rows match all that is given; None matches all."""
    chosen = np.ones(len(entries), dtype=bool)
    for column, value in (("namespace", namespace), ("tenant", tenant_digest)):
        if value is not None:
            chosen &= _column(entries, column) == value
    if used_before_ns is not None:
        chosen &= entries["last_use_ns"] < max(used_before_ns, 0)
    return chosen


def row_of(entries: Entries, digits: str) -> int:
    """Return the one row whose hash begins with these hex digits; ``ValueError`` otherwise."""
    rows = rows_of(entries, digits)
    if len(rows) != 1:
        few = "no block's hash begins" if not len(rows) else f"{len(rows)} blocks' hashes begin"
        raise ValueError(f"{few} with {digits}; name one block, in one namespace")
    return int(rows[0])


def chain(entries: Entries, row: int) -> list[int]:
    """Return the rows of a block and of what it is chained to, as far as that is stored.

    The first is the head. A hole ends it: what lies before a hole is not known by its name.
    """
    above, _ = parents(entries)
    rows = [row]
    while (before := int(above[rows[-1]])) >= 0:
        rows.append(before)
    return rows[::-1]


def namespace_of(digits: str, known: Iterable[bytes], specs: Mapping[bytes, KVSpec]) -> bytes:
    """Return the one namespace that begins with these hex digits; ``ValueError`` lists them."""
    if not re.fullmatch(r"[0-9a-fA-F]{0,64}", digits):
        raise ValueError(f"namespace: {digits!r} is not up to 64 hex digits")
    wanted = digits.lower()
    choices = sorted(set(known) | specs.keys())
    found = [each for each in choices if each.hex().startswith(wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(
        f"{each.hex()[:12]} ({specs[each].model})" if each in specs else each.hex()[:12]
        for each in choices[:20]
    )
    few = "none" if not found else f"{len(found)}"
    raise ValueError(
        f"{few} of the namespaces begin with {digits!r}; there are: {listed or 'none'}"
    )


def read_age(name: str, text: str) -> float:
    """Return "90s", "12h" or "7d" in seconds; ``ValueError`` names the option."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _AGES:
        raise ValueError(f"{name}: {text!r} is not an age like 90s, 12h or 7d")
    return float(match[1]) * _AGES[match[2]]


def _column(entries: Entries, name: str) -> np.ndarray[Any, Any]:
    # Trailing zeros do not count in S32: of two values of 32 bytes only equal ones compare equal.
    return np.ascontiguousarray(entries[name]).view("S32").reshape(-1)
