"""What the restore benchmark restores: models, throttled and counted ways to their KV, and trials.

Every restore is cold (no host tier, a new cache), goes into poisoned buffers, and must be bit for
bit what plain transformers compute in the same 256-token steps.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
import transformers
from _harness import (
    Bench,
    Stopwatch,
    Trial,
    measure,
)

import kvtier
import kvtier_hf
from kvtier.tiers.fs import PosixFileSystem
from kvtier_demo.prompt import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.planner import Way
    from kvtier.tiers.fs import FileSystem

BLOCK: Final = 256
SUFFIX: Final = 8
"""Tokens behind the full blocks: a prompt is never only blocks, and their time never counts."""


# -- links


class LabelledLink(kvtier.LinkThrottle):
    """A link that the store's cost file knows by a name: another rate, the same belief."""

    def __init__(self, bytes_per_s: float, label: str) -> None:
        super().__init__(bytes_per_s)
        self._label = label

    def __repr__(self) -> str:
        return f"LabelledLink({self._label!r})"

    def ends(self, start: float, nbytes: float) -> float:
        """Return when a transfer that starts at ``start`` ends, in seconds from the first load."""
        return start + nbytes / self.bytes_per_s


class VaryingLink(LabelledLink):
    """A link whose rate changes at random, from its first load on, around a mean."""

    SEGMENTS: Final = 64
    SEGMENT_BLOCKS: Final = 2
    SIGMA: Final = 0.5

    def __init__(self, bytes_per_s: float, label: str, block_bytes: int, seed: int) -> None:
        super().__init__(bytes_per_s, label)
        numbers = random.Random(seed)  # noqa: S311 - a schedule, not a secret
        factors = [math.exp(numbers.gauss(0.0, self.SIGMA)) for _ in range(self.SEGMENTS)]
        mean = statistics.fmean(factors)
        self._rates = [bytes_per_s * factor / mean for factor in factors]
        self._segment_s = self.SEGMENT_BLOCKS * block_bytes / bytes_per_s
        self._begun: float | None = None
        self._free = 0.0
        self._gate = threading.Lock()

    def reserve(self, now: float, nbytes: int) -> float:
        """Put a transfer into the queue and return when it ends, on the clock of ``now``."""
        with self._gate:
            if self._begun is None:
                self._begun = now
            self._free = self.ends(max(now - self._begun, self._free), nbytes)
            return self._begun + self._free

    def ends(self, start: float, nbytes: float) -> float:
        """Return when a transfer that starts at ``start`` ends, in seconds from the first load."""
        segment = int(start / self._segment_s)
        while True:
            rate = self._rates[segment % self.SEGMENTS]
            stop = (segment + 1) * self._segment_s
            if nbytes <= (stop - start) * rate:
                return start + nbytes / rate
            nbytes -= (stop - start) * rate
            start, segment = stop, segment + 1


class CountingFileSystem(PosixFileSystem):
    """Counts reads of at least ``least`` bytes: one per block."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.reads = 0
        self._gate = threading.Lock()

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read, and count."""
        count = super().read(fd, into, offset)
        with self._gate:
            self.reads += count >= self.least
        return count


def best_split(compute_s: Sequence[float], loaded_s: Sequence[float]) -> float:
    """Return the best time if the first k blocks are computed and the other n - k loaded.

    ``loaded_s[j]`` is when j blocks would be loaded.
    """
    computed_s = [0.0, *accumulate(compute_s)]
    n = len(compute_s)
    return min(max(computed_s[k], loaded_s[n - k]) for k in range(n + 1))


# -- a model and its prompt


def body(model: transformers.PreTrainedModel) -> torch.nn.Module:
    """Return the model without its head."""
    found: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return found


class Meter:
    """Watches a model's forwards: tokens, seconds of each, and whether the thread had its core."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.tokens = 0
        self.steps: list[float] = []
        self.watch = Stopwatch()
        self._body = body(model)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            self._body.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._body.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _module: object, _args: object, kwargs: dict[str, Any]) -> None:
        self.tokens += kwargs["input_ids"].shape[1]
        self._before = self.watch.wall_s
        self.watch.__enter__()

    def _end(self, *_: object) -> None:
        self.watch.__exit__()
        self.steps.append(self.watch.wall_s - self._before)


Begin = Callable[[kvtier.Store, kvtier.RestorePlan, kvtier.TensorSlots], Any]
"""Begins the session in which a plan is carried out."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """What is done with a stored prefix: how it is planned, and how the plan is carried out."""

    plan: Callable[[kvtier.Store, kvtier.Residency], kvtier.RestorePlan]
    begin: Begin = kvtier.Store.restore

    @classmethod
    def of(cls, way: Way) -> Strategy:
        """Return kvtier's own."""
        return cls(lambda store, residency: store.plan(residency, way=way))


@dataclass(slots=True)
class PoisonedStore:
    """A store that fills an engine's slots with NaN before it restores into them."""

    store: kvtier.Store
    begin: Begin = kvtier.Store.restore
    seconds: float = 0.0

    def restore(self, plan: kvtier.RestorePlan, into: kvtier.TensorSlots) -> kvtier.RestoreSession:
        """Poison, and count how long that took."""
        begun = time.perf_counter()
        for tensor in into.tensors:
            tensor.fill_(math.nan)
        self.seconds += time.perf_counter() - begun
        return self.begin(self.store, plan, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass(frozen=True, slots=True)
class Restored:
    """One restore: how long it took, what was planned with which beliefs, and what was done."""

    trial: Trial
    plan: kvtier.RestorePlan
    believed: kvtier.CostModel
    events: list[kvtier.TraceEvent]


@dataclass(slots=True)
class Subject:
    """A model, a prompt, a folder in which the prompt's KV is stored, and what that KV must be."""

    model: transformers.PreTrainedModel
    ids: torch.Tensor
    folder: str
    spec: kvtier.KVSpec = field(init=False)
    reference: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.spec = kvtier_hf.spec_of(self.model)
        self.reference = self._chunked()
        with (
            kvtier.open(self.folder, self.spec, host_bytes=0, ssd_bytes="4GiB") as store,
            kvtier_hf.attach(self.model, store) as kv,
        ):
            kv.put(kv.prefill(self.ids)).result(60)
            store.flush()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.spec.block_layout.block_bytes

    def _chunked(self) -> list[torch.Tensor]:
        """Compute the KV of all full blocks in steps of one block, without kvtier."""
        cache = transformers.DynamicCache(config=self.model.config)
        run = body(self.model)
        name = "cache" if "cache" in signature(run.forward).parameters else "past_key_values"
        with torch.no_grad():
            for start in range(0, self.ids.shape[1] // BLOCK * BLOCK, BLOCK):
                step = self.ids[:, start : start + BLOCK]
                run(input_ids=step, use_cache=True, **{name: cache})
        layers: list[Any] = cache.layers
        return [kv[0] for layer in layers for kv in (layer.keys, layer.values)]

    def stock(self, blocks: int) -> Trial:
        """Prefill the blocks' tokens with plain transformers."""
        ids = self.ids[:, : blocks * BLOCK]
        with Meter(self.model) as meter, torch.no_grad():
            begun = time.perf_counter()
            self.model(ids, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - begun
        return Trial(seconds, meter.watch.held)

    def restore(
        self,
        blocks: int,
        link: kvtier.LinkThrottle | None,
        way: Way | Strategy = "best",
        *,
        fs: FileSystem | None = None,
        device: str = "cpu",
        on: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> Trial:
        """Restore the first ``blocks`` blocks over ``link`` and check every byte.

        ``device`` separates what is believed about recomputing; ``on`` runs the restore elsewhere.
        """
        return self._restored(blocks, link, way, fs=fs, device=device, on=on).trial

    def traced(self, blocks: int, link: kvtier.LinkThrottle | None, way: Way = "best") -> Restored:
        """Restore like ``restore`` and note what each lane did."""
        return self._restored(blocks, link, way, trace=kvtier.Trace())

    def _restored(
        self,
        blocks: int,
        link: kvtier.LinkThrottle | None,
        way: Way | Strategy,
        *,
        fs: FileSystem | None = None,
        device: str = "cpu",
        on: Callable[[Callable[[], Any]], Any] = lambda work: work(),
        trace: kvtier.Trace | None = None,
    ) -> Restored:
        strategy = way if isinstance(way, Strategy) else Strategy.of(way)
        ids = self.ids[:, : blocks * BLOCK + SUFFIX]
        links = {} if link is None else {"ssd": link}
        settings: dict[str, Any] = {"host_bytes": 0, "ssd_bytes": "4GiB", "links": links}
        with (
            kvtier.open(
                self.folder, self.spec, fs=fs, device=device, trace=trace, **settings
            ) as store,
            kvtier_hf.attach(self.model, store) as kv,
            Meter(self.model) as meter,
        ):
            poisoned = PoisonedStore(store, strategy.begin)
            kv.store = cast("Any", poisoned)
            believed = store.costs

            def work() -> tuple[kvtier.RestorePlan, kvtier_hf.KVTierCache, float]:
                begun = time.perf_counter()
                plan = strategy.plan(store, store.lookup(store.keys(ids)))
                cache = kv.prefill(ids, plan=plan)
                return plan, cache, time.perf_counter() - begun - poisoned.seconds

            plan, cache, seconds = on(work)
            report = cache.report
        self._check(blocks, cache)
        assert meter.tokens == report.recomputed * BLOCK, "a token was computed twice, or not"
        assert (report.loaded + report.recomputed, report.failed) == (blocks, 0)
        detail = {
            "loaded": report.loaded,
            "recomputed": report.recomputed,
            "predicted_s": report.predicted_s,
            "measured_s": report.measured_s,
            "steps_s": meter.steps,
        }
        trial = Trial(seconds, meter.watch.held, detail)
        events = [] if trace is None else trace.events
        last = max((event.session for event in events), default=0)  # those before it calibrated
        mine = [event for event in events if event.session == last]
        return Restored(trial, plan, believed, mine)

    def _check(self, blocks: int, cache: kvtier_hf.KVTierCache) -> None:
        stop = blocks * BLOCK
        for ours, theirs in zip(cache.slots.tensors, self.reference, strict=True):
            assert torch.equal(ours[:, :stop], theirs[:, :stop]), "restored KV differs"

    def rate(self, blocks: int, seconds: float) -> float:
        """Return the rate at which loading the blocks takes so long."""
        return blocks * self.block_bytes / seconds

    def recompute_s(self, blocks: int) -> float:
        """Return how long recomputing the blocks takes here and now."""
        return math.fsum(measure(partial(self.recompute, blocks)).detail["steps_s"])

    def recompute(self, blocks: int) -> Trial:
        """Recompute every block through the executor."""
        return self.restore(blocks, None, "recompute")


@contextmanager
def smollm2(blocks: int, bench: Bench) -> Iterator[Subject]:
    """Load the real model and store the KV of a document of so many blocks."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        bench.console.status("SmolLM2-135M: loading, computing the reference, storing") as status,
    ):
        reader = Reader.load(blocks * BLOCK + SUFFIX, 1, status.update)
        subject = Subject(reader.model, reader.document[:, : blocks * BLOCK + SUFFIX], folder)
        status.stop()
        yield subject


@contextmanager
def tiny(blocks: int) -> Iterator[Subject]:
    """Make a tiny Llama with random weights, whose blocks get dearer visibly with position."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1 << 15,
    )
    model = transformers.LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    ids = torch.randint(0, config.vocab_size, (1, blocks * BLOCK + SUFFIX))
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        yield Subject(model, ids, folder)
