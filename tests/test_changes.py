from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.changes import CatalogChanges, ChangeLog
from kvtier.plan import Tier

NS, A, B = b"n" * 32, b"a" * 32, b"b" * 32
HOST, SSD, BOTH = (Tier.HOST,), (Tier.SSD,), (Tier.HOST, Tier.SSD)


def test_the_last_state_of_each_block_is_told() -> None:
    """Of several changes of a block only the last one counts; blocks come in its order."""
    log = ChangeLog(8)
    for digest, tiers in ((A, SSD), (B, HOST), (A, BOTH), (B, ())):
        log.add((NS, digest, tiers))
    assert log.since(0) == CatalogChanges(4, ((NS, A, BOTH), (NS, B, ())))
    assert log.since(3) == CatalogChanges(4, ((NS, B, ()),))
    assert log.since(4) == CatalogChanges(4, ())


def test_what_is_too_old_or_not_yet_is_not_answered() -> None:
    """Beyond the changes kept, and ahead of the log, there is no answer."""
    log = ChangeLog(2)
    assert log.since(0) == CatalogChanges(0, ())
    for digest in (A, B, A):
        log.add((NS, digest, SSD))
    assert log.since(0) is None
    assert log.since(1) is not None
    assert log.since(4) is None
    assert log.since(-1) is None


def test_nothing_reaches_back_over_a_cut() -> None:
    """After a cut only those who know of it can go on."""
    log = ChangeLog(8)
    log.add((NS, A, SSD))
    log.cut()
    assert log.since(1) is None
    assert log.since(2) == CatalogChanges(2, ())
    log.add((NS, A, ()))
    assert log.since(2) == CatalogChanges(3, ((NS, A, ()),))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from([HOST, SSD, BOTH, ()]))),
    st.integers(0, 20),
)
def test_replayed_changes_lead_to_the_last_state(
    changes: list[tuple[bytes, tuple[Tier, ...]]], since: int
) -> None:
    """Whoever knows the state at a sequence number and gets an answer knows the state after it."""
    log = ChangeLog(10)
    for digest, tiers in changes:
        log.add((NS, digest, tiers))
    told = log.since(since)
    assert (told is None) == (not len(changes) - 10 <= since <= len(changes))
    if told is not None:
        mirror = dict(changes[:since])
        mirror.update({digest: tiers for _, digest, tiers in told.blocks})
        assert mirror == dict(changes)
        assert told.sequence == len(changes)
