"""Part one, kvtier with torch: bits through every tier, pinned memory, rates, layers, overlap."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch

import kvtier
from kvtier import Tier
from kvtier_gpu_check.case import CannotRun, Case, Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["CASES"]

WAIT_S_MAX: Final = 60.0
GIB: Final = 1 << 30
TIMES: Final = 5
"""How often a rate is measured; the median counts."""


def spec_of(place: Place) -> kvtier.KVSpec:
    """Return the spec of an 8B model, 32 MiB a block; of a small run, 256 KiB."""
    layers, heads, width = (4, 2, 32) if place.small else (32, 8, 128)
    return kvtier.KVSpec(
        model="gpu-check", weights="sha256:" + "0" * 64, dtype="bfloat16",
        layers=layers, kv_heads=heads, head_dim=width,
    )  # fmt: skip


class Subject:
    """A prompt whose KV is random bits on the device, and slots to bring it back into."""

    def __init__(self, place: Place, blocks: int) -> None:
        self.place = place
        self.spec = spec_of(place)
        self.blocks = blocks
        self.bytes = blocks * self.spec.block_layout.block_bytes
        self.source = kvtier.TensorSlots.empty(self.spec, blocks, place.device)
        self.target = kvtier.TensorSlots.empty(self.spec, blocks, place.device)
        made = torch.Generator(place.device).manual_seed(0)
        for tensor in self.source.tensors:
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=made)
        self.keys = kvtier.BlockKeys.of(self.spec, torch.arange(blocks * self.spec.block_tokens))

    def open(self, path: Path, **settings: Any) -> kvtier.Store:
        """Open a store with room for twice the prompt, per tier."""
        room = {"host_bytes": 2 * self.bytes + GIB, "ssd_bytes": 2 * self.bytes + GIB, **settings}
        return kvtier.open(path, self.spec, device=self.place.device, **room)

    def put(self, store: kvtier.Store) -> float:
        """Store the prompt; returns when the source may be reused."""
        begun = time.perf_counter()
        transfer = store.put(self.keys, source=self.source, after=_event(self.place))
        assert transfer.released.wait(WAIT_S_MAX), "the source was not released"
        seconds = time.perf_counter() - begun
        stored = transfer.result(WAIT_S_MAX)
        assert stored.dropped == 0, f"the store dropped {stored.dropped} blocks"
        store.flush(WAIT_S_MAX)  # so that nothing is written while something is measured
        return seconds

    def restore(self, store: kvtier.Store, tier: Tier) -> float:
        """Load the prompt from ``tier`` and compare every bit; returns what the load took."""
        for tensor in self.target.tensors:
            tensor.zero_()
        wait(self.place)
        residency = store.lookup(self.keys)
        found = set(residency.tiers)
        assert found == {tier}, f"blocks lie in {found}, {tier} was wanted"
        plan = store.plan(residency, way="load")
        begun = time.perf_counter()
        with store.restore(plan, into=self.target) as session:
            assert session.next_step(WAIT_S_MAX) is None, "a load failed"
        wait(self.place)
        seconds = time.perf_counter() - begun
        self.compare()
        return seconds

    def compare(self, layer: int | None = None) -> None:
        """Raise unless source and target are the same bits; of one layer, or of all."""
        pairs = list(zip(self.source.tensors, self.target.tensors, strict=True))
        for put, got in pairs if layer is None else pairs[2 * layer : 2 * layer + 2]:
            assert torch.equal(put.view(torch.int16), got.view(torch.int16)), "wrong bits"


def wait(place: Place) -> None:
    """Wait for what was launched on the device."""
    if place.device.startswith("cuda"):
        torch.cuda.synchronize(place.device)


def _event(place: Place) -> Any:
    if not place.device.startswith("cuda"):
        return None
    return torch.cuda.current_stream(place.device).record_event()


def _median(run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(TIMES))


# -- cases


def bits(place: Place) -> dict[str, Any]:
    """Every bit pattern comes back from host memory, from the SSD and from the device tier."""
    subject = Subject(place, 8)
    path = place.fresh("bits")
    with subject.open(path) as store:
        subject.put(store)
        host_s = subject.restore(store, Tier.HOST)
    with subject.open(path, device_bytes=2 * subject.bytes) as store:
        ssd_s = subject.restore(store, Tier.SSD)
        found = store.prefetch(subject.keys, tier="device", deadline_s=WAIT_S_MAX)
        assert found.result(WAIT_S_MAX) == subject.blocks, "not all blocks reached the device tier"
        device_s = subject.restore(store, Tier.DEVICE)
    return {
        f"{tier}_gib_per_s": subject.bytes / GIB / seconds
        for tier, seconds in (("host", host_s), ("ssd", ssd_s), ("device", device_s))
    }


def pinned(place: Place) -> dict[str, Any]:
    """Host memory is pinned piece by piece as it fills, over more than one piece."""
    place.need_cuda()
    subject = Subject(place, 8 if place.small else 72)  # 2.25 GiB: three pieces
    with subject.open(place.fresh("pinned")) as store:
        subject.put(store)
        subject.restore(store, Tier.HOST)
        usage = store.stats()["tiers"]["host"]
    assert usage["pin_failed_bytes"] == 0, f"{usage['pin_failed_bytes']} bytes were not pinned"
    assert usage["pinned_bytes"] >= subject.bytes, f"{usage['pinned_bytes']} bytes are pinned"
    return {"pinned_gib": usage["pinned_bytes"] / GIB, "filled_gib": subject.bytes / GIB}


def rates(place: Place) -> dict[str, Any]:
    """Copies between host memory and the GPU run at the link's own rate."""
    place.need_cuda()
    subject = Subject(place, 8 if place.small else 64)
    link = _link_rates(place, subject.bytes)
    with subject.open(place.fresh("rates")) as store:
        put_s = subject.put(store)
        subject.restore(store, Tier.HOST)
        load_s = _median(lambda: subject.restore(store, Tier.HOST))
    load, put = subject.bytes / load_s, subject.bytes / put_s
    return {
        "link_to_gpu_gib_per_s": link[0] / GIB,
        "link_from_gpu_gib_per_s": link[1] / GIB,
        "load_gib_per_s": load / GIB,
        "first_put_gib_per_s": put / GIB,  # pins its memory as it goes
        "load_vs_link": load / link[0],
        "put_vs_link": put / link[1],
    }


def _link_rates(place: Place, nbytes: int) -> tuple[float, float]:
    host = torch.empty(min(nbytes, GIB), dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=place.device)

    def seconds(to: torch.Tensor, source: torch.Tensor) -> float:
        wait(place)
        begun = time.perf_counter()
        to.copy_(source, non_blocking=True)
        wait(place)
        return time.perf_counter() - begun

    seconds(device, host), seconds(host, device)
    return (
        host.numel() / _median(lambda: seconds(device, host)),
        host.numel() / _median(lambda: seconds(host, device)),
    )


def layers(place: Place) -> dict[str, Any]:
    """A layerwise restore hands out layer by layer: the first one long before the last one."""
    subject = Subject(place, 8 if place.small else 32)
    with subject.open(place.fresh("layers")) as store:
        subject.put(store)
        subject.restore(store, Tier.HOST)
        plan = store.plan(store.lookup(subject.keys), way="load")
        for tensor in subject.target.tensors:
            tensor.zero_()
        wait(place)
        begun = time.perf_counter()
        ready: list[float] = []
        with store.restore(plan, into=subject.target, layerwise=True) as session:
            assert session.next_step(WAIT_S_MAX) is None, "a load failed"
            for layer in range(subject.spec.layers):
                session.wait_layer(layer, WAIT_S_MAX)
                ready.append(time.perf_counter() - begun)
        # Compared afterwards: comparing takes time of its own, and the copies go on meanwhile.
        for layer in range(subject.spec.layers):
            subject.compare(layer)
    return {
        "first_layer_s": ready[0],
        "last_layer_s": ready[-1],
        "last_over_first": ready[-1] / ready[0],
    }


def overlap(place: Place) -> dict[str, Any]:
    """Loads run while a stream computes: together they take little more than the longer one."""
    place.need_cuda()
    subject = Subject(place, 8 if place.small else 64)
    size = 1024 if place.small else 8192
    left = torch.randn(size, size, dtype=torch.bfloat16, device=place.device)

    def compute(rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(left, left)

    with subject.open(place.fresh("overlap")) as store:
        subject.put(store)
        load_s = _median(lambda: subject.restore(store, Tier.HOST))
        plan = store.plan(store.lookup(subject.keys), way="load")

        def timed(rounds: int, *, load: bool) -> float:
            wait(place)
            begun = time.perf_counter()
            if load:
                with store.restore(plan, into=subject.target) as session:
                    compute(rounds)
                    assert session.next_step(WAIT_S_MAX) is None, "a load failed"
            else:
                compute(rounds)
            wait(place)
            return time.perf_counter() - begun

        timed(3, load=False)
        rounds = max(1, round(20 * load_s / timed(20, load=False)))
        compute_s = _median(lambda: timed(rounds, load=False))
        both_s = _median(lambda: timed(rounds, load=True))
        subject.compare()
    hidden = (compute_s + load_s - both_s) / min(compute_s, load_s)
    return {"compute_s": compute_s, "load_s": load_s, "both_s": both_s, "hidden_share": hidden}


def gap(place: Place) -> dict[str, Any]:
    """Decoding beside a restore does not stutter: the longest step with loads and without."""
    place.need_cuda()
    subject = Subject(place, 8 if place.small else 64)
    left = torch.randn(2048, 2048, dtype=torch.bfloat16, device=place.device)

    def steps(count: int) -> list[float]:
        took = []
        for _ in range(count):
            begun = time.perf_counter()
            for _ in range(20):
                torch.mm(left, left)
            torch.cuda.current_stream(place.device).synchronize()
            took.append(time.perf_counter() - begun)
        return took

    with subject.open(place.fresh("gap")) as store:
        subject.put(store)
        subject.restore(store, Tier.HOST)
        plan = store.plan(store.lookup(subject.keys), way="load")
        steps(20)
        alone, beside = steps(200), []
        with store.restore(plan, into=subject.target) as session:
            while session.poll_step() is kvtier.PENDING:
                beside += steps(1)
    if len(beside) < TIMES:
        raise CannotRun(f"the restore took only {len(beside)} steps: nothing to compare")
    median = statistics.median(alone)
    return {
        "steps_beside_loads": len(beside),
        "median_step_ms": 1e3 * median,
        "median_over_alone": statistics.median(beside) / median,
        "longest_over_alone": max(beside) / median,
    }


CASES: Final = (
    Case("bits", bits, 15),
    Case("pinned", pinned, 20),
    Case("rates", rates, 25, low={"load_vs_link": 0.8}),
    Case("layers", layers, 15, low={"last_over_first": 4.0}),
    Case("overlap", overlap, 25, low={"hidden_share": 0.7}),
    Case("gap", gap, 15),
)
