from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import bring_back, filled_slots, prompt_keys, put, settle, tiny_budget

import kvtier
from kvtier import Retention, Tier
from kvtier.catalog import Catalog
from kvtier.policies import POLICY
from kvtier.policy import Lru
from kvtier.retention import EXPIRED, PRIORITIES, Deadlines, Ranks
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import ENTRY

Open = Any
NS = b"n" * 32
SECOND = 10**9


class Wall:
    """A wall clock that a test sets, in seconds; counts how often it is asked."""

    def __init__(self, seconds: float = 1_000_000.0) -> None:
        self.seconds = seconds
        self.asked = 0

    def __call__(self) -> int:
        """Return the time in ns."""
        self.asked += 1
        return int(self.seconds * SECOND)


def digest(number: int) -> bytes:
    """Return a made-up block's hash."""
    return number.to_bytes(32, "big")


def store_block(
    catalog: Catalog, number: int, tier: Tier = Tier.SSD, *, priority: int = 0, ttl: float = 0
) -> int:
    """Give a block a READY copy."""
    expiry = int(catalog.now_ns() + ttl * SECOND) if ttl else 0
    (row,) = catalog.begin_all(
        NS, [digest(number)], tier, "write",
        positions=[number], priority=priority, expiry_ns=expiry,
    )  # fmt: skip
    catalog.commit(row, tier, Location(0, number, 8192))
    return row


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("priority", 8), ("priority", -9), ("priority", 1.0), ("priority", True),
        ("ttl_s", 0), ("ttl_s", -1.0), ("ttl_s", float("nan")), ("ttl_s", float("inf")),
        ("ttl_s", "1h"), ("ttl_s", 1e12),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(field: str, wrong: Any) -> None:
    """A retention out of bounds is refused, and the message names the field and the value."""
    with pytest.raises(ValueError, match=field) as refused:
        Retention(**{field: wrong})
    assert repr(wrong) in str(refused.value)


def test_an_expiry_is_a_time() -> None:
    """A ttl counts from now; without one nothing expires."""
    assert Retention(ttl_s=2.5).expiry_ns(10 * SECOND) == 12_500_000_000
    assert Retention().expiry_ns(10 * SECOND) == 0


# -- deadlines


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "set", "pass"]), st.integers(0, 5), st.integers(0, 30)),
        max_size=80,
    )
)
def test_deadlines_against_a_dict(calls: list[tuple[str, int, int]]) -> None:
    """Whatever is set and passes, each row is due once, at its last expiry; bounded."""
    deadlines, model, now = Deadlines(), dict.fromkeys(range(6), 0), 0
    deadlines.column.extend([0] * 6)
    for what, row, value in calls:
        if what == "set":
            when = now + value + 1 if value else 0
            deadlines.set(row, when)
            model[row] = when
        else:
            now += value
            due = [each for each, when in model.items() if 0 < when <= now]
            assert sorted(deadlines.due(lambda: now)) == due  # noqa: B023 - asked at once
            model |= dict.fromkeys(due, 0)
        assert deadlines.column.tolist() == list(model.values())
        assert len(deadlines._heap) <= 2 * sum(map(bool, model.values())) + 64


def test_stale_deadlines_do_not_pile_up() -> None:
    """A thousand new expiries of one row take no more room than a few."""
    deadlines = Deadlines()
    deadlines.column.append(0)
    for when in range(1, 1000):
        deadlines.set(0, when)
    assert len(deadlines._heap) <= 66
    assert deadlines.due(lambda: 998) == []
    assert deadlines.due(lambda: 999) == [0]


def test_no_clock_is_asked_without_deadlines() -> None:
    """A store without expiries pays nothing for them."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    store_block(catalog, 1)
    catalog.residency(NS, [digest(1)])
    catalog.evict(Tier.SSD, 1)
    assert wall.asked == 0


# -- priorities


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(PRIORITIES)), max_size=30),
    st.sampled_from(sorted(POLICY)),
)
def test_lower_priorities_go_first(rows: list[tuple[int, int]], name: str) -> None:
    """Between priorities the lower goes first; within one the policy's own order holds."""
    column = array("b", [0] * 10)
    ranks, alone = Ranks(POLICY[name], column), {p: POLICY[name]() for p in PRIORITIES}
    for row, priority in rows:
        ranks.forget([row])
        alone[column[row]].forget([row])
        column[row] = priority
        ranks.touch([row])
        alone[priority].touch([row])
    assert list(ranks.victims()) == [row for p in PRIORITIES for row in alone[p].victims()]


def test_rows_enter_at_their_priority() -> None:
    """Rows that enter in bulk go by their priorities."""
    column = array("b", [2, 0, -1, 2])
    ranks = Ranks(Lru, column)
    ranks.enter(np.arange(4))
    assert list(ranks.victims()) == [2, 1, 0, 3]


@pytest.mark.parametrize("name", POLICY)
def test_priority_holds_whatever_the_policy_says(name: str) -> None:
    """A block of a lower priority goes before one of a higher, however often it was used."""
    catalog = Catalog(POLICY[name])
    kept, used = store_block(catalog, 1, priority=1), store_block(catalog, 2)
    for now in range(50):
        catalog.touch(NS, [digest(2)], now)
    assert catalog.evict(Tier.SSD, 2) == [used, kept]


def test_a_later_put_raises_a_priority_and_never_lowers_it() -> None:
    """What is stored keeps the highest priority that was asked for."""
    catalog = Catalog(Lru)
    rows = [store_block(catalog, n) for n in range(3)]
    catalog.retain(rows[0], 5, 0)
    catalog.retain(rows[0], 1, 0)
    assert catalog.evict(Tier.SSD, 3) == [rows[1], rows[2], rows[0]]


def test_a_head_has_the_priority_of_its_tail_where_prefixes_count() -> None:
    """Under prefix-closed a tail of high priority keeps its head, under priced it does not."""
    for name, first in (("prefix-closed", 2), ("priced", 0)):
        catalog = Catalog(POLICY[name])
        hashes = [digest(n) for n in range(3)]
        head = catalog.begin_all(NS, hashes[:1], Tier.SSD, "write", positions=[0])
        tail = catalog.begin_all(NS, hashes[1:2], Tier.SSD, "write", positions=[1], priority=3)
        catalog.announce(NS, hashes, [*head, *tail], [Tier.SSD])
        other = catalog.begin_all(NS, hashes[2:], Tier.SSD, "write", positions=[0])
        catalog.commit_all([*head, *tail, *other], Tier.SSD, [Location(0, 0, 8192)] * 3)
        for now in range(9):
            catalog.touch(NS, hashes[2:], now)
        assert catalog.evict(Tier.SSD, 1) == [[*head, *tail, *other][first]]


# -- expiry


@pytest.mark.parametrize("name", POLICY)
def test_an_expired_block_is_a_miss_and_the_first_to_go(name: str) -> None:
    """From its expiry on a block is neither found, pinned, nor told of, and it is evicted first."""
    wall = Wall()
    catalog = Catalog(POLICY[name], now_ns=wall)
    stays, goes = store_block(catalog, 1, priority=-8), store_block(catalog, 2, priority=7, ttl=10)
    sequence = catalog.changes(0).sequence  # type: ignore[union-attr]
    wall.seconds += 9.999
    assert catalog.residency(NS, [digest(2)]) == (Tier.SSD,)
    wall.seconds += 0.001
    assert catalog.residency(NS, [digest(1), digest(2)]) == (Tier.SSD, None)
    assert catalog.changes(sequence).blocks == ((NS, digest(2), ()),)  # type: ignore[union-attr]
    assert list(catalog.snapshot()[1]) == [(NS, digest(1), (Tier.SSD,))]
    with catalog.pinned(NS, [digest(2)], [Tier.SSD]) as kept:
        assert kept == [None]
    assert catalog.check() == []
    assert catalog.evict(Tier.SSD, 1) == [goes]
    catalog.end(goes, Tier.SSD, "evicted")
    assert catalog.evict(Tier.SSD, 1) == [stays]
    assert catalog.check() == []


def test_changes_alone_notice_an_expiry() -> None:
    """A follower that asks only for changes is told, too."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    store_block(catalog, 2, ttl=1)
    sequence = catalog.changes(0).sequence  # type: ignore[union-attr]
    wall.seconds += 1
    assert catalog.changes(sequence).blocks == ((NS, digest(2), ()),)  # type: ignore[union-attr]


def test_a_pinned_block_that_expires_stays_until_it_is_let_go() -> None:
    """A restore that has begun ends; the block goes first afterwards."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    held, other = store_block(catalog, 1, ttl=5), store_block(catalog, 2)
    with catalog.pinned(NS, [digest(1)], [Tier.SSD]) as kept:
        assert kept == [Tier.SSD]
        wall.seconds += 5
        assert catalog.residency(NS, [digest(1)]) == (None,)
        assert catalog.location(held, Tier.SSD).slot == 1
        assert catalog.evict(Tier.SSD, 1) == [other]
    assert catalog.evict(Tier.SSD, 1) == [held]


def test_a_copy_that_is_late_is_never_shown() -> None:
    """A block that expires before its write ends is not shown when it does."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    (row,) = catalog.begin_all(
        NS, [digest(1)], Tier.SSD, "write", positions=[0], expiry_ns=wall() + SECOND
    )
    wall.seconds += 1
    assert catalog.residency(NS, [digest(1)]) == (None,)
    catalog.commit(row, Tier.SSD, Location(0, 1, 8192))
    assert catalog.residency(NS, [digest(1)]) == (None,)
    assert catalog.check() == []
    catalog.retain(row, 0, 0)
    assert catalog.residency(NS, [digest(1)]) == (Tier.SSD,)


def test_a_later_expiry_counts_and_an_earlier_one_does_not() -> None:
    """An expiry is only put off; never is the latest."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    row = store_block(catalog, 1, ttl=10)
    catalog.retain(row, 0, wall() + 20 * SECOND)
    catalog.retain(row, 0, wall() + 5 * SECOND)
    wall.seconds += 19
    assert catalog.residency(NS, [digest(1)]) == (Tier.SSD,)
    catalog.retain(row, 0, 0)
    catalog.retain(row, 0, wall() + SECOND)
    wall.seconds += 1000
    assert catalog.residency(NS, [digest(1)]) == (Tier.SSD,)


def test_a_row_given_to_another_block_has_no_expiry() -> None:
    """Priority and expiry end with the block."""
    wall = Wall()
    catalog = Catalog(Lru, now_ns=wall)
    first = store_block(catalog, 1, priority=3, ttl=1)
    catalog.end(first, Tier.SSD, "drop")
    again = store_block(catalog, 2)
    assert again == first
    last = store_block(catalog, 3, priority=1)
    wall.seconds += 2
    assert catalog.residency(NS, [digest(2)]) == (Tier.SSD,)
    assert catalog.evict(Tier.SSD, 2) == [again, last]


def test_found_blocks_keep_priority_expiry_and_uses() -> None:
    """What the index says of a block's retention and hits holds after a restart."""
    wall = Wall()
    made = np.zeros(4, dtype=ENTRY)
    for number, entry in enumerate(made):
        entry["namespace"], entry["hash"] = np.void(NS), np.void(digest(number))
        entry["slot_bytes"] = 8192
    made["priority"] = [0, 2**31 - 1, -(2**31), 0]
    made["expiry_ns"] = [0, 0, 0, wall() + SECOND]
    made["hits"] = [0, 4, 2**32 - 1, 7]
    catalog = Catalog(POLICY["priced"], now_ns=wall)
    catalog.restore(made)
    assert [catalog.asked(row) for row in range(4)] == [1, 5, 255, 8]
    wall.seconds += 1
    assert catalog.residency(NS, [digest(3)]) == (None,)
    assert catalog.evict(Tier.SSD, 4) == [3, 2, 0, 1]
    assert min(PRIORITIES) > EXPIRED


# -- through the store


@pytest.mark.parametrize("host_bytes", [0, "1MiB"])
def test_a_put_with_a_ttl_is_gone_in_time_and_after_a_restart(
    open_store: Open, host_bytes: Any
) -> None:
    """A block expires whether the store was closed meanwhile or not, and a put brings it back."""
    wall, keys, other = Wall(), prompt_keys(4), prompt_keys(4, seed=1)
    store = open_store(host_bytes=host_bytes, now_ns=wall)
    store.put(keys, filled_slots(keys), retention=Retention(ttl_s=60)).result(30)
    store.put(other, filled_slots(other)).result(30)
    store.close()
    store = open_store(host_bytes=host_bytes, now_ns=wall)
    wall.seconds += 59
    assert None not in store.lookup(keys).tiers
    wall.seconds += 1
    assert store.lookup(keys).tiers == (None,) * 4
    assert None not in store.lookup(other).tiers
    assert bring_back(store, keys).loaded == 0
    result = store.put(keys, filled_slots(keys)).result(30)
    assert result.dropped == 0
    assert bring_back(store, keys).loaded == 4


def test_a_put_range_has_its_own_retention(open_store: Open) -> None:
    """``blocks`` and ``retention`` go together: the rest of the prompt has another one."""
    wall, keys = Wall(), prompt_keys(6)
    store = open_store(now_ns=wall)
    put_all = filled_slots(keys)
    store.put(keys, put_all, blocks=range(2), retention=Retention(priority=3)).result(30)
    store.put(keys, put_all, blocks=range(2, 6), retention=Retention(ttl_s=5)).result(30)
    wall.seconds += 5
    assert [tier is None for tier in store.lookup(keys).tiers] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("policy", POLICY)
def test_a_full_store_keeps_what_has_priority(open_store: Open, policy: str) -> None:
    """However much is put after it, a prompt of higher priority stays."""
    store = open_store(host_bytes=0, policy=policy, **tiny_budget(24))
    keys = prompt_keys(6)
    store.put(keys, filled_slots(keys), retention=Retention(priority=1)).result(30)
    for seed in range(1, 12):
        put(store, prompt_keys(6, seed))
    settle(store)
    assert None not in store.lookup(keys).tiers


def test_keys_put_again_raise_what_is_stored(open_store: Open) -> None:
    """A put of present blocks with a higher priority copies nothing, and they stay."""
    store = open_store(host_bytes=0, **tiny_budget(24))
    keys = prompt_keys(6)
    put(store, keys)
    result = store.put(keys, filled_slots(keys), retention=Retention(priority=1)).result(30)
    assert result == kvtier.PutResult(0, 6, 0)
    for seed in range(1, 12):
        put(store, prompt_keys(6, seed))
    settle(store)
    assert None not in store.lookup(keys).tiers


def test_a_record_says_how_long_it_is_wanted(open_store: Open) -> None:
    """Priority and expiry are written into the index with the block."""
    wall, keys = Wall(), prompt_keys(1)
    store = open_store(now_ns=wall)
    store.put(keys, filled_slots(keys), retention=Retention(-2, 9.0)).result(30)
    store.close()
    store = open_store(now_ns=wall)
    row = store._catalog.find(BlockId(keys.namespace, keys.hashes[0]))
    orders = store._catalog._orders
    assert (orders._priority[row], orders._deadlines.column[row]) == (-2, wall() + 9 * SECOND)
