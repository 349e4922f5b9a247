"""The worker's side: one rank's store, which does what each step's orders say and reports it.

Nothing here waits for a copy, and nothing decides: a load that fails, a save that finds no room and
a store that breaks are answers. What is told twice, or too late, is answered like the first time.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtier import CatalogChanges, KVTierError, Store
from kvtier_vllm.engine import Sound
from kvtier_vllm.messages import Hello, RankReport
from kvtier_vllm.slots import PagedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from kvtier import CostModel, KVSpec, Loads, Prefetch, PutResult, StoreReader, Transfer
    from kvtier_vllm.engine import Engine, Look
    from kvtier_vllm.messages import Load, Orders, Save
    from kvtier_vllm.slots import EnginePages

__all__ = ["WorkerSide"]

log = logging.getLogger("vllm.kvtier")

IDLE_WAIT_S: Final = 0.002
"""How long a step that computes nothing waits for a load, so that its loop leaves the CPU alone."""
STATS_S: Final = 1.0
"""How often a rank's counters are reported, at most."""


@dataclass(slots=True)
class _Restore:
    """One restore on this rank."""

    loads: Loads
    slots: PagedSlots
    asked: bool = False
    """The scheduler wants to know when nothing writes any more."""


class WorkerSide:
    """One rank's store in the hands of the scheduler. ``open_store`` opens it for a spec.

    One thread drives it: the worker's. After the last step ``shutdown`` closes the store.
    """

    def __init__(
        self,
        engine: Engine,
        open_store: Callable[[KVSpec], Store | StoreReader],
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_wait_s: float = IDLE_WAIT_S,
    ) -> None:
        self.rank = engine.rank
        self._engine = engine
        self._open_store = open_store
        self._clock = clock
        self._idle_wait_s = idle_wait_s
        self._changed = threading.Condition()
        self._told = False
        self._store: Store | StoreReader | None = None
        self._namespace = b""
        self._pages: EnginePages | None = None
        self._restores: dict[int, _Restore] = {}
        self._ended: list[int] = []
        self._failed: list[tuple[int, int]] = []
        self._saves: list[Save] = []
        self._puts: dict[int, Transfer[PutResult]] = {}
        self._released: list[int] = []
        self._hints: dict[int, Prefetch] = {}
        self._look: Look | None = None
        self._stale = False
        self._resets = 0
        self._hello: Hello | None = None
        self._greets = False  # the next report has a new hello
        self._sequence = 0
        self._forget = False
        self._costs: CostModel | None = None
        self._stats_at = -STATS_S

    # -- its life

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Open the store for what the engine allocated; or go on with other tensors."""
        self._engine.register(caches)
        if self._hello is None:
            self._open()
        else:
            self._pages = self._engine.pages()

    def hello(self) -> Hello:
        """Say what is stored, before the first step; what comes later is in the reports."""
        if self._hello is None:
            raise RuntimeError("hello: the engine's KV tensors are not registered yet")
        return self._hello

    def shutdown(self) -> None:
        """Close the store: what was accepted is flushed, within ``close_s_max``."""
        for hint in self._hints.values():
            hint.cancel()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self, purging: bytes | None = None) -> None:
        """Open the store for the weights as they are now, without what is of that namespace."""
        spec = self._engine.spec()
        self._pages = self._engine.pages()
        self._namespace = spec.namespace
        self._look, self._stale = None, False
        self._store = store = self._open_store(spec)
        if purging is not None:
            _purged(store, purging)
        stored = self._of_this_model(store.changes())
        self._sequence, self._costs = stored.sequence, store.costs
        self._hello = Hello(
            self.rank, spec.to_bytes(), spec.block_layout.block_bytes, stored, store.costs,
            self._resets, io=store.stats()["tiers"]["ssd"]["io"],
        )  # fmt: skip

    def _start_afresh(self, resets: int) -> None:
        """Destroy what is stored of this model and open for the weights as they are now."""
        self._end_all()
        store, self._store = self._store, None
        namespace, purged = self._namespace, False
        if store is not None:
            purged = _purged(store, namespace)
            store.close()  # nothing is loaded or read afterwards
        self._failed += self._collect_answers()  # what landed is of the life before
        self._collect_puts(lost=True)
        self._hints.clear()
        self._saves.clear()
        self._resets = resets
        try:
            self._open(purging=None if purged else namespace)
            self._greets = True
        except KVTierError as error:
            log.error("kvtier: the store is off until the next reset: %s", error)  # noqa: TRY400

    # -- a step, in the order in which the engine calls

    def take_orders(self, orders: Orders) -> None:
        """Start what a step asks for; before its forward."""
        if orders.resets > self._resets:
            self._start_afresh(orders.resets)
        self._saves = list(orders.saves)
        if orders.loads or orders.saves or self._restores:
            self._look_at_weights()
        self._load(orders)
        try:
            self._learn(orders)
        except KVTierError as error:
            self._give_up(error)

    def after_forward(self) -> None:
        """Hand over what a step computed; once its forward is queued."""
        saves, self._saves = self._saves, []
        store, look = self._store, self._look
        if not saves:
            return
        if not isinstance(store, Store) or self._pages is None or look is None or self._stale:
            self._released += [save.save for save in saves]
            return
        sound = Sound(self._engine.fence(), look)
        for save in saves:
            try:
                slots = self._slots_of(save, self._pages)
                self._puts[save.save] = store.put(
                    replace(save.keys, namespace=self._namespace), slots,
                    blocks=range(save.start, save.stop), after=sound,
                )  # fmt: skip
            except KVTierError as error:
                self._released.append(save.save)
                self._give_up(error)

    def idle_wait(self) -> None:
        """Wait a little for what is under way, in a step that computes nothing."""
        if not self._restores and not self._puts:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._told, self._idle_wait_s)
            self._told = False

    def report(self) -> RankReport | None:
        """Return what happened since the last report; None if nothing did."""
        self._collect_puts()
        landed = self._collect_answers() if self._look is None or self._look.ready else []
        failed, self._failed = self._failed, []
        ended, self._ended = self._ended, []
        released, self._released = self._released, []
        hello, self._greets = self._hello if self._greets else None, False
        stale = self._stale
        changes, costs, stats = self._news()
        if not (landed or failed or ended or released or hello or changes or costs or stale):
            return None
        return RankReport(
            landed=tuple(landed), failed=tuple(failed), ended=tuple(ended),
            released=tuple(released), changes=changes, costs=costs, hello=hello, stats=stats,
            stale=stale,
        )  # fmt: skip

    # -- inside

    def _look_at_weights(self) -> None:
        if self._store is None:
            return
        if self._look is not None and self._look.ready:
            self._notice(self._look)
        self._look = self._engine.look()
        if self._look.ready:
            self._notice(self._look)

    def _notice(self, look: Look) -> None:
        if look.changed and not self._stale:
            self._stale = True
            log.warning(
                "kvtier: the weights changed without a reset of the cache: nothing is restored or "
                "stored until it is reset, which is asked for now"
            )

    def _load(self, orders: Orders) -> None:
        for number, block in orders.cancels:
            if number in self._restores:
                self._restores[number].loads.cancel(block)
        fence = self._engine.fence() if orders.loads else None
        for load in orders.loads:
            self._start(load, fence)
        for number in orders.ends:
            self._end(number)

    def _start(self, load: Load, fence: Any) -> None:
        store, pages = self._store, self._pages
        if store is None or pages is None or self._stale:
            self._failed.append((load.restore, load.block))
            return
        restore = self._restores.get(load.restore)
        try:
            if restore is None:
                slots = PagedSlots(pages)
                restore = _Restore(store.loads(slots, self._tell), slots)
                self._restores[load.restore] = restore
            restore.slots.place(load.block, load.pages, after=fence)
            restore.loads.start(load.block, load.hash, load.tier)
        except KVTierError as error:
            self._failed.append((load.restore, load.block))
            self._give_up(error)

    def _end(self, number: int) -> None:
        restore = self._restores.get(number)
        if restore is None:
            self._ended.append(number)
        else:
            restore.asked = True
            restore.loads.end()

    def _end_all(self) -> None:
        for restore in self._restores.values():
            restore.loads.end()

    def _learn(self, orders: Orders) -> None:
        for number in orders.unhints:
            if (hint := self._hints.pop(number, None)) is not None:
                hint.cancel()
        store = self._store
        if store is None:
            return
        for wanted in orders.hints:
            keys = replace(wanted.keys, namespace=self._namespace)
            self._hints[wanted.hint] = store.prefetch(keys)
        for step in orders.measured:
            store.measured(step.start, step.tokens, step.seconds, step.overlap)

    def _slots_of(self, save: Save, pages: EnginePages) -> PagedSlots:
        slots = PagedSlots(pages)
        each = len(save.pages) // (save.stop - save.start)
        for block in range(save.start, save.stop):
            at = (block - save.start) * each
            slots.place(block, save.pages[at : at + each])
        return slots

    def _collect_answers(self) -> list[tuple[int, int]]:
        """Take what loads answered; returns what landed, by the same weights as it was stored."""
        if self._look is not None and self._look.ready:
            self._notice(self._look)
        landed: list[tuple[int, int]] = []
        for number, restore in list(self._restores.items()):
            over = restore.loads.ended  # asked first: what is answered by then is taken now
            for block, there in restore.loads.take():
                there = there and not self._stale  # noqa: PLW2901 - the same answer, corrected
                (landed if there else self._failed).append((number, block))
            if (error := restore.loads.error) is not None:
                log.error("kvtier: a copy into the engine's pages failed: %r", error)
                restore.loads.error = None
            if over:
                del self._restores[number]
                self._ended += [number] if restore.asked else []
        return landed

    def _collect_puts(self, *, lost: bool = False) -> None:
        done = [save for save, put in self._puts.items() if lost or put.released.is_set()]
        for save in done:
            del self._puts[save]
        self._released += done

    def _news(self) -> tuple[CatalogChanges | None, CostModel | None, dict[str, float]]:
        """Return what changed in the store, what costs moved, and the counters now and then."""
        forget, self._forget = self._forget, False
        if self._store is None:
            return (CatalogChanges(self._sequence, (), complete=True) if forget else None), None, {}
        try:
            changes = self._of_this_model(self._store.changes(self._sequence))
            self._sequence = changes.sequence
            costs, stats = self._store.costs, self._counters(self._store)
        except KVTierError as error:
            self._give_up(error)
            return None, None, {}
        moved = costs != self._costs
        self._costs = costs
        told = changes if changes.blocks or changes.complete else None
        return told, costs if moved else None, stats

    def _counters(self, store: Store | StoreReader) -> dict[str, float]:
        now = self._clock()
        if now - self._stats_at < STATS_S:
            return {}
        self._stats_at = now
        return {name: float(count) for name, count in store.stats()["counters"].items()}

    def _of_this_model(self, changes: CatalogChanges) -> CatalogChanges:
        blocks = tuple(block for block in changes.blocks if block[0] == self._namespace)
        return replace(changes, blocks=blocks)

    def _tell(self) -> None:
        with self._changed:
            self._told = True
            self._changed.notify_all()

    def _give_up(self, error: KVTierError) -> None:
        """Go on without a store that broke: everything is a miss from now on."""
        store, self._store = self._store, None
        if store is None:
            return
        log.error("kvtier: the store is off until the cache is reset: %s", error)
        self._end_all()
        store.close()
        self._collect_puts(lost=True)
        self._forget = True


def _purged(store: Store | StoreReader, namespace: bytes) -> bool:
    """Destroy what a store has of a namespace; whether nothing is left that is ours to destroy."""
    if not isinstance(store, Store):
        return True
    try:
        left = store.purge(namespace=namespace).left
    except KVTierError as error:
        log.warning("kvtier: blocks of before the reset are left: %s", error)
        return False
    return not left
