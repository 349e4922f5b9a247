"""Restores under vLLM's real scheduler, with ranks that hold names instead of numbers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from scheduler_rig import BLOCK, PAGE, Rig

from kvtier import Tier

if TYPE_CHECKING:
    from pathlib import Path

WAYS = [
    pytest.param({"ahead": ahead, "ranks": ranks}, id=f"{'async' if ahead else 'sync'}-{ranks}")
    for ahead in (False, True)
    for ranks in (1, 3)
]


def prompt(seed: int, tokens: int) -> list[int]:
    """Return token ids that share nothing with those of another seed."""
    chance = random.Random(seed)  # noqa: S311 - a test's
    return [chance.randrange(50) for _ in range(tokens)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_stored_is_computed_and_loaded(tiny: Path, way: dict[str, object]) -> None:
    """A prompt that was stored comes back, some of it computed and some of it loaded."""
    rig = Rig(tiny, **way)
    first = rig.add(prompt(1, 200))
    rig.run()
    rig.check()
    assert len(rig.ranks[0].stored) == 203 // BLOCK
    rig.scheduler.reset_prefix_cache()
    before = rig.computed_tokens
    again = rig.add(prompt(1, 200))
    rig.run()
    rig.check()
    assert rig.answers[again] == rig.answers[first]
    assert rig.ranks[0].loaded_blocks > 0
    assert rig.computed_tokens - before < 200


def test_holes_in_the_middle_take_several_jumps(tiny: Path) -> None:
    """Missing blocks between stored ones are computed, and only they."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(2, 161)
    rig.put(tokens, [1, 2, 5, 6, 9])
    name = rig.add(tokens, answer=3)
    rig.run()
    rig.check()
    assert len(rig.answers[name]) == 3
    assert rig.ranks[0].loaded_blocks == 5
    assert rig.computed_tokens == 5 * BLOCK + 1 + 2


def test_a_request_is_parked_while_all_it_needs_is_on_its_way(tiny: Path) -> None:
    """With nothing to compute the engine computes nothing, and goes on when the loads are there."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(3, 100)
    rig.put(tokens, range(6))
    rig.add(tokens)
    assert [rig.step(), rig.step()] == [0, 0]
    rig.land()
    rig.run()
    rig.check()
    assert rig.ranks[0].loaded_blocks == 6


@pytest.mark.parametrize("bad", range(6))
def test_a_load_that_fails_is_computed(tiny: Path, bad: int) -> None:
    """Whichever block does not come, the answer is right and only that block is computed."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(4, 100)
    rig.put(tokens, range(6))
    digest = rig.keys(tokens).hashes[bad]
    rig.add(tokens)
    rig.step()
    for rank in rig.ranks:
        del rank.stored[digest]  # gone, and the scheduler does not know
    rig.run()
    rig.check()
    assert rig.ranks[0].loaded_blocks == 5
    assert rig.computed_tokens == BLOCK + 4 + 3


def test_the_second_of_two_requests_loads_nothing(tiny: Path) -> None:
    """Two requests on one tail make one load; the second waits, then hits the engine's cache."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(5, 100)
    rig.put(tokens, range(6))
    both = [rig.add(tokens), rig.add(tokens)]
    rig.run()
    rig.check()
    assert rig.answers[both[0]] == rig.answers[both[1]]
    assert rig.ranks[0].loaded_blocks == 6


def test_a_block_held_in_part_is_computed(tiny: Path) -> None:
    """Pages that others may read are never loaded over: the local hit ends within a block."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(6, 100)
    rig.add(tokens[: 2 * BLOCK + PAGE + 1], answer=1)
    rig.run()
    for rank in rig.ranks:
        rank.stored.clear()
    rig.put(tokens, range(6))
    before = rig.computed_tokens
    rig.add(tokens)
    rig.run()
    rig.check()
    assert rig.ranks[0].loaded_blocks == 3
    assert rig.computed_tokens - before == PAGE + 4 + 3


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", range(5))
def test_an_abort_gives_its_pages_back_when_its_loads_are_over(
    tiny: Path, ahead: Any, steps: int
) -> None:
    """Nothing is freed under a load, and nothing is kept after it."""
    rig = Rig(tiny, ahead=ahead)
    tokens = prompt(7, 150)
    rig.put(tokens, range(9))
    name = rig.add(tokens)
    for _ in range(steps):
        rig.step()
    rig.abort(name)
    for _ in range(3):
        rig.step()
    rig.run()
    rig.check()


def test_a_preempted_request_comes_back_from_the_store(tiny: Path) -> None:
    """What was computed before a preemption is loaded, not computed again."""
    rig = Rig(tiny, pages=24, load_s=1e-6, caching=False)
    names = [rig.add(prompt(seed, 80), answer=40) for seed in (8, 9)]
    rig.run()
    rig.check()
    assert [len(rig.answers[name]) for name in names] == [40, 40]
    assert rig.ranks[0].loaded_blocks >= 5


def test_the_prefix_cache_can_be_emptied_while_pages_are_held(tiny: Path) -> None:
    """A reset succeeds though saves, loads and a parked request hold pages; answers stay right."""
    rig = Rig(tiny)
    tokens = prompt(10, 150)
    rig.put(tokens, range(9))
    rig.add(tokens)
    rig.add(prompt(11, 90))
    for _ in range(3):
        rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    rig.check()


def test_nothing_from_before_a_reset_is_hit(tiny: Path) -> None:
    """After a reset of the connector a lookup misses until blocks are stored anew."""
    rig = Rig(tiny)
    tokens = prompt(12, 150)
    rig.put(tokens, range(9))
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.add(tokens)
    rig.run()
    rig.check()
    assert rig.ranks[0].loaded_blocks == 0
    assert rig.ranks[0].stored


def test_what_was_computed_by_other_weights_is_not_stored(tiny: Path) -> None:
    """Requests that a change of weights overtakes are answered, and leave nothing behind."""
    rig = Rig(tiny)
    rig.add(prompt(13, 150), answer=20)
    for _ in range(3):
        rig.step()
    rig.land()
    rig.change_weights("sha256:2")
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.run()
    rig.check()
    assert not rig.ranks[0].stored
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.add(prompt(13, 150))
    rig.run()
    rig.check()
    assert rig.ranks[0].stored


@pytest.mark.parametrize("gaps", [[], [0], [0, 3]])
def test_the_engine_counts_what_was_loaded_as_hits(tiny: Path, gaps: list[int]) -> None:
    """However a restore began, vLLM's own counters know every token that was loaded."""
    rig = Rig(tiny, load_s=1e-6)
    tokens = prompt(14, 6 * BLOCK + 1)
    rig.put(tokens, [block for block in range(6) if block not in gaps])
    rig.add(tokens)
    stats = rig.scheduler.connector_prefix_cache_stats
    rig.scheduler.make_stats = lambda *args, **kwargs: None  # it starts the counts anew
    rig.run()
    rig.check()
    assert stats.hits == (6 - len(gaps)) * BLOCK
    assert sum(stats.hits_by_source.values()) == stats.hits


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("way", [*WAYS, pytest.param({"plain": True}, id="plain")])
def test_any_traffic_is_answered_right(tiny: Path, way: dict[str, object], seed: int) -> None:
    """Arrivals, aborts, failures, evictions, preemptions and resets in any order do no harm.

    Nothing is read that is not there, written where something else goes, or kept for ever.
    """
    chance = random.Random(seed)  # noqa: S311 - a test's
    rig = Rig(
        tiny,
        **way,
        pages=chance.choice([24, 28, 48, 96]),
        step_tokens=chance.choice([16, 24, 32, 64]),
        load_s=chance.choice([1e-6, 0.005, 0.01, 0.05]),
        price=chance.choice([0.0, 1.0]),
        caching=chance.random() < 0.8,
    )
    families = [prompt(seed * 10 + i, 150) for i in range(3)]
    for tokens in families:
        blocks = [b for b in range(9) if chance.random() < chance.choice([0.3, 0.9])]
        rig.put(tokens, blocks, chance.choice([Tier.SSD, Tier.HOST]))
    for _ in range(120):
        happen(rig, chance, families)
    rig.run()
    rig.check()


def happen(rig: Rig, chance: random.Random, families: list[list[int]]) -> None:
    """Let one thing happen."""
    deed = chance.random()
    if deed < 0.1 and len(rig.prompts) < 25:
        tokens = chance.choice(families)[: chance.choice([20, 33, 64, 100, 140])]
        tail = prompt(chance.randrange(9), chance.randrange(1, 9))
        rig.add(tokens + tail, answer=chance.choice([1, 2, 6, 20]))
    elif deed < 0.13 and rig.prompts:
        rig.abort(chance.choice(list(rig.prompts)))
    elif deed < 0.16:
        for rank in rig.ranks:
            if rank.stored and chance.random() < 0.7:
                rank.lose(chance.choice(list(rank.stored)))
    elif deed < 0.17:
        rig.drain()  # vLLM itself raises while steps are out
        rig.scheduler.reset_prefix_cache(
            reset_running_requests=not rig.plain and chance.random() < 0.5,
            reset_connector=chance.random() < 0.5,
        )
    elif deed < 0.5:
        rig.land(chance, fail=0.1)
    else:
        rig.step(chance.choice([0.001, 0.01, 0.05]))
