from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog import Catalog, CopyState
from kvtier.plan import Tier
from kvtier.policy import Lru
from kvtier.tiers.base import BlockId, Location

NS = b"n" * 32
OTHER = b"o" * 32
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
    return BlockId(namespace, number.to_bytes(32, "big"))


def where(number: int) -> Location:
    """Return a made-up place."""
    return Location(7, number, 8192)


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
    """The scope pins each block in its tier, says which it could, and undoes exactly that."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    ready(catalog, 3, Tier.HOST)
    hashes = [block(n).hash for n in (1, 2, 3, 4)]
    catalog.begin(block(4), Tier.SSD, "write")
    with catalog.pinned(NS, hashes, [Tier.SSD, Tier.SSD, Tier.HOST, Tier.SSD]) as kept:
        assert kept == [True, False, True, False]
        assert catalog.pins() == 2
        assert catalog.evict(Tier.SSD, 9) == []
    assert catalog.pins() == 0
    assert catalog.evict(Tier.SSD, 9) == [row]


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
    catalog.touch(NS, [block(n).hash for n in (0, 1, 2)])
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


def test_only_slots_of_the_size_asked_for_are_evicted() -> None:
    """A victim whose slot is of no use is left alone."""
    catalog = Catalog(Lru)
    small = catalog.begin(block(1), Tier.SSD, "write")
    catalog.commit(small, Tier.SSD, Location(1, 0, 8192))
    large = catalog.begin(block(2), Tier.SSD, "write")
    catalog.commit(large, Tier.SSD, Location(2, 0, 16384))
    assert catalog.evict(Tier.SSD, 5, 16384) == [large]
    assert catalog.state(small, Tier.SSD) is CopyState.READY


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


def test_found_blocks_are_ready() -> None:
    """What was found at open is READY, the first one the first to go."""
    catalog = Catalog(Lru)
    catalog.restore((block(n), where(n)) for n in (4, 2, 9))
    assert catalog.ready(Tier.SSD) == 3
    row = catalog.find(block(4))
    assert catalog.evict(Tier.SSD, 1) == [row]
    assert set(catalog.blocks(NS, Tier.SSD, 10)) == {block(2).hash, block(9).hash}
    assert len(catalog.blocks(NS, Tier.SSD, 1)) == 1
    assert catalog.blocks(OTHER, Tier.SSD, 10) == []


def test_check_notices_books_that_do_not_balance() -> None:
    """A count that is off, a lost row and a negative pin are each named."""
    catalog = Catalog(Lru)
    row = ready(catalog, 1)
    catalog._ready[Tier.SSD] += 1
    catalog._pins[0, row] = -1
    catalog._free.append(row)
    assert len(catalog.check()) == 3


MOVES = st.tuples(
    st.sampled_from([*AFTER, "pin", "unpin", "touch"]),
    st.integers(0, 4),
    st.sampled_from(TIERS),
)


@given(st.lists(MOVES, max_size=80))
def test_like_a_table_of_states(  # noqa: C901, PLR0912 - one branch per kind of move
    moves: list[tuple[str, int, Tier]],
) -> None:
    """Over any course of moves, states, residency and pins are those of a plain dict."""
    catalog = Catalog(Lru)
    states = dict.fromkeys([(n, tier) for n in range(5) for tier in TIERS], CopyState.ABSENT)
    pins = dict.fromkeys(states, 0)
    for what, number, tier in moves:
        name, key = block(number), (number, tier)
        row = catalog.find(name)
        if what == "touch":
            catalog.touch(NS, [name.hash])
        elif what == "pin":
            if row is not None and catalog.pin(row, tier):
                assert states[key] is CopyState.READY
                pins[key] += 1
            else:
                assert states[key] is not CopyState.READY
        elif what == "unpin":
            if pins[key]:
                catalog.unpin(row, tier)
                pins[key] -= 1
        elif what == "evict":
            for chosen in catalog.evict(tier, 1):
                found = int.from_bytes(catalog.id(chosen).hash, "big")
                assert pins[found, tier] == 0
                assert states[found, tier] is CopyState.READY
                states[found, tier] = CopyState.EVICTING
        elif what in LEGAL[states[key]]:
            move(catalog, name, tier, what)
            states[key] = AFTER[what]
        else:
            with pytest.raises(ValueError, match=r".*"):
                move(catalog, name, tier, what)
        for n in range(5):
            row = catalog.find(block(n))
            for tier_ in TIERS:
                seen = CopyState.ABSENT if row is None else catalog.state(row, tier_)
                assert seen == states[n, tier_]
            fastest = next((t for t in TIERS if states[n, t] is CopyState.READY), None)
            assert catalog.residency(NS, [block(n).hash]) == (fastest,)
        assert catalog.pins() == sum(pins.values())
        assert catalog.check() == []
