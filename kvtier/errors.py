"""What can go wrong, split by what the caller does about it.

::

    KVTierError
    |-- SpecMismatch       cannot open/restore: slots, plan or keys belong to another KVSpec
    |-- UnsupportedModel   cannot open: kvtier cannot hold this model's state correctly yet
    |-- StoreLocked        cannot open: another process (or this one) already writes here
    |-- FormatError        cannot open: not a store, a newer format, or damaged beyond use
    |-- TransferFailed     retry or recompute: this copy did not happen
    `-- StoreFailed        stop using the store
        `-- StoreClosed    ... because it was closed, or this is a forked child

A miss and a damaged block are values and events, never exceptions. Bad arguments (a negative token
id, a malformed size) are ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

__all__ = [
    "FormatError",
    "KVTierError",
    "SpecMismatch",
    "StoreClosed",
    "StoreFailed",
    "StoreLocked",
    "TransferFailed",
    "UnsupportedModel",
]


class KVTierError(Exception):
    """The root of everything kvtier raises on purpose."""


class SpecMismatch(KVTierError):
    """Slots, keys or a plan belong to another ``KVSpec`` than the store's."""


class UnsupportedModel(KVTierError):
    """The model keeps state that kvtier cannot hold correctly yet; names the layer or setting."""


class StoreLocked(KVTierError):
    """The directory already has a writer."""


class FormatError(KVTierError):
    """The directory is not a store, or one of a format that this version cannot read."""


class TransferFailed(KVTierError):
    """One copy did not happen; the store goes on."""


class StoreFailed(KVTierError):
    """The store cannot go on; the cause is chained."""


class StoreClosed(StoreFailed):
    """The store was closed, or belongs to the parent of this process."""
