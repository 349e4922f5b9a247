"""kvtier: KV cache tiers for LLM engines, restored by recomputing the head while the tail loads."""

from __future__ import annotations

from kvtier.changes import CatalogChanges
from kvtier.config import StoreConfig
from kvtier.cost import CostModel
from kvtier.errors import (
    FormatError,
    KVTierError,
    SpecMismatch,
    StoreClosed,
    StoreFailed,
    StoreLocked,
    TransferFailed,
    UnsupportedModel,
)
from kvtier.identity import BlockKeys, KVSpec
from kvtier.layout import BlockLayout
from kvtier.loads import Loads
from kvtier.plan import Residency, RestorePlan, Step, Tier
from kvtier.planner import plan, plan_batch
from kvtier.purge import PurgeResult
from kvtier.reader import StoreReader, open_reader
from kvtier.restore import PENDING, RestoreSession
from kvtier.restore_notes import RestoreReport
from kvtier.retention import Retention
from kvtier.store import Store
from kvtier.store import open_store as open  # noqa: A004 - kvtier.open, like gzip.open
from kvtier.tiers.device import KVSlots, TensorSlots
from kvtier.tiers.throttle import LinkThrottle
from kvtier.trace import Trace, TraceEvent
from kvtier.transfer import Prefetch, PutResult, Transfer

__all__ = [
    "PENDING",
    "BlockKeys",
    "BlockLayout",
    "CatalogChanges",
    "CostModel",
    "FormatError",
    "KVSlots",
    "KVSpec",
    "KVTierError",
    "LinkThrottle",
    "Loads",
    "Prefetch",
    "PurgeResult",
    "PutResult",
    "Residency",
    "RestorePlan",
    "RestoreReport",
    "RestoreSession",
    "Retention",
    "SpecMismatch",
    "Step",
    "Store",
    "StoreClosed",
    "StoreConfig",
    "StoreFailed",
    "StoreLocked",
    "StoreReader",
    "TensorSlots",
    "Tier",
    "Trace",
    "TraceEvent",
    "Transfer",
    "TransferFailed",
    "UnsupportedModel",
    "open",
    "open_reader",
    "plan",
    "plan_batch",
]
