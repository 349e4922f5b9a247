from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.catalog import Catalog, CopyState
from kvtier.plan import Tier
from kvtier.policies import POLICY
from kvtier.policy import Lru
from kvtier.prices import Prices
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import ENTRY
from kvtier.tiers.index import Use

if TYPE_CHECKING:
    from kvtier.tiers.entries import Entries

NS = b"n" * 32
OTHER = b"o" * 32
T1, T2 = b"1" * 32, b"2" * 32
TIERS = (Tier.HOST, Tier.SSD)

# How to bring a copy into each state, as the moves of its life so far.
PATHS: dict[CopyState, tuple[str, ...]] = {
    CopyState.ABSENT: (),
    CopyState.WRITING: ("write",),
    CopyState.LOADING: ("load",),
    CopyState.READY: ("write", "commit"),
    CopyState.EVICTING: ("write", "commit", "evict"),
}
LEGAL = {
    CopyState.ABSENT: {"write", "load"},
    CopyState.WRITING: {"commit", "abort"},
    CopyState.LOADING: {"commit", "abort"},
    CopyState.READY: {"evict", "drop"},
    CopyState.EVICTING: {"evicted", "keep"},
}
AFTER = {
    "write": CopyState.WRITING,
    "load": CopyState.LOADING,
    "commit": CopyState.READY,
    "abort": CopyState.ABSENT,
    "evict": CopyState.EVICTING,
    "evicted": CopyState.ABSENT,
    "keep": CopyState.READY,
    "drop": CopyState.ABSENT,
}


def block(number: int, namespace: bytes = NS) -> BlockId:
    """Return a made-up block."""
    return BlockId(namespace, number.to_bytes(32, "little"))


def where(number: int) -> Location:
    """Return a made-up place."""
    return Location(7, number, 8192)


def entries(*rows: tuple[BlockId, Location, int, int, bytes]) -> Entries:
    """Return an index table of (block, where, last use, position, tenant)."""
    made = np.zeros(len(rows), dtype=ENTRY)
    for entry, (name, place, last_use_ns, position, tenant) in zip(made, rows, strict=True):
        entry["namespace"], entry["hash"] = np.void(name.namespace), np.void(name.hash)
        entry["segment"], entry["slot"] = place.segment, place.slot
        entry["slot_bytes"] = place.slot_bytes
        entry["last_use_ns"], entry["position"] = last_use_ns, position
        entry["tenant"] = np.void(tenant)
    return made


def found(*numbers: int, namespace: bytes = NS) -> Entries:
    """Return an index table of made-up blocks, the first one used longest ago."""
    rows = ((block(n, namespace), where(n), use, 0, T1) for use, n in enumerate(numbers))
    return entries(*rows)


def move(catalog: Catalog, name: BlockId, tier: Tier, what: str) -> None:
    """Make one move in a copy's life."""
    if what in ("write", "load"):
        catalog.begin(name, tier, what)
        return
    row = catalog.find(name)
    if row is None:
        raise ValueError("no row")
    match what:
        case "commit":
            catalog.commit(row, tier, where(1))
        case "evict":
            if catalog.evict(tier, 1) != [row]:
                raise ValueError("not evictable")
        case _:
            catalog.end(row, tier, what)


def ready(catalog: Catalog, number: int, tier: Tier = Tier.SSD, namespace: bytes = NS) -> int:
    """Give a block a READY copy and return its row."""
    row = catalog.begin(block(number, namespace), tier, "write")
    catalog.commit(row, tier, where(number))
    return row


def view(catalog: Catalog, name: BlockId) -> Any:
    """Return all that can be seen of a block."""
    row = catalog.find(name)
    return (
        None if row is None else [catalog.state(row, tier) for tier in TIERS],
        catalog.residency(name.namespace, [name.hash]),
        [catalog.ready(tier) for tier in TIERS],
        catalog.pins(),
        catalog.check(),
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("state", PATHS)
def test_the_lifecycle_is_a_table(state: CopyState, what: str, tier: Tier) -> None:
    """A legal move ends where the table says; an illegal one raises and changes nothing."""
    catalog = Catalog(Lru)
    name = block(1)
    for step in PATHS[state]:
        move(catalog, name, tier, step)
    before = view(catalog, name)
    if what in LEGAL[state]:
        move(catalog, name, tier, what)
        row = catalog.find(name)
        after = CopyState.ABSENT if row is None else catalog.state(row, tier)
        assert after == AFTER[what]
        assert (row is None) == (after == CopyState.ABSENT)
    else:
        with pytest.raises(ValueError, match=r".*"):
            move(catalog, name, tier, what)
        assert view(catalog, name) == before
    assert catalog.check() == []


def test_an_illegal_beginning_leaves_no_row() -> None:
    """An unknown move on an unknown block does not leave an empty row behind."""
    catalog = Catalog(Lru)
    with pytest.raises(ValueError, match="cannot"):
        catalog.begin(block(1), Tier.SSD, "commit")
    assert catalog.find(block(1)) is None
    assert catalog.check() == []


@pytest.mark.parametrize("state", PATHS)
def test_only_ready_copies_are_shown(state: CopyState) -> None:
    """A copy that is on its way in or out is not residency."""
    catalog = Catalog(Lru)
    for step in PATHS[state]:
        move(catalog, block(1), Tier.SSD, step)
    shown = Tier.SSD if state is CopyState.READY else None
    assert catalog.residency(NS, [block(1).hash]) == (shown,)


def test_the_fastest_tier_is_shown() -> None:
    """Of two READY copies the one in host memory is shown, and then the other."""
    catalog = Catalog(Lru)
    ready(catalog, 1)
    row = ready(catalog, 1, Tier.HOST)
    assert catalog.residency(NS, [block(1).hash, block(2).hash]) == (Tier.HOST, None)
    catalog.end(row, Tier.HOST, "drop")
    assert catalog.residency(NS, [block(1).hash]) == (Tier.SSD,)


def test_namespaces_are_apart() -> None:
    """The same hash under another namespace is another block."""
    catalog = Catalog(Lru)
    ready(catalog, 1)
    assert catalog.residency(OTHER, [block(1).hash]) == (None,)
    ready(catalog, 1, namespace=OTHER)
    catalog.end(catalog.find(block(1)), Tier.SSD, "drop")
    assert catalog.residency(NS, [block(1).hash]) == (None,)
    assert catalog.residency(OTHER, [block(1).hash]) == (Tier.SSD,)


def test_a_pinned_copy_is_not_evicted() -> None:
    """Pins count: a copy is evictable once the last one is gone."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    assert catalog.pin(row, Tier.SSD)
    assert catalog.pin(row, Tier.SSD)
    assert catalog.evict(Tier.SSD, 5) == []
    catalog.unpin(row, Tier.SSD)
    assert catalog.evict(Tier.SSD, 5) == []
    catalog.unpin(row, Tier.SSD)
    assert catalog.evict(Tier.SSD, 5) == [row]


def test_pinned_copies_stand_in_nobodys_way() -> None:
    """Eviction passes over pinned copies and takes as many others as it was asked for."""
    catalog = Catalog(Lru)
    rows = [ready(catalog, number) for number in range(5)]
    for row in (rows[0], rows[2]):
        catalog.pin(row, Tier.SSD)
    assert catalog.evict(Tier.SSD, 2) == [rows[1], rows[3]]
    assert catalog.evict(Tier.SSD, 0) == []


def test_a_pin_protects_one_tier() -> None:
    """A pin in host memory says nothing about the SSD."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    ready(catalog, 1, Tier.HOST)
    catalog.pin(row, Tier.HOST)
    assert catalog.evict(Tier.HOST, 1) == []
    assert catalog.evict(Tier.SSD, 1) == [row]


@pytest.mark.parametrize(
    "state", [s for s in PATHS if s not in (CopyState.READY, CopyState.ABSENT)]
)
def test_only_ready_copies_are_pinned(state: CopyState) -> None:
    """A copy that is not READY cannot be pinned."""
    catalog = Catalog(Lru)
    for step in PATHS[state]:
        move(catalog, block(1), Tier.SSD, step)
    assert not catalog.pin(catalog.find(block(1)), Tier.SSD)
    assert catalog.pins() == 0


def test_unpinning_too_often_raises() -> None:
    """A pin that is not held cannot be given back."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    with pytest.raises(ValueError, match="not pinned"):
        catalog.unpin(row, Tier.SSD)
    assert catalog.pins() == 0


def test_pins_are_counted_by_tier() -> None:
    """The pins of one tier and those of both can be asked for."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    ready(catalog, 1, Tier.HOST)
    catalog.pin(row, Tier.HOST)
    catalog.pin(row, Tier.HOST)
    catalog.pin(row, Tier.SSD)
    assert (catalog.pins(Tier.HOST), catalog.pins(Tier.SSD), catalog.pins()) == (2, 1, 3)


def test_a_row_outlives_its_copy_while_pinned() -> None:
    """A damaged copy that is dropped while pinned frees its row with the last pin, not before."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog.pin(row, Tier.SSD)
    catalog.end(row, Tier.SSD, "drop")
    assert catalog.find(block(1)) == row
    assert ready(catalog, 2) != row
    catalog.unpin(row, Tier.SSD)
    assert catalog.find(block(1)) is None
    assert catalog.check() == []


def test_a_scope_pins_what_is_ready() -> None:
    """The scope pins each block in its tier, says where it could, and undoes exactly that."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    ready(catalog, 3, Tier.HOST)
    hashes = [block(n).hash for n in (1, 2, 3, 4)]
    catalog.begin(block(4), Tier.SSD, "write")
    with catalog.pinned(NS, hashes, [Tier.SSD, Tier.SSD, Tier.HOST, Tier.SSD]) as kept:
        assert kept == [Tier.SSD, None, Tier.HOST, None]
        assert catalog.pins() == 2
        assert catalog.evict(Tier.SSD, 9) == []
    assert catalog.pins() == 0
    assert catalog.evict(Tier.SSD, 9) == [row]


def test_a_scope_pins_in_the_tier_asked_for() -> None:
    """Of two READY copies the one asked for is pinned; if it is gone, the other one."""
    catalog = Catalog(Lru)
    for number, tier in ((1, Tier.HOST), (1, Tier.SSD), (2, Tier.SSD), (3, Tier.HOST)):
        ready(catalog, number, tier)
    hashes = [block(n).hash for n in (1, 2, 3)]
    for wanted, in_host, on_ssd in ((Tier.SSD, 1, 2), (Tier.HOST, 2, 1), (None, 0, 0)):
        with catalog.pinned(NS, hashes, [wanted] * 3) as kept:
            others = [Tier.SSD, Tier.HOST] if wanted else [None, None]
            assert kept == [wanted, *others]
            assert (catalog.pins(Tier.HOST), catalog.pins(Tier.SSD)) == (in_host, on_ssd)


def test_a_scope_that_raises_gives_its_pins_back() -> None:
    """An exception inside the scope leaves no pin."""
    catalog = Catalog(Lru)
    ready(catalog, 1)

    def inside() -> None:
        with catalog.pinned(NS, [block(1).hash], [Tier.SSD]):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        inside()
    assert catalog.pins() == 0


def test_least_recently_used_goes_first() -> None:
    """Eviction follows use; a touched prompt keeps its head longest."""
    catalog = Catalog(Lru)
    rows = [ready(catalog, n) for n in range(6)]
    catalog.touch(NS, [block(n).hash for n in (0, 1, 2)], 1)
    order = [catalog.evict(Tier.SSD, 1)[0] for _ in range(6)]
    assert order == [rows[n] for n in (3, 4, 5, 2, 1, 0)]


def test_an_eviction_that_failed_is_undone() -> None:
    """A kept copy is READY again, and the next to be used up last."""
    catalog = Catalog(Lru)
    rows = [ready(catalog, n) for n in range(2)]
    assert catalog.evict(Tier.SSD, 1) == [rows[0]]
    assert catalog.residency(NS, [block(0).hash]) == (None,)
    catalog.end(rows[0], Tier.SSD, "keep")
    assert catalog.residency(NS, [block(0).hash]) == (Tier.SSD,)
    assert catalog.evict(Tier.SSD, 2) == [rows[1], rows[0]]


def test_chosen_rows_are_taken_out() -> None:
    """Of the rows named, those that are READY and unpinned leave; the others stay as they are."""
    catalog = Catalog(Lru)
    free, pinned, last = (ready(catalog, n) for n in (1, 2, 3))
    catalog.pin(pinned, Tier.SSD)
    writing = catalog.begin(block(4), Tier.SSD, "write")
    assert catalog.take_out([last, writing, pinned, free], Tier.SSD) == [last, free]
    assert catalog.take_out([last, free], Tier.SSD) == []
    assert catalog.state(writing, Tier.SSD) is CopyState.WRITING
    assert catalog.residency(NS, [block(n).hash for n in (1, 2, 3)]) == (None, Tier.SSD, None)
    for row, what in ((last, "evicted"), (free, "keep")):
        catalog.end(row, Tier.SSD, what)
    catalog.unpin(pinned, Tier.SSD)
    assert catalog.evict(Tier.SSD, 9) == [pinned, free]
    assert catalog.check() == []


def test_looking_extends_nobodys_life() -> None:
    """Residency does not change the order of eviction."""
    catalog = Catalog(Lru)
    rows = [ready(catalog, n) for n in range(3)]
    catalog.residency(NS, [block(0).hash])
    assert catalog.evict(Tier.SSD, 1) == [rows[0]]


def test_growth() -> None:
    """Thousands of blocks keep their places, and freed rows are used again."""
    catalog = Catalog(Lru)
    for number in range(3000):
        ready(catalog, number)
    for number in range(0, 3000, 7):
        row = catalog.find(block(number))
        assert catalog.location(row, Tier.SSD) == where(number)
        assert catalog.id(row) == block(number)
    gone = catalog.evict(Tier.SSD, 1000)
    for row in gone:
        catalog.end(row, Tier.SSD, "evicted")
    assert catalog.ready(Tier.SSD) == 2000
    again = {ready(catalog, 10_000 + number) for number in range(1000)}
    assert again == set(gone)
    assert catalog.check() == []


def test_a_freed_row_holds_no_block() -> None:
    """Asking for the block of a row that was freed is an error."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog.end(row, Tier.SSD, "drop")
    with pytest.raises(ValueError, match="no block"):
        catalog.id(row)


def test_large_locations_fit() -> None:
    """Segment ids use all 64 bits."""
    catalog = Catalog(Lru)
    row = catalog.begin(block(1), Tier.SSD, "write")
    place = Location(2**64 - 1, 2**32 - 1, 2**40)
    catalog.commit(row, Tier.SSD, place)
    assert catalog.location(row, Tier.SSD) == place


def test_a_place_in_host_is_a_slot() -> None:
    """Of a host copy's place only the slot is kept; the place on the SSD is another matter."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog.begin(block(1), Tier.HOST, "load")
    catalog.commit(row, Tier.HOST, Location(0, 2**32 - 1, 0))
    assert catalog.location(row, Tier.HOST) == Location(0, 2**32 - 1, 0)
    assert catalog.location(row, Tier.SSD) == where(1)


def test_the_order_of_tiers_is_the_callers() -> None:
    """Of two READY copies the tier that the caller names first is shown; of one, that one."""
    catalog = Catalog(Lru)
    for number, tier in ((1, Tier.SSD), (1, Tier.HOST), (2, Tier.HOST), (3, Tier.SSD)):
        ready(catalog, number, tier)
    hashes = [block(n).hash for n in range(4)]
    shown = catalog.residency(NS, hashes, (Tier.SSD, Tier.HOST))
    assert shown == (None, Tier.SSD, Tier.HOST, Tier.SSD)


def test_found_blocks_are_ready() -> None:
    """What was found at open is READY where the index says, and nothing else is."""
    catalog = Catalog(Lru)
    catalog.restore(np.concatenate([found(4, 2, 9), found(4, namespace=OTHER)]))
    assert (catalog.ready(Tier.SSD), catalog.ready(Tier.HOST), catalog.pins()) == (4, 0, 0)
    for number, namespace in ((4, NS), (2, NS), (9, NS), (4, OTHER)):
        row = catalog.find(block(number, namespace))
        assert catalog.id(row) == block(number, namespace)
        assert catalog.location(row, Tier.SSD) == where(number)
        assert catalog.state(row, Tier.SSD) is CopyState.READY
        assert catalog.state(row, Tier.HOST) is CopyState.ABSENT
    assert catalog.find(block(2, OTHER)) is None
    assert set(catalog.blocks(NS, Tier.SSD, 10)) == {block(n).hash for n in (4, 2, 9)}
    assert len(catalog.blocks(NS, Tier.SSD, 1)) == 1
    assert catalog.blocks(NS, Tier.HOST, 10) == []
    assert catalog.check() == []


def test_found_blocks_are_in_order_of_use() -> None:
    """The least recently used goes first, and of one prompt its tail, in whatever order found."""
    catalog = Catalog(Lru)
    uses = [(1, 50, 0), (2, 7, 0), (3, 7, 2), (4, 7, 1), (5, 2**64 - 1, 0), (6, 0, 2**64 - 1)]
    catalog.restore(entries(*((block(n), where(n), use, at, T1) for n, use, at in uses)))
    order = [catalog.id(row) for row in catalog.evict(Tier.SSD, 10)]
    assert order == [block(n) for n in (6, 3, 4, 2, 1, 5)]


def test_a_restored_catalog_goes_on() -> None:
    """New blocks get rows of their own, and found ones live on like any other."""
    catalog = Catalog(Lru)
    catalog.restore(found(1, 2))
    row = ready(catalog, 3)
    ready(catalog, 1, Tier.HOST)
    assert catalog.residency(NS, [block(n).hash for n in (1, 2, 3)]) == (*TIERS, Tier.SSD)
    assert catalog.evict(Tier.SSD, 9) == [catalog.find(block(1)), catalog.find(block(2)), row]
    for number in (1, 2, 3):
        catalog.end(catalog.find(block(number)), Tier.SSD, "evicted")
    assert catalog.residency(NS, [block(n).hash for n in (1, 2, 3)]) == (Tier.HOST, None, None)
    assert catalog.check() == []


def test_an_empty_index_restores_nothing() -> None:
    """A table without rows is a catalog without blocks."""
    catalog = Catalog(Lru)
    catalog.restore(found())
    assert catalog.ready(Tier.SSD) == 0
    ready(catalog, 1)
    assert catalog.check() == []


def test_a_block_found_twice_is_refused() -> None:
    """A table that names a block twice is an error and enters nothing."""
    catalog = Catalog(Lru)
    with pytest.raises(ValueError, match="1 of 3"):
        catalog.restore(found(4, 2, 4))
    assert catalog.find(block(2)) is None
    assert catalog.check() == []
    catalog.restore(found(4, 2))
    assert catalog.ready(Tier.SSD) == 2


def test_only_a_new_catalog_is_restored() -> None:
    """A catalog that holds blocks refuses a table and stays as it is."""
    catalog = Catalog(Lru)
    ready(catalog, 1)
    with pytest.raises(ValueError, match="new one"):
        catalog.restore(found(2))
    assert catalog.ready(Tier.SSD) == 1
    assert catalog.check() == []


def test_uses_are_counted_until_they_are_taken() -> None:
    """Each block on the SSD that was used is handed out once, with its hits and its last use."""
    catalog = Catalog(Lru)
    catalog.restore(found(1, 2))
    ready(catalog, 3, Tier.HOST)
    hashes = [block(n).hash for n in (1, 2, 3, 4)]
    catalog.touch(NS, hashes, 100)
    catalog.touch(NS, hashes[:1], 200)
    assert catalog.uses(1) == [Use(block(2), 1, 100)]
    assert catalog.uses(9) == [Use(block(1), 2, 200)]
    assert catalog.uses(9) == []
    catalog.touch(NS, hashes[:1], 300)
    assert catalog.uses(9) == [Use(block(1), 1, 300)]


def test_a_clock_that_goes_back_changes_no_last_use() -> None:
    """The last use is the latest one ever seen, also across a restart."""
    catalog = Catalog(Lru)
    catalog.restore(entries((block(1), where(1), 500, 0, T1)))
    catalog.touch(NS, [block(1).hash], 400)
    assert catalog.uses(1) == [Use(block(1), 1, 500)]
    catalog.touch(NS, [block(1).hash], 600)
    catalog.touch(NS, [block(1).hash], 10)
    assert catalog.uses(1) == [Use(block(1), 2, 600)]
    catalog.begin(block(1), Tier.HOST, "load", now_ns=20)
    assert catalog.select(None, None, 600) == []


def test_uses_of_a_copy_that_is_gone_are_forgotten() -> None:
    """A block that left the SSD has no uses to write, and a new copy starts without."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog.touch(NS, [block(1).hash], 100)
    catalog.end(row, Tier.SSD, "drop")
    assert catalog.uses(9) == []
    ready(catalog, 1)
    assert catalog.uses(9) == []


def test_uses_are_bounded() -> None:
    """Beyond the bound uses of further blocks are not recorded; of known ones they still are."""
    catalog = Catalog(Lru, uses_kept=2)
    catalog.restore(found(1, 2, 3))
    for number in (1, 2, 3, 1):
        catalog.touch(NS, [block(number).hash], number)
    assert catalog.uses(9) == [Use(block(1), 2, 1), Use(block(2), 1, 2)]
    catalog.touch(NS, [block(3).hash], 5)
    assert catalog.uses(9) == [Use(block(3), 1, 5)]


def test_rows_are_selected_by_namespace_tenant_and_age() -> None:
    """A row is selected if it has a copy in any state and every filter given matches."""
    catalog = Catalog(Lru)
    catalog.restore(
        entries(
            (block(1), where(1), 10, 0, T1),
            (block(2), where(2), 20, 0, T2),
            (block(3, OTHER), where(3), 30, 0, T1),
        )
    )
    fresh = catalog.begin(block(4), Tier.HOST, "write", tenant_digest=T2, position=7, now_ns=40)
    assert catalog._rows.positions[fresh] == 7
    one, two, three = (catalog.find(block(n, ns)) for n, ns in ((1, NS), (2, NS), (3, OTHER)))
    for (namespace, tenant, before), expected in {
        (None, None, None): [one, two, three, fresh],
        (NS, None, None): [one, two, fresh],
        (None, T1, None): [one, three],
        (NS, T2, None): [two, fresh],
        (None, None, 30): [one, two],
        (NS, T2, 21): [two],
        (OTHER, T2, None): [],
        (b"x" * 32, None, None): [],
        (None, b"x" * 32, None): [],
    }.items():
        assert catalog.select(namespace, tenant, before) == expected
    catalog.touch(NS, [block(1).hash], 35)
    assert catalog.select(None, None, 30) == [two]
    catalog.end(two, Tier.SSD, "drop")
    assert catalog.select(None, None, None) == [one, three, fresh]


def test_a_block_put_again_is_not_an_old_one() -> None:
    """A row that is used again takes nothing over from the block that it held."""
    catalog = Catalog(Lru)
    row = catalog.begin(block(1), Tier.SSD, "write", tenant_digest=T1, now_ns=50)
    catalog.end(row, Tier.SSD, "abort")
    assert catalog.begin(block(2), Tier.SSD, "write", tenant_digest=T2) == row
    assert catalog.select(None, T1, None) == []
    assert catalog.select(None, T2, 1) == [row]


def test_changes_are_what_became_of_the_blocks() -> None:
    """A block that changed is named once, with the tiers in which it is READY now."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    ready(catalog, 2, namespace=OTHER)
    start = catalog.changes(0).sequence
    assert set(catalog.changes(0).blocks) == {
        (NS, block(1).hash, (Tier.SSD,)),
        (OTHER, block(2).hash, (Tier.SSD,)),
    }
    catalog.begin(block(1), Tier.HOST, "load")
    catalog.begin(block(3), Tier.HOST, "write")
    assert catalog.changes(start).blocks == ()
    catalog.commit(row, Tier.HOST, where(1))
    assert catalog.changes(start).blocks == ((NS, block(1).hash, TIERS),)
    assert catalog.evict(Tier.SSD, 1) == [catalog.find(block(1))]
    assert catalog.changes(start).blocks == ((NS, block(1).hash, (Tier.HOST,)),)
    catalog.end(row, Tier.HOST, "drop")
    catalog.end(row, Tier.SSD, "evicted")
    assert ready(catalog, 5) == row
    assert catalog.changes(start).blocks == (
        (NS, block(1).hash, ()),
        (NS, block(5).hash, (Tier.SSD,)),
    )


def test_a_snapshot_is_everything_ready() -> None:
    """Each block with a READY copy is in the snapshot with its tiers, and no other one."""
    catalog = Catalog(Lru)
    for number, tier in ((1, Tier.HOST), (2, Tier.SSD), (3, Tier.HOST), (3, Tier.SSD)):
        ready(catalog, number, tier)
    catalog.begin(block(4), Tier.HOST, "write")
    _, blocks = catalog.snapshot()
    shown = {(NS, block(1).hash, TIERS[:1]), (NS, block(2).hash, TIERS[1:])}
    assert set(blocks) == shown | {(NS, block(3).hash, TIERS)}


def test_a_restored_catalog_wants_a_snapshot_first() -> None:
    """What was found at open is in no list of changes, only in the snapshot."""
    catalog = Catalog(Lru)
    catalog.restore(found(1, 2))
    assert catalog.changes(0) is None
    sequence, blocks = catalog.snapshot()
    row = ready(catalog, 3)
    catalog.end(catalog.find(block(1)), Tier.SSD, "drop")
    assert set(blocks) == {(NS, block(n).hash, (Tier.SSD,)) for n in (1, 2)}
    assert catalog.changes(sequence).blocks == (
        (NS, catalog.id(row).hash, (Tier.SSD,)),
        (NS, block(1).hash, ()),
    )


def test_check_notices_books_that_do_not_balance() -> None:
    """A count that is off, a lost row, a hidden copy and a negative pin are each named."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog._copies.ready[Tier.SSD] += 1
    catalog._pins[Tier.HOST][row] = -1
    catalog._copies.shown[row] = 0
    catalog._rows._free.append(row)
    assert len(catalog.check()) == 4


# -- orders


def prompt(numbers: list[int], namespace: bytes = NS) -> list[bytes]:
    """Return made-up hashes."""
    return [block(number, namespace).hash for number in numbers]


def put(catalog: Catalog, numbers: list[int], *, evict: int = 0) -> list[int]:
    """Announce a prompt's blocks, then write them to the SSD head first; returns their rows."""
    hashes = prompt(numbers)
    new = [digest for digest in hashes if catalog.residency(NS, [digest]) == (None,)]
    at = [hashes.index(digest) for digest in new]
    rows = catalog.begin_all(NS, new, Tier.SSD, "write", positions=at)
    catalog.announce(NS, hashes, rows, [Tier.SSD])
    if evict:
        catalog.end_all(catalog.evict(Tier.SSD, evict), Tier.SSD, "evicted")
    for row in rows:
        catalog.commit(row, Tier.SSD, where(row))
    return [row for row in map(catalog.find, map(block, numbers)) if row is not None]


@pytest.mark.parametrize("name", POLICY)
def test_a_fresh_prompt_loses_its_tail_first(name: str) -> None:
    """However a put's blocks are committed, its head outlives its tail, whatever the policy."""
    catalog = Catalog(POLICY[name])
    rows = put(catalog, [0, 1, 2, 3])
    assert [*catalog.evict(Tier.SSD, 2), *catalog.evict(Tier.SSD, 2)] == rows[::-1]


def test_a_put_orders_what_was_there_before_it() -> None:
    """Blocks that a put extends stay at least as long as what it adds, and count no use for it."""
    catalog = Catalog(Lru)
    head = put(catalog, [0, 1])
    other = put(catalog, [7])
    rows = put(catalog, [0, 1, 2, 3])
    assert rows[:2] == head
    assert [catalog.asked(row) for row in rows] == [1, 1, 1, 1]
    assert catalog.evict(Tier.SSD, 5) == [*other, *rows[::-1]]


def test_a_block_without_a_place_is_valued_as_one_of_our_size() -> None:
    """A row says nothing about its next block: neither its size nor, with that, its value."""
    catalog = Catalog(POLICY["priced"], prices=Prices((1.0,), slot_bytes=8))
    (row,) = catalog.begin_all(NS, prompt([0]), Tier.SSD, "write", positions=[0])
    catalog.commit(row, Tier.SSD, Location(1, 0, 32))
    assert catalog.values([row]) == [0.25]
    catalog.end(row, Tier.SSD, "drop")
    assert catalog.begin_all(NS, prompt([1]), Tier.SSD, "write", positions=[0]) == [row]
    assert catalog.values([row]) == [1.0]
    catalog.commit(row, Tier.SSD, Location(1, 0, 8))
    assert catalog.values([row]) == [1.0]


def test_what_comes_makes_room_for_itself() -> None:
    """A copy on its way displaces what is worth more, but nothing of a higher priority."""
    catalog = Catalog(POLICY["priced"])
    (dear,) = put(catalog, [0])
    for now in range(9):
        catalog.touch(NS, prompt([0]), now)
    for number, priority, gone in ((5, -1, []), (6, 0, [dear])):
        coming = catalog.begin_all(
            NS, prompt([number]), Tier.SSD, "write", positions=[0], priority=priority
        )
        catalog.announce(NS, prompt([number]), coming, [Tier.SSD])
        assert catalog.evict(Tier.SSD, 1) == gone
        catalog.end_all(coming, Tier.SSD, "decline")


def test_no_room_is_made_for_what_is_worth_less_to_contiguous_callers() -> None:
    """Eviction stops at a copy on its way: what is worth more than it stays."""
    catalog = Catalog(POLICY["prefix-closed"])
    dear, cheap = put(catalog, [0]) + put(catalog, [1])
    for now in range(9):
        catalog.touch(NS, prompt([0]), now)
    coming = catalog.begin_all(NS, prompt([5]), Tier.SSD, "write", positions=[0])
    catalog.announce(NS, prompt([5]), coming, [Tier.SSD])
    assert catalog.evict(Tier.SSD, 2) == [cheap]
    assert catalog.evict(Tier.SSD, 2) == []
    assert catalog.state(dear, Tier.SSD) is CopyState.READY
    catalog.end_all(coming, Tier.SSD, "decline")
    assert catalog.evict(Tier.SSD, 2) == [dear]


def test_what_is_declined_ages_what_stays() -> None:
    """Fresh blocks that find no room find it in the end: the clock goes on with each of them."""
    catalog = Catalog(POLICY["prefix-closed"])
    (dear,) = put(catalog, [0])
    for now in range(9):
        catalog.touch(NS, prompt([0]), now)
    declined = 0
    while True:
        number = 100 + declined
        coming = catalog.begin_all(NS, prompt([number]), Tier.SSD, "write", positions=[0])
        catalog.announce(NS, prompt([number]), coming, [Tier.SSD])
        if catalog.evict(Tier.SSD, 1) == [dear]:
            break
        catalog.end_all(coming, Tier.SSD, "decline")
        declined += 1
    assert 3 <= declined <= 5  # no block counts for more than four first ones in a closed order


def test_a_copy_given_up_blocks_nobody() -> None:
    """What was announced and did not come is in nobody's way, even if it was never said."""
    catalog = Catalog(Lru)
    (old,) = put(catalog, [0])
    (row,) = catalog.begin_all(NS, prompt([1]), Tier.HOST, "write", positions=[0])
    catalog.announce(NS, prompt([1]), [row])
    catalog.commit(row, Tier.HOST, where(1))
    catalog.touch(NS, prompt([0]), 1)  # the block that never came to the SSD is the first there
    assert catalog.evict(Tier.SSD, 1) == [old]


def test_a_copy_in_host_is_cheap_where_the_ssd_has_it() -> None:
    """In host memory the only copy of a block outlives one that is on the SSD as well."""
    catalog = Catalog(POLICY["priced"], prices=Prices((8.0,), 1.0))
    both, only = (ready(catalog, n, Tier.HOST) for n in (1, 2))
    catalog.begin(block(1), Tier.SSD, "write")
    catalog.commit(both, Tier.SSD, where(1))
    catalog.touch(NS, prompt([2, 1]), 1)
    assert catalog.evict(Tier.HOST, 2) == [both, only]


def test_uses_outlive_the_block() -> None:
    """A block that comes back starts with the uses of its earlier life, and one more."""
    catalog = Catalog(Lru)
    (row,) = put(catalog, [1])
    for now in range(3):
        catalog.touch(NS, prompt([1]), now)
    assert catalog.asked(row) == 4
    catalog.end(row, Tier.SSD, "drop")
    assert catalog.find(block(1)) is None
    (again,) = put(catalog, [1])
    assert catalog.asked(again) == 5
    (fresh,) = put(catalog, [2])
    assert catalog.asked(fresh) == 1


def test_uses_are_counted_up_to_a_bound() -> None:
    """A block that is asked for all the time has as many uses as fit, here and in its next life."""
    catalog = Catalog(Lru)
    (row,) = put(catalog, [1])
    for now in range(300):
        catalog.touch(NS, prompt([1]), now)
    assert catalog.asked(row) == 255
    catalog.end(row, Tier.SSD, "drop")
    assert [catalog.asked(row) for row in put(catalog, [1])] == [255]


def test_new_prices_count_from_the_next_touch() -> None:
    """A recalibration reorders nothing by itself."""
    catalog = Catalog(POLICY["priced"], prices=Prices((1.0, 9.0)))
    first, second = put(catalog, [0, 1])
    catalog.reprice(Prices((9.0, 1.0)))
    assert catalog._columns.victims(Tier.SSD, 2) == [first, second]
    catalog.touch(NS, prompt([0, 1]), 1)
    assert catalog._columns.victims(Tier.SSD, 2) == [second, first]


@pytest.mark.parametrize("name", POLICY)
def test_pinned_rows_are_skipped_not_lost(name: str) -> None:
    """A full tier evicts around its pins; a row let go is a victim like before."""
    catalog = Catalog(POLICY[name])
    rows = put(catalog, list(range(8)))
    order = catalog._columns.victims(Tier.SSD, 8)
    for row in order[:3]:
        catalog.pin(row, Tier.SSD)
    gone = catalog.evict(Tier.SSD, 3)
    assert gone == order[3:6]
    catalog.end_all(gone, Tier.SSD, "evicted")
    for row in order[:3]:
        catalog.unpin(row, Tier.SSD)
    assert sorted(catalog.evict(Tier.SSD, 9)) == sorted(set(rows) - set(gone))


PARENTS = (-1, 0, 1, 2, 1, 4, 0, 6, -1, 8, 8)


def line(leaf: int) -> list[int]:
    """Return the numbers of a block of a tree and of all before it, head first."""
    numbers = [leaf]
    while PARENTS[numbers[0]] >= 0:
        numbers.insert(0, PARENTS[numbers[0]])
    return numbers


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "touch", "evict", "reopen"]),
            st.sampled_from(range(len(PARENTS))),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_a_stored_block_can_be_reached_under_prefix_closed(
    steps: list[tuple[str, int, int]],
) -> None:
    """Over puts, uses and evictions of a tree of prompts no stored block lacks the one before it.

    Also after a restart at which only some of the uses were recorded.
    """
    prices = Prices(tuple(1 + position for position in range(8)))
    catalog = Catalog(POLICY["prefix-closed"], prices=prices)
    for now, (what, leaf, count) in enumerate(steps):
        numbers = line(leaf)
        if what == "put":
            put(catalog, numbers, evict=count)
        elif what == "touch":
            catalog.touch(NS, prompt(numbers), now)
        elif what == "evict":
            catalog.end_all(catalog.evict(Tier.SSD, count), Tier.SSD, "evicted")
        else:
            catalog = reopened(catalog, leaf, prices)
        stored = [n for n in range(len(PARENTS)) if catalog.find(block(n)) is not None]
        assert all(PARENTS[n] < 0 or PARENTS[n] in stored for n in stored)
        assert catalog.check() == []


def reopened(catalog: Catalog, lost: int, prices: Prices) -> Catalog:
    """Return a catalog of what this one has on the SSD; the last use of one block was lost."""
    stored = [n for n in range(len(PARENTS)) if catalog.find(block(n)) is not None]
    made = entries(
        *((block(n), where(n), 5 if n == lost else 9 + n % 3, len(line(n)), T1) for n in stored)
    )
    for entry, number in zip(made, stored, strict=True):
        if PARENTS[number] >= 0:
            entry["parent"] = np.void(block(PARENTS[number]).hash)
    again = Catalog(POLICY["prefix-closed"], prices=prices)
    again.restore(made)
    return again
