from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier import Tier
from kvtier_vllm.events import MEDIA, KVEvents

PAGE, BLOCK = 2, 4
HASHES = [bytes([number]) * 32 for number in range(8)]


def page_hash(page: int) -> bytes:
    """Return the engine's hash of a page."""
    return page.to_bytes(32, "big")


def outside(page: int) -> Any:
    """Return a page's hash as events show it."""
    return maybe_convert_block_hash(BlockHash(page_hash(page)))


def request(tokens: int, lora: Any = None) -> Any:
    """Return what the engine keeps of a request: its tokens, and the hashes of its full pages."""
    return SimpleNamespace(
        all_token_ids=list(range(tokens)),
        block_hashes=[page_hash(page) for page in range(tokens // PAGE)],
        lora_request=lora,
    )


def events_over(where: dict[bytes, set[Tier]], kept: int = 100) -> KVEvents:
    """Return events of a residency that the test changes."""
    return KVEvents(
        lambda each: where.get(each, ()),
        page_tokens=PAGE,
        block_tokens=BLOCK,
        known_blocks_max=kept,
    )


def test_a_block_is_announced_as_the_engines_own_pages() -> None:
    """Consumers see vLLM's hashes, their parent, the tokens and where the bytes are."""
    where: dict[bytes, set[Tier]] = {}
    events = events_over(where)
    lora = SimpleNamespace(adapter_id=7, name="dialect")
    events.note(request(11, lora), HASHES, range(3))
    assert events.take() == []
    where[HASHES[1]] = {Tier.HOST, Tier.SSD}
    events.moved(HASHES)
    cpu, storage = events.take()
    assert isinstance(cpu, BlockStored)
    assert (cpu.medium, storage.medium) == ("CPU", "STORAGE")
    assert cpu.block_hashes == [outside(2), outside(3)]
    assert cpu.parent_block_hash == outside(1)
    assert (cpu.token_ids, cpu.block_size) == ([4, 5, 6, 7], PAGE)
    assert (cpu.lora_id, cpu.lora_name, cpu.group_idx) == (7, "dialect", 0)
    assert (cpu.kv_cache_spec_kind, cpu.locality) == ("full_attention", "LOCAL")


def test_the_first_block_has_no_parent() -> None:
    """It is nobody's child, not the last page's."""
    events = events_over({HASHES[0]: {Tier.HOST}})
    events.note(request(8), HASHES, range(2))
    (stored,) = events.take()
    assert stored.parent_block_hash is None


def test_what_was_stored_before_is_announced_with_the_first_request_that_holds_it() -> None:
    """An earlier process's blocks are known by kvtier's hashes only, until then."""
    events = events_over({HASHES[0]: {Tier.SSD}})
    events.moved(HASHES)
    assert events.take() == []
    events.note(request(4), HASHES, range(1))
    assert [event.medium for event in events.take()] == ["STORAGE"]
    assert events.take() == []


def test_a_block_that_the_engine_has_not_hashed_is_passed_over() -> None:
    """A request's last, unfinished pages have no hash yet."""
    where = {HASHES[0]: {Tier.HOST}, HASHES[1]: {Tier.HOST}}
    events = events_over(where)
    events.note(request(BLOCK + PAGE), HASHES, range(2))
    assert len(events.take()) == 1


def test_a_reset_takes_everything_back() -> None:
    """What was announced is removed, and is announced anew only when it is stored anew."""
    where = {HASHES[0]: {Tier.HOST, Tier.SSD}}
    events = events_over(where)
    events.note(request(4), HASHES, range(1))
    events.take()
    where.clear()
    events.cleared()
    assert [type(event) for event in events.take()] == [BlockRemoved, BlockRemoved]
    assert events.take() == []


def follow(events: list[Any], told: dict[tuple[Any, str], bool]) -> None:
    """Do what a consumer does; an event that says what it knows already is a failure."""
    for event in events:
        for page in event.block_hashes:
            now = isinstance(event, BlockStored)
            assert told.get((page, event.medium), False) is not now
            told[page, event.medium] = now


moves = st.tuples(
    st.sampled_from(["note", "move", "take"]),
    st.integers(0, 3),
    st.sets(st.sampled_from([Tier.HOST, Tier.SSD, Tier.DEVICE])),
)


@settings(max_examples=200)
@given(st.lists(moves, max_size=40), st.integers(1, 4))
def test_who_follows_the_events_knows_what_is_stored(actions: list[Any], kept: int) -> None:
    """Of the blocks remembered, exactly; of those forgotten, nothing: never a hit that is none."""
    where: dict[bytes, set[Tier]] = {}
    events = events_over(where, kept)
    told: dict[tuple[Any, str], bool] = {}
    recent: list[int] = []
    for action, block, tiers in actions:
        if action == "note":
            events.note(request(4 * BLOCK), HASHES, [block])
            recent = [*(each for each in recent if each != block), block][-kept:]
        elif action == "move":
            where[HASHES[block]] = tiers
            events.moved([HASHES[block]])
        else:
            follow(events.take(), told)
    follow(events.take(), told)
    stored = {pair for pair, now in told.items() if now}
    assert stored == {
        (outside(page), MEDIA[tier])
        for block in recent
        for tier in where.get(HASHES[block], ())
        if tier in MEDIA
        for page in (2 * block, 2 * block + 1)
    }
