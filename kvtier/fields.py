"""Checks of identity fields; every message names the field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.layout import PartShape

__all__ = ["Extra", "Scalar", "check_count", "check_label", "extra_items", "part_shapes", "rope"]

LABEL_BYTES_MAX: Final = 1024  # a tenant, an adapter, a name or an extra item
EXTRA_ITEMS_MAX: Final = 4096
ROPE_ITEMS_MAX: Final = 4096
TENSORS_PER_PART_MAX: Final = 4
DIMENSION_MAX: Final = 1 << 24

Scalar = str | int | float | bool | None
Extra = str | bytes | int


def check_label(name: str, value: object, *, empty_allowed: bool = True) -> None:
    """Raise unless ``value`` is a string of at most 1 KiB of UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: {type(value).__name__} given, a string wanted")
    if not value and not empty_allowed:
        raise ValueError(f"{name}: empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not valid Unicode ({error.reason})") from None
    if size > LABEL_BYTES_MAX:
        raise ValueError(f"{name}: {size} bytes, at most {LABEL_BYTES_MAX}")


def check_count(name: str, value: object, limit: int = DIMENSION_MAX) -> None:
    """Raise unless ``value`` is an int from 1 to ``limit``."""
    if type(value) is not int or not 1 <= value <= limit:
        raise ValueError(f"{name}: {value!r} is not an integer from 1 to {limit}")


def extra_items(items: Sequence[Extra]) -> tuple[Extra, ...]:
    """Return the items that a caller adds to a prompt's identity, checked."""
    if not isinstance(items, (list, tuple)):
        raise TypeError(f"extra: {type(items).__name__} given, a list or tuple wanted")
    if len(items) > EXTRA_ITEMS_MAX:
        raise ValueError(f"extra: {len(items)} items, at most {EXTRA_ITEMS_MAX}")
    for index, item in enumerate(items):
        name = f"extra[{index}]"
        if isinstance(item, bool) or not isinstance(item, (str, bytes, int)):
            raise TypeError(f"{name}: {type(item).__name__} given; str, bytes or int wanted")
        if isinstance(item, str):
            check_label(name, item)
        elif isinstance(item, bytes) and len(item) > LABEL_BYTES_MAX:
            raise ValueError(f"{name}: {len(item)} bytes, at most {LABEL_BYTES_MAX}")
        elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
            raise ValueError(f"{name}: {item} does not fit 64 bits")
    return tuple(items)


def part_shapes(parts: Sequence[PartShape], layers: int) -> tuple[PartShape, ...]:
    """Return ``parts`` as nested tuples, one per layer, checked."""
    try:
        nested = tuple(tuple((heads, width) for heads, width in part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError("parts: one tuple of (heads, width) pairs per layer wanted") from None
    if len(nested) != layers:
        raise ValueError(f"parts: {len(nested)} layers given, layers={layers}")
    for layer, part in enumerate(nested):
        if not 1 <= len(part) <= TENSORS_PER_PART_MAX:
            raise ValueError(
                f"parts[{layer}]: {len(part)} tensors, 1 to {TENSORS_PER_PART_MAX} allowed"
            )
        for heads, width in part:
            check_count(f"parts[{layer}] heads", heads)
            check_count(f"parts[{layer}] width", width)
    return nested


def rope(pairs: Sequence[tuple[str, Scalar]]) -> tuple[tuple[str, Scalar], ...]:
    """Return rope parameters in their one spelling: sorted by name, every number a float.

    So 10000, 10000.0 and True, 1 are one identity each, whatever wrote the config.
    """
    if not isinstance(pairs, (list, tuple)) or len(pairs) > ROPE_ITEMS_MAX:
        raise ValueError(f"rope: at most {ROPE_ITEMS_MAX} (name, value) pairs wanted")
    result: dict[str, Scalar] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:  # noqa: PLR2004 - a pair
            raise ValueError("rope: (name, value) pairs wanted")
        name, value = pair
        check_label("rope name", name, empty_allowed=False)
        if name in result:
            raise ValueError(f"rope: {name!r} given twice")
        result[name] = _scalar(f"rope {name!r}", value)
    return tuple(sorted(result.items()))


def _scalar(name: str, value: Any) -> Scalar:
    if value is None:
        return None
    if isinstance(value, str):
        check_label(name, value)
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {type(value).__name__} given, a scalar wanted")
    try:
        number = float(value) + 0.0  # -0.0 and 0.0 are equal, so they must be one spelling
    except OverflowError:
        raise ValueError(f"{name}: does not fit a float") from None
    if math.isnan(number):
        raise ValueError(f"{name}: not a number")
    return number
