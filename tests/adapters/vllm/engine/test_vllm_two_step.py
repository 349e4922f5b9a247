"""The overlap in two public requests, and the events of what is stored, in a real engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm_harness import BLOCK, engine, prompt, transfer

import kvtier
from kvtier_vllm import two_step
from kvtier_vllm_run.engine import counts_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]


def test_two_requests_compute_the_head_and_load_the_tail(
    tiny: Path, expected: Expected, tmp_path: Path
) -> None:
    """Without our scheduler: the head's request loads nothing, the real one only what is left."""
    tokens = prompt(1, 1300)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with engine(tiny, transfer(tmp_path)) as llm:
        llm.run(tokens, answer=8)
        llm.forget()
        before = counts_of(llm.llm)
        head = two_step.fraction_tokens(tokens, 0.4)
        output = two_step.generate(llm.llm, tokens, sampling, head)
        llm.settle()
        counts = counts_of(llm.llm)
        llm.assert_pool_free()
    rose = {name: counts[name] - before[name] for name in counts}
    assert head == 2 * BLOCK
    assert tuple(output.outputs[0].token_ids) == expected[tuple(tokens)]
    assert rose['prompt_blocks{source="local"}'] == 2
    assert rose['prompt_blocks{source="host"}'] == 3


def test_the_tail_is_fetched_from_the_ssd_while_the_head_is_computed(
    tiny: Path, tmp_path: Path
) -> None:
    """The head's request names the whole prompt, whose blocks are then promoted for the real one.

    The engine stops the fetch with the head, so what has arrived by then depends on the disk.
    """
    tokens = prompt(1, 1300)
    with engine(tiny, transfer(tmp_path)) as llm:
        llm.run(tokens)
    with engine(tiny, transfer(tmp_path)) as llm:
        llm.llm.generate(
            [{"prompt_token_ids": tokens[: 2 * BLOCK]}],
            SamplingParams(
                max_tokens=64,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": two_step.head_params(tokens)},
            ),
            use_tqdm=False,
        )
        llm.settle()
        coordinator = llm.connector.coordinator
        keys = kvtier.BlockKeys.of(coordinator._mirror.spec, tokens)
        tiers = [tier for digest in keys for tier in coordinator.stored_in(digest)]
        llm.assert_pool_free()
    assert len(tiers) == len(keys)
    assert tiers[-1] is kvtier.Tier.HOST


def test_what_is_stored_is_announced_under_the_engines_own_hashes(
    tiny: Path, tmp_path: Path
) -> None:
    """A router sees which of the pages it knows from the engine are held beside its memory."""
    tokens = prompt(1, 1300)
    published: list[Any] = []
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    def run() -> tuple[list[Any], list[Any]]:
        with engine(tiny, transfer(tmp_path), kv_events_config=config) as llm:
            llm.scheduler.kv_event_publisher = SimpleNamespace(
                publish=lambda batch: published.extend(batch.events), shutdown=lambda: None
            )
            llm.run(tokens)
            llm.run(prompt(2, 40))
        stored = [event for event in published if isinstance(event, BlockStored)]
        published.clear()
        return [e for e in stored if e.medium == "GPU"], [e for e in stored if e.medium != "GPU"]

    held, announced = run()
    pages = {page for event in held for page in event.block_hashes}
    assert len(announced) == 1300 // BLOCK
    assert {event.medium for event in announced} == {"CPU"}
    assert {page for event in announced for page in event.block_hashes} <= pages
    assert sorted(event.token_ids[0] for event in announced) == sorted(
        tokens[block * BLOCK] for block in range(1300 // BLOCK)
    )
    # Another engine finds on the SSD what it has not stored itself, and says so when it is asked.
    _, found = run()
    first = {page for event in announced for page in event.block_hashes}
    assert {page for event in found for page in event.block_hashes} == first
    assert "STORAGE" in {event.medium for event in found}
