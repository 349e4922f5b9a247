from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.catalog import Catalog, CopyState
from kvtier.plan import Tier
from kvtier.policy import Lru
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import ENTRY

TIERS = (Tier.DEVICE, Tier.HOST, Tier.SSD)
SPACES = (b"n" * 32, b"o" * 32)
TENANTS = (b"1" * 32, b"2" * 32, b"3" * 32)
NUMBERS = range(5)
USES_KEPT, CHANGES_KEPT = 2, 6
MOVES = {
    (CopyState.ABSENT, "write"): CopyState.WRITING,
    (CopyState.ABSENT, "load"): CopyState.LOADING,
    (CopyState.WRITING, "commit"): CopyState.READY,
    (CopyState.LOADING, "commit"): CopyState.READY,
    (CopyState.WRITING, "abort"): CopyState.ABSENT,
    (CopyState.LOADING, "abort"): CopyState.ABSENT,
    (CopyState.EVICTING, "evicted"): CopyState.ABSENT,
    (CopyState.EVICTING, "keep"): CopyState.READY,
    (CopyState.READY, "drop"): CopyState.ABSENT,
}


def block(number: int) -> BlockId:
    """Return a made-up block; odd and even ones are of different namespaces."""
    return BlockId(SPACES[number % 2], bytes([number]) * 32)


def block_key(number: int) -> tuple[bytes, bytes]:
    """Return a made-up block's namespace and hash."""
    return block(number).namespace, block(number).hash


def tenant(number: int) -> bytes:
    """Return a made-up block's tenant."""
    return TENANTS[number % 3]


@dataclass
class Model:
    """What a catalog should know, as plain dicts."""

    state: dict[tuple[int, Tier], CopyState] = field(
        default_factory=lambda: dict.fromkeys(
            ((number, tier) for number in NUMBERS for tier in TIERS), CopyState.ABSENT
        )
    )
    pins: dict[tuple[int, Tier], int] = field(default_factory=dict)
    order: dict[Tier, list[int]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    place: dict[tuple[int, Tier], int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)

    def tiers(self, number: int) -> tuple[Tier, ...]:
        """Return where a block is READY."""
        return tuple(tier for tier in TIERS if self.state[number, tier] is CopyState.READY)

    def use(self, number: int, tier: Tier) -> None:
        """Make a copy the last to go."""
        self.leave(number, tier)
        self.order[tier].append(number)

    def leave(self, number: int, tier: Tier) -> None:
        """Take a copy out of the order."""
        if number in self.order[tier]:
            self.order[tier].remove(number)

    def known(self, number: int) -> bool:
        """Return whether a block has a row."""
        copies = [(number, tier) for tier in TIERS]
        return any(self.state[copy] or self.pins.get(copy) for copy in copies)

    def tidy(self) -> None:
        """Forget what only blocks with a row have."""
        for number in NUMBERS:
            if not self.known(number):
                self.last_use.pop(number, None)


class Pair:
    """A catalog, its model, and a mirror that follows the catalog's changes."""

    def __init__(self, found: list[tuple[int, int, int]]) -> None:
        self.catalog = Catalog(Lru, changes_kept=CHANGES_KEPT, uses_kept=USES_KEPT)
        self.model = Model()
        table = np.zeros(len(found), dtype=ENTRY)
        for entry, (number, last_use, position) in zip(table, found, strict=True):
            entry["namespace"] = np.void(block(number).namespace)
            entry["hash"], entry["tenant"] = np.void(block(number).hash), np.void(tenant(number))
            entry["slot"], entry["position"] = number, position
            entry["last_use_ns"] = last_use
        self.catalog.restore(table)
        for number, last_use, _ in sorted(found, key=lambda row: (row[1], -row[2])):
            self.model.state[number, Tier.SSD] = CopyState.READY
            self.model.place[number, Tier.SSD] = number
            self.model.last_use[number] = last_use
            self.model.use(number, Tier.SSD)
        self.sequence = 0
        self.mirror: dict[BlockId, tuple[Tier, ...]] = {}

    def move(self, what: str, number: int, tier: Tier, value: int) -> None:
        """Make one move on both sides."""
        name, copy = block(number), (number, tier)
        row = self.catalog.find(name)
        match what:
            case "touch":
                self.touch(number, value)
            case "uses":
                self.uses(value)
            case "evict":
                self.evict(tier, value)
            case "follow":
                self.follow()
            case "pin":
                took = row is not None and self.catalog.pin(row, tier)
                assert took == (self.model.state[copy] is CopyState.READY)
                self.model.pins[copy] = self.model.pins.get(copy, 0) + took
            case "unpin" if self.model.pins.get(copy):
                assert row is not None
                self.catalog.unpin(row, tier)
                self.model.pins[copy] -= 1
            case "unpin":
                pass
            case _:
                self.live(what, number, tier, value)
        self.model.tidy()

    def live(self, what: str, number: int, tier: Tier, value: int) -> None:
        """Make a move in a copy's life, or see it refused."""
        model, copy = self.model, (number, tier)
        after = MOVES.get((model.state[copy], what))
        if after is None:
            with pytest.raises(ValueError, match=r"cannot|no row"):
                self.call(what, number, tier, value)
            return
        self.call(what, number, tier, value)
        model.state[copy] = after
        if what in ("write", "load"):
            model.last_use[number] = max(model.last_use.get(number, 0), value)
        if what == "commit":
            model.place[copy] = value
        if after is CopyState.READY:
            model.use(number, tier)
        elif after is CopyState.ABSENT:
            model.leave(number, tier)
            if tier is Tier.SSD:
                model.hits.pop(number, None)

    def call(self, what: str, number: int, tier: Tier, value: int) -> None:
        """Make a move in a copy's life on the catalog."""
        catalog, name = self.catalog, block(number)
        row = catalog.find(name)
        if what in ("write", "load"):
            catalog.begin(name, tier, what, tenant_digest=tenant(number), now_ns=value)
        elif row is None:
            raise ValueError("no row")
        elif what == "commit":
            catalog.commit(row, tier, Location(0, value, 0))
        else:
            catalog.end(row, tier, what)

    def touch(self, number: int, now: int) -> None:
        """Use a block and the one two before it, which is of the same namespace."""
        model = self.model
        prompt = [n for n in (number - 2, number) if n >= 0]
        self.catalog.touch(block(number).namespace, [block(n).hash for n in prompt], now)
        for n in reversed([n for n in prompt if model.known(n)]):
            model.last_use[n] = max(model.last_use.get(n, 0), now)
            for tier in model.tiers(n):
                model.use(n, tier)
            room = n in model.hits or len(model.hits) < USES_KEPT
            if room and Tier.SSD in model.tiers(n):
                model.hits[n] = model.hits.get(n, 0) + 1

    def uses(self, limit: int) -> None:
        """Take uses out of both."""
        model = self.model
        expected = [(block(n), model.hits.pop(n), model.last_use[n]) for n in [*model.hits][:limit]]
        taken = self.catalog.uses(limit)
        assert [(use.id, use.hits, use.last_use_ns) for use in taken] == expected

    def evict(self, tier: Tier, count: int) -> None:
        """Evict the same copies from both."""
        model = self.model
        free = [n for n in model.order[tier] if not model.pins.get((n, tier))]
        rows = self.catalog.evict(tier, count)
        assert [self.catalog.id(row) for row in rows] == [block(n) for n in free[:count]]
        for number in free[:count]:
            model.state[number, tier] = CopyState.EVICTING
            model.leave(number, tier)

    def follow(self) -> None:
        """Bring the mirror up to date: by changes if they reach back, else by a snapshot."""
        changes = self.catalog.changes(self.sequence)
        if changes is None:
            self.sequence, blocks = self.catalog.snapshot()
            self.mirror = {}
        else:
            self.sequence, blocks = changes.sequence, iter(changes.blocks)
        self.mirror |= {BlockId(namespace, digest): tiers for namespace, digest, tiers in blocks}
        expected = {block(n): self.model.tiers(n) for n in NUMBERS if self.model.tiers(n)}
        assert {name: tiers for name, tiers in self.mirror.items() if tiers} == expected

    def compare(self) -> None:
        """See that both agree about everything that can be asked."""
        catalog, model = self.catalog, self.model
        for number in NUMBERS:
            row = catalog.find(block(number))
            assert (row is not None) == model.known(number)
            for tier in TIERS:
                state = CopyState.ABSENT if row is None else catalog.state(row, tier)
                assert state is model.state[number, tier]
                if row is not None and state is CopyState.READY:
                    assert catalog.location(row, tier).slot == model.place[number, tier]
            fastest = next(iter(model.tiers(number)), None)
            assert catalog.residency(block(number).namespace, [block(number).hash]) == (fastest,)
        for tier in TIERS:
            assert catalog.ready(tier) == sum(tier in model.tiers(n) for n in NUMBERS)
            pins = [held for (_, where), held in model.pins.items() if where is tier]
            assert catalog.pins(tier) == sum(pins)
        ready = {(*block_key(n), model.tiers(n)) for n in NUMBERS if model.tiers(n)}
        assert set(catalog.snapshot()[1]) == ready
        assert catalog.check() == []

    def select(self, namespace: bytes | None, owner: bytes | None, before: int | None) -> None:
        """See that both select the same blocks."""
        model = self.model
        expected = {
            block(n)
            for n in NUMBERS
            if any(model.state[n, tier] for tier in TIERS)
            and namespace in (None, block(n).namespace)
            and owner in (None, tenant(n))
            and (before is None or model.last_use.get(n, 0) < before)
        }
        selected = self.catalog.select(namespace, owner, before)
        assert {self.catalog.id(row) for row in selected} == expected


STEPS = st.tuples(
    st.sampled_from(
        [*{what for _, what in MOVES}, "evict", "pin", "unpin", "touch", "uses", "follow"]
    ),
    st.sampled_from(NUMBERS),
    st.sampled_from(TIERS),
    st.integers(0, 9),
)
FOUND = st.lists(
    st.tuples(st.sampled_from(NUMBERS), st.integers(0, 3), st.integers(0, 99)),
    unique_by=(lambda row: row[0], lambda row: row[2]),
)


@settings(max_examples=250, deadline=None)
@given(
    FOUND,
    st.lists(STEPS, max_size=60),
    st.sampled_from([None, *SPACES]),
    st.sampled_from([None, *TENANTS]),
    st.sampled_from([None, 0, 4, 9]),
)
def test_like_plain_dicts(
    found: list[tuple[int, int, int]],
    steps: list[tuple[str, int, Tier, int]],
    namespace: bytes | None,
    owner: bytes | None,
    before: int | None,
) -> None:
    """Over any course of moves a catalog knows, orders, counts and tells what plain dicts do."""
    pair = Pair(found)
    pair.compare()
    for step in steps:
        pair.move(*step)
        pair.compare()
        pair.select(namespace, owner, before)
    pair.follow()
