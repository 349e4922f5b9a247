"""The scheduler's side: which requests are restored and saved, and what every rank is to do.

Owns everything that the scheduler's process knows about blocks: the mirror of what is stored, the
restores and saves under way, the pages that are held for them. It is told what vLLM's scheduler
does, in its order, and knows nothing of vLLM.

::

    lookup -> admitted -> (step_begins -> restoring -> orders -> report -> step_done)* -> finished
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvtier_vllm.announcing import Announcements, Silence
from kvtier_vllm.asked import NOTHING_ASKED, Asked
from kvtier_vllm.counting import count_blocks, count_restore, count_sources, note_cached
from kvtier_vllm.hints import Hints
from kvtier_vllm.holds import Holds, Pages
from kvtier_vllm.messages import Orders
from kvtier_vllm.mirror import Mirror
from kvtier_vllm.plain import settled
from kvtier_vllm.planning import Limits, introduction, plan_restore
from kvtier_vllm.restores import Restores
from kvtier_vllm.saves import Saves
from kvtier_vllm.steps import Steps
from kvtier_vllm.tally import Tally
from kvtier_vllm.tracked import Tracked
from kvtier_vllm.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtier import Tier
    from kvtier_vllm.messages import Hello, RankReport
    from kvtier_vllm.restore import Restore
    from kvtier_vllm.tracked import EngineRequest

__all__ = ["DEFER_S_MAX", "Coordinator"]

DEFER_S_MAX: Final = 60.0
"""A request waits so long for another one's restore to bring its blocks, then plans its own."""
PLAN_KEPT_S_MAX: Final = 0.1
"""A request for which there is no room keeps its plan so long, instead of a new one each step."""


class Coordinator:
    """One engine's restores and saves; everything on the scheduler's thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.tally = Tally()
        self._say = say
        self._clock = clock
        self._mirror = Mirror(limits.ranks)
        self._holds = Holds()
        self._saves = Saves(
            self._holds,
            limits.ranks,
            dropped=lambda blocks: self.tally.add("save_blocks_dropped", blocks),
        )
        self._restores = Restores(self._holds, limits.ranks)
        self._hints = Hints()
        self._steps = Steps(clock)
        self._requests: dict[str, Tracked] = {}
        self._resets = 0
        self._received: list[str] = []
        self._spare: Callable[[], int] | None = None
        self._events: Announcements = Silence()
        self._trust = Trust(say)
        self._introduced = False

    # -- whom it works with

    def bind(self, pages: Pages) -> None:
        """Learn where the engine's pages are kept."""
        self._holds.bind(pages)

    def drive(self, spare: Callable[[], int]) -> None:
        """Be driven by a hybrid scheduler; ``spare``: pages that nobody counts on."""
        self._spare = spare

    def announce(self, events: Announcements) -> None:
        """Tell ``events`` from now on what may have changed; they ask ``stored_in``."""
        self._events = events

    def stored_in(self, digest: bytes) -> tuple[Tier, ...]:
        """Return the tier from which every rank could load a block; none if one lacks it."""
        (tier,) = self._mirror.tiers((digest,)) if self._mirror.ready else (None,)
        return () if tier is None else (tier,)

    def hello(self, hello: Hello) -> None:
        """Take a rank's account of its store, and its weights."""
        changed = self._mirror.hello(hello)
        self._events.moved([digest for _, digest, _ in hello.stored.blocks])
        if self._trust.changed(changed, self._mirror):
            for tracked in self._requests.values():
                tracked.forget_keys()
                tracked.stale = tracked.request.num_computed_tokens > 0
        if self._mirror.ready and not self._introduced:
            self._introduced = True
            self._say(introduction(self.limits, self._mirror, hello.io))

    # -- requests, as vLLM's scheduler takes them up

    def arrived(
        self,
        request: EngineRequest,
        *,
        tenant: str = "",
        adapter: str = "",
        refused: str = "",
        asked: Asked = NOTHING_ASKED,
    ) -> None:
        """Follow a request; ``refused``: why it is neither restored nor saved."""
        tracked = Tracked(request, tenant, adapter, refused, asked)
        self._requests[request.request_id] = tracked
        self._wait(tracked)

    def lookup(self, request_id: str, local: int) -> tuple[int | None, bool]:
        """Plan a request of which the engine holds ``local`` tokens.

        Returns what ``get_num_new_matched_tokens`` does. Nothing is begun until ``admitted``.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.restore is not None or not tracked.asked.restore:
            return 0, False
        now = self._clock()
        planned = tracked.planned
        if planned is None or tracked.local != local or now - planned.begun > PLAN_KEPT_S_MAX:
            tracked.local = local
            planned = tracked.planned = self._plan(tracked, now)
        if planned is None:
            return 0, False
        if self._defers(tracked, planned, now):
            return None, False
        planned.claimed = planned.end - local if planned.waits else 0
        return planned.claimed, planned.claimed > 0

    def admitted(self, request_id: str) -> None:
        """Begin the restore that was planned: the engine has given the request its pages."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.admitted = True
        if not tracked.asked.prefetch:
            self._hints.take_back(request_id)
        if tracked.keys is not None:  # blocks that were stored before can be announced now
            self._events.note(tracked.request, tracked.keys.hashes, range(len(tracked.keys)))
        planned, tracked.planned = tracked.planned, None
        count_sources(self.tally, tracked, planned, self._mirror)
        if planned is not None and self._give_pages(planned):
            self._restores.start(planned, self._pages_per_block)
            tracked.restore = planned

    def preempted(self, request_id: str) -> None:
        """Leave a request's restore: its pages are taken from it, and it will be planned anew."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        self._leave(tracked)
        self._wait(tracked)
        tracked.admitted = False
        tracked.saved = 0
        tracked.stale = False  # it will be computed anew, under the weights as they are

    def finished(self, request_id: str) -> None:
        """Save what is left of a request and leave its restore; its pages are taken from it."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        request = tracked.request
        done = min(request.num_computed_tokens, request.num_tokens - 1)
        if tracked.restore is not None:
            done = min(done, tracked.restore.position)
        self._save(tracked, done)
        # Only a plain load is always parked: the engine then keeps the pages until it is told.
        self._leave(tracked, owes=not self.limits.hybrid)
        self._hints.take_back(request_id)
        del self._requests[request_id]

    # -- one engine step

    def restoring(self, request_id: str) -> Restore | None:
        """Return a request's restore, if it has one."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.restore

    def restores(self) -> Iterator[tuple[EngineRequest, Restore]]:
        """Yield requests that are being restored, by the costs as they are now."""
        costs = self._mirror.costs if self._restores and self._mirror.ready else None
        for restore in self._restores:
            if costs is not None:
                restore.recosted(costs)
            yield self._requests[restore.request_id].request, restore

    def over(self, request_id: str) -> None:
        """End a restore of which everything is in place."""
        tracked = self._requests[request_id]
        restore = tracked.restore
        if restore is None:
            return
        count_restore(self.tally, restore, self._clock() - restore.begun)
        note_cached(tracked, restore)
        tracked.restore = None
        self._restores.end(restore)

    def cap(self, request_id: str) -> int | None:
        """Return the token that a request's prefill must not pass; None if there is none."""
        tracked = self._requests.get(request_id)
        restore = tracked and (tracked.restore or tracked.planned)
        return restore.cap if restore else None

    def now(self) -> float:
        """Return the time, on the clock of everything in here."""
        return self._clock()

    def orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return what every rank is to do with a step that computes so many tokens of each."""
        chunks = []
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                start, known = tracked.request.num_computed_tokens, tracked.request.num_tokens
                self._save(tracked, min(start + tokens, known))
                chunks.append((start, tokens))
        self._steps.began(chunks, loading=bool(self._restores))
        if self._mirror.ready:
            self._hints.give(self._mirror)
        loads, cancels, ends = self._restores.orders()
        hints, unhints = self._hints.orders()
        return Orders(
            loads=tuple(loads),
            cancels=tuple(cancels),
            ends=ends,
            saves=self._saves.take(),
            hints=hints,
            unhints=unhints,
            measured=self._steps.take(),
            resets=self._resets,
        )

    def report(self, rank: int, report: RankReport) -> None:
        """Take what a rank says has happened."""
        if report.hello is not None:
            self.hello(report.hello)
        if report.stale and self._mirror.ready:
            self.reset()
        if report.changes is not None:
            self._mirror.changed(rank, report.changes)
            self._events.moved([digest for _, digest, _ in report.changes.blocks])
        if report.costs is not None:
            self._mirror.recosted(rank, report.costs)
        self.tally.rank(rank, report.stats)
        self._restores.report(rank, report, self._clock())
        for number in report.released:
            self.tally.add("save_blocks_released", self._saves.released(rank, number))

    def step_done(self) -> None:
        """Note that the oldest step that is out has been processed."""
        self._steps.ended(loading=bool(self._restores))

    def received(self) -> list[str]:
        """Return the requests that a plain load kept, and that may go on.

        Where the hybrid scheduler drives, it does this by itself.
        """
        if not self.limits.hybrid:
            for request, restore in self.restores():
                if settled(request, restore, self._holds.engine, self._clock()):
                    self._received.append(request.request_id)
                    self.over(request.request_id)
        received, self._received = self._received, []
        return received + self._restores.take_owed()

    @property
    def expects_answers(self) -> bool:
        """Whether ranks have something to do or to answer."""
        return bool(
            self._saves or self._restores.ending or self._hints.waits or not self._mirror.heard
        )

    @property
    def frees_pages(self) -> bool:
        """Whether pages that the engine lacks are only kept until ranks have answered."""
        return bool(self._saves or self._restores.ending) and self._holds.any_unshared

    # -- resets

    def reset(self) -> None:
        """Have every rank forget what is stored, and take its weights' fingerprint again."""
        self._resets += 1
        self.tally.add("cache_resets")
        self._mirror.reset(self._resets)
        self._events.cleared()
        self._trust.reset(self._holds.engine)
        self._saves.forget_queued()
        now = self._clock()
        for tracked in self._requests.values():
            tracked.forget_keys()
            if tracked.restore is not None:
                tracked.restore.expire(now)

    def cleared(self) -> None:
        """Note that the engine's own prefix cache was emptied."""
        self._trust.cleared()

    def lent(self) -> Any:
        """Hold no page within this scope, so that the engine may empty its prefix cache."""
        return self._holds.lent()

    # -- inside

    @property
    def _pages_per_block(self) -> int:
        return self._mirror.spec.block_tokens // self.limits.page_tokens

    def _wait(self, tracked: Tracked) -> None:
        if self.limits.restore and not tracked.refused:
            self._hints.wait(tracked)

    def _plan(self, tracked: Tracked, now: float) -> Restore | None:
        doubt = tracked.refused or self._trust.suspect
        if doubt or not (self.limits.restore and self._mirror.ready):
            return None
        planned = plan_restore(
            tracked.request,
            tracked.known_keys(self._mirror.spec),
            tracked.local,
            limits=self.limits,
            mirror=self._mirror,
            busy=self._others(tracked),
            now=now,
            cover_s=self._steps.cover_s,
        )
        self.tally.observe("lookup_seconds", self._clock() - now)
        return planned

    def _others(self, tracked: Tracked) -> int:
        """Return how many other requests a second of compute delays."""
        return sum(
            other is not tracked and (other.restore is None or not other.restore.waits)
            for other in self._requests.values()
        )

    def _defers(self, tracked: Tracked, planned: Restore, now: float) -> bool:
        """Whether another restore is bringing blocks that this one would load."""
        hashes = planned.plan.hashes
        if not self.limits.prefix_caching or not any(
            self._restores.bring(hashes[block], block) for block in planned.plan.load
        ):
            return False
        if tracked.deferred_at is None:
            tracked.deferred_at = now
            self.tally.add("requests_deferred")
        return now - tracked.deferred_at < DEFER_S_MAX

    def _give_pages(self, planned: Restore) -> bool:
        """Give the request pages for all that is restored; False if others count on them."""
        engine = self._holds.engine
        missing = planned.end // self.limits.page_tokens - len(engine.of(planned.request_id))
        spare = 0 if self._spare is None else self._spare()
        return missing <= max(spare, 0) and engine.extend(planned.request_id, planned.end)

    def _save(self, tracked: Tracked, done: int) -> None:
        """Order saves of a request's blocks that are full at ``done`` tokens and not stored."""
        if not self.limits.save or tracked.stale or self._trust.suspect or tracked.refused:
            return
        if not self._mirror.ready or done // self._mirror.spec.block_tokens <= tracked.saved:
            return
        keys = tracked.known_keys(self._mirror.spec)
        blocks = range(tracked.saved, min(done // keys.block_tokens, len(keys)))
        tracked.saved = self._saves.order_missing(
            keys,
            blocks,
            self._mirror.tiers(keys.hashes[blocks.start : blocks.stop]),
            self._holds.engine.of(tracked.request.request_id),
            self._pages_per_block,
        )
        self._events.note(tracked.request, keys.hashes, blocks)

    def _leave(self, tracked: Tracked, *, owes: bool = False) -> None:
        restore, tracked.restore, tracked.planned = tracked.restore, None, None
        if restore is not None:
            self.tally.add("restores_left")
            count_blocks(self.tally, restore)
            self._restores.end(restore, owes=owes)
