"""The public API as its users write it. Type-checked under mypy --strict, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import numpy as np
import torch

import kvtier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class EngineSlots:
    """An engine's own slots satisfy the protocol without inheriting from it."""

    def __init__(self, layout: kvtier.BlockLayout) -> None:
        self._layout = layout

    @property
    def layout(self) -> kvtier.BlockLayout:
        """The layout of each block."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return torch.device("cpu")

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return one block's tensors."""
        return [torch.zeros(part.shape) for part in self._layout.tensors]


def prefill(step: kvtier.Step) -> None:
    """Stand in for the model."""
    assert_type(step.tokens, range)
    assert_type(step.blocks, range)


def restore_and_store(path: Path, token_ids: list[int]) -> kvtier.RestoreReport:
    """Go once through the README's example."""
    spec = kvtier.KVSpec(
        model="org/model", weights="sha256:0", dtype="bfloat16", layers=2, kv_heads=8, head_dim=128,
        rope=(("theta", 500000), ("type", "llama3")),
    )  # fmt: skip
    assert_type(spec.namespace, bytes)
    slots: kvtier.KVSlots = kvtier.TensorSlots.empty(spec, 8)
    with kvtier.open(path, spec, host_bytes="8GiB", ssd_bytes=200 << 30) as store:
        assert_type(store, kvtier.Store)
        keys = store.keys(token_ids, tenant="t", adapter="a", extra=("image", b"1", 2))
        assert_type(keys, kvtier.BlockKeys)
        keys = keys.extend(np.arange(9)).extend(torch.arange(9)).extend((1, 2))
        residency = store.lookup(keys)
        assert_type(residency, kvtier.Residency)
        assert_type(residency.tiers, tuple[kvtier.Tier | None, ...])
        plan = store.plan(residency, resident=0, step_blocks_max=4, way="best")
        assert_type(plan, kvtier.RestorePlan)
        assert_type(plan.explain(), str)
        assert_type(plan.predicted.load, float | None)
        with store.restore(plan, into=slots) as session:
            assert_type(session, kvtier.RestoreSession)
            while step := session.next_step(timeout=30):
                assert_type(step, kvtier.Step)
                prefill(step)
                session.computed(step)
            report = session.report
        retention = kvtier.Retention(priority=1, ttl_s=3600)
        transfer = store.put(keys, source=slots, blocks=range(1, 3), retention=retention)
        assert_type(transfer, kvtier.Transfer[kvtier.PutResult])
        transfer.released.wait()
        assert_type(transfer.result(timeout=5), kvtier.PutResult)
        hint = store.prefetch(keys, deadline_s=0.5, priority=1)
        assert_type(hint, kvtier.Prefetch)
        assert_type(hint.done(), bool)
        hint.cancel()
        with store.pin(keys) as pinned:
            assert_type(pinned, kvtier.Residency)
        store.flush()
        assert_type(store.check(), list[str])
        assert_type(store.costs, kvtier.CostModel)
    return report


def poll(session: kvtier.RestoreSession) -> None:
    """Poll a session: a step, PENDING, or None, told apart without a cast."""
    step = session.poll_step()
    if step is None:
        return
    if step == kvtier.PENDING:
        return
    assert_type(step, kvtier.Step)
    session.computed(step, seconds=0.5)


def decided_elsewhere(store: kvtier.Store, keys: kvtier.BlockKeys, slots: EngineSlots) -> bool:
    """Carry out single loads, and pass on what another process measured."""
    loads = store.loads(slots, lambda: None)
    assert_type(loads, kvtier.Loads)
    loads.start(3, keys[3], kvtier.Tier.SSD)
    loads.cancel(3)
    assert_type(loads.take(), list[tuple[int, bool]])
    loads.end()
    store.measured(0, 256, 0.5, overlap=1.0)
    return loads.ended


async def store_and_wait(store: kvtier.Store, keys: kvtier.BlockKeys, slots: EngineSlots) -> int:
    """Await what can also be polled."""
    result = await store.put(keys, slots)
    assert_type(result, kvtier.PutResult)
    assert_type(await store.prefetch(keys), int)
    return result.stored + result.present + result.dropped


def without_a_store(
    spec: kvtier.KVSpec, residency: kvtier.Residency, costs: kvtier.CostModel
) -> str:
    """Plan in a process that has no store, and send the plan as text."""
    keys = kvtier.BlockKeys.of(spec, [1, 2, 3], "tenant")
    assert_type(kvtier.BlockKeys.from_bytes(keys.to_bytes()), kvtier.BlockKeys)
    assert_type([digest for digest in keys], list[bytes])  # noqa: C416 - iterated on purpose
    plan = kvtier.plan(residency, costs, resident=1, way="load")
    assert_type(kvtier.RestorePlan.from_json(plan.to_json()), kvtier.RestorePlan)
    return plan.to_json()


def errors(path: Path, spec: kvtier.KVSpec) -> kvtier.Store | None:
    """Tell errors apart by what to do about them."""
    link = kvtier.LinkThrottle(bytes_per_s=1e9, latency_s=1e-4)
    try:
        return kvtier.open(path, spec, policy="lru", links={kvtier.Tier.SSD: link, "host": link})
    except (kvtier.StoreLocked, kvtier.FormatError, kvtier.SpecMismatch, kvtier.UnsupportedModel):
        return None
    except kvtier.KVTierError as error:
        assert_type(error, kvtier.KVTierError)
        raise
