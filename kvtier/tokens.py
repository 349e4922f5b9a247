"""Token ids in whatever form an engine has them, as the bytes that are hashed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TOKEN_ID_MAX", "TokenIds", "token_bytes"]

TOKEN_ID_MAX: Final = (1 << 32) - 1
U32_CODE: Final = "I" if array("I").itemsize == 4 else "L"  # noqa: PLR2004 - bytes of a u32

PIECE_TOKENS: Final = 500
"""numpy lets go of the interpreter around what it does to more elements. Keys are made on the
engine's path, where copies and checksums hold every core: getting it back takes milliseconds."""
PIECES_TOKENS_MAX: Final = 32_768
"""Of a longer prompt pieces cost more than letting go now and then."""

TokenIds = Any
"""list or tuple of int, integer ndarray or torch tensor of shape [n] or [1, n]."""


def token_bytes(token_ids: TokenIds) -> memoryview:
    """Return the ids as little-endian u32, as bytes; of an array that is so already, its own.

    Raises ``TypeError`` for a float, a bool or another type, ``ValueError`` for an id outside
    [0, 2^32) or a wrong shape; both name the index.
    """
    if isinstance(token_ids, (list, tuple)):
        return _from_sequence(token_ids)
    if hasattr(token_ids, "detach"):  # a torch tensor, without importing torch
        if token_ids.is_floating_point() or token_ids.is_complex():  # bfloat16 has no numpy form
            raise TypeError(f"token_ids[0]: {token_ids.dtype} given, an integer wanted")
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray):
        return _from_array(token_ids)
    raise TypeError(
        f"token_ids: {type(token_ids).__name__} given; a list, tuple, ndarray or tensor wanted"
    )


def _from_sequence(ids: list[Any] | tuple[Any, ...]) -> memoryview:
    # array() converts at C speed but takes a bool for 0 or 1; only those two values are looked at
    # again. Anything it rejects takes the slow path, which knows the index.
    try:
        values = np.frombuffer(array(U32_CODE, ids), dtype=np.uint32)
    except (TypeError, OverflowError):
        raise _first_bad(ids) from None
    for start, piece in _pieces(values):
        if piece.min() > 1:
            continue
        for index in (start + np.flatnonzero(piece <= 1)).tolist():
            if isinstance(ids[index], (bool, np.bool_)):
                raise TypeError(f"token_ids[{index}]: bool given, an int wanted")
    return _little_endian(values)


def _first_bad(ids: list[Any] | tuple[Any, ...]) -> Exception:
    for index, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            return TypeError(f"token_ids[{index}]: {type(value).__name__} given, an int wanted")
        if not 0 <= value <= TOKEN_ID_MAX:
            return ValueError(f"token_ids[{index}]: {value} is not in [0, {TOKEN_ID_MAX}]")
    return TypeError("token_ids: not a flat sequence of ints")


def _from_array(ids: np.ndarray[Any, Any]) -> memoryview:
    if ids.ndim == 2 and ids.shape[0] == 1:  # noqa: PLR2004 - [1, n]
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"token_ids: shape {list(ids.shape)} given, [n] or [1, n] wanted")
    if ids.size == 0:
        return memoryview(b"")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token_ids[0]: {ids.dtype} given, an integer wanted")
    if ids.dtype == np.uint32 and ids.flags.c_contiguous:
        return _little_endian(ids)
    # Read as unsigned, what is below 0 is above every id.
    unsigned = ids.view(f"{ids.dtype.byteorder}u{ids.itemsize}")
    most = min(TOKEN_ID_MAX, int(np.iinfo(ids.dtype).max))
    values = np.empty(len(ids), dtype=np.uint32)
    for start, piece in _pieces(unsigned):
        if piece.max() > most:
            index = start + int(np.flatnonzero(piece > most)[0])
            raise ValueError(f"token_ids[{index}]: {ids[index]} is not in [0, {TOKEN_ID_MAX}]")
        values[start : start + len(piece)] = piece
    return _little_endian(values)


def _little_endian(ids: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).data


def _pieces(ids: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    step = PIECE_TOKENS if len(ids) <= PIECES_TOKENS_MAX else len(ids)
    for start in range(0, len(ids), step):
        yield start, ids[start : start + step]
