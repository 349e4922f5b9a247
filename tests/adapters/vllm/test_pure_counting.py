from __future__ import annotations

import kvtier
from kvtier import CostModel, Residency, Tier
from kvtier.cost import ComputeCost, LinkCost
from kvtier_vllm.counting import count_restore
from kvtier_vllm.restore import Restore
from kvtier_vllm.tally import Tally

SPEC = kvtier.KVSpec(
    model="m", weights="sha256:" + "0" * 64, dtype="float32", layers=1, kv_heads=1, head_dim=4
)
COSTS = CostModel(
    compute=ComputeCost(token_s=0.001, samples=100),
    ssd=LinkCost(SPEC.block_layout.block_bytes / 0.256, 0.0, 9),
)
BLOCKS = 8


def restore(ranks: int) -> Restore:
    """Return a restore that was begun, of a prompt on the SSD that loads as fast as it computes."""
    keys = kvtier.BlockKeys.of(SPEC, list(range(BLOCKS * SPEC.block_tokens)))
    residency = Residency(keys, (Tier.SSD,) * BLOCKS, SPEC.block_layout.block_bytes)
    begun = Restore("r", kvtier.plan(residency, COSTS), COSTS, 0.0, ranks=ranks)
    begun.start(1, range(BLOCKS), 1)
    return begun


def drive(
    one: Restore, *, ranks: int, fails: tuple[int, ...] = (), expires: bool = False
) -> set[int]:
    """Compute a step and answer a load in turn until all is in place; returns what was stopped.

    A stopped load is answered as one that came to nothing, and so is each of ``fails``, by the last
    rank, when it is first asked for. ``expires``: the rest is not loaded once loads are out.
    """
    now, open_loads, stopped, left = 0.0, [], set(), list(fails)
    while not one.finished:
        now += 0.25
        loads, cancels = one.take_orders()
        open_loads += [load.block for load in loads]
        if loads and expires:
            one.expire(now)
            continue
        gone = {block for _, block in cancels if block in open_loads}
        stopped |= gone
        for block in gone:
            open_loads.remove(block)
            for rank in range(ranks):
                one.answered(rank, block, now, landed=False)
        if open_loads:
            block = open_loads.pop(0)
            for rank in range(ranks):
                lost = block in left and rank == ranks - 1
                one.answered(rank, block, now, landed=not lost)
            left = [each for each in left if each != block]
        one.settled()
        if one.cap is not None:
            one.reached(one.cap, now, pipelined=False)
    return stopped


def test_blocks_are_counted_by_how_they_came() -> None:
    """Every block that was not held is counted once, however many ranks brought it."""
    one, tally = restore(ranks=3), Tally()
    drive(one, ranks=3)
    count_restore(tally, one, 1.0)
    counts = tally.take()
    both = counts["restored_blocks_loaded"], counts["restored_blocks_recomputed"]
    assert both[0] == one.loaded
    assert sum(map(float, both)) == BLOCKS  # type: ignore[arg-type]
    assert counts["restores_hybrid"] == 1
    assert counts["restore_seconds"] == [1.0]


def test_a_load_that_was_stopped_is_no_failure() -> None:
    """The executor takes loads back when recomputing is better by now: no fault of theirs."""
    one, tally = restore(ranks=2), Tally()
    stopped = drive(one, ranks=2, expires=True)
    assert stopped, "nothing was taken back: the test shows nothing"
    count_restore(tally, one, 1.0)
    assert "load_failures" not in tally.take()


def test_a_load_that_fails_on_one_rank_is_one_failure() -> None:
    """Its block is recomputed, and counted as that."""
    one, tally = restore(ranks=2), Tally()
    last = BLOCKS - 1
    stopped = drive(one, ranks=2, fails=(last,))
    count_restore(tally, one, 1.0)
    counts = tally.take()
    assert last not in stopped
    assert counts["load_failures"] == 1
    assert counts["restored_blocks_loaded"] == one.loaded < BLOCKS
