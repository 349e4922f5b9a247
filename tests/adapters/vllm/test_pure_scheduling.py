"""The parts of the scheduler's side that know nothing of vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_fakes import (
    BLOCK,
    PAGE,
    FakePages,
    FakeRequest,
    costs_of,
    hello_of,
    limits_of,
    mirror_of,
    spec_of,
)

from kvtier import BlockKeys, CatalogChanges, Tier
from kvtier_vllm.coordinator import DEFER_S_MAX, Coordinator
from kvtier_vllm.hints import HINTS_MAX
from kvtier_vllm.holds import Holds
from kvtier_vllm.messages import RankReport
from kvtier_vllm.mirror import Mirror
from kvtier_vllm.planning import plan_restore
from kvtier_vllm.saves import SAVE_PAGES_SHARE_MAX, Saves
from kvtier_vllm.settings import Settings
from kvtier_vllm.steps import Steps, learnable

HOST, SSD = Tier.HOST, Tier.SSD


def tokens_of(seed: int, count: int) -> list[int]:
    """Return a prompt."""
    return [(seed * 1009 + i * 31) % 997 for i in range(count)]


def keys_of(tokens: list[int], weights: str = "sha256:1") -> BlockKeys:
    """Return its keys."""
    return BlockKeys.of(spec_of(weights=weights), tokens)


# -- settings


def test_settings_of_a_whole_engine_are_divided_over_its_ranks() -> None:
    """Sizes are for all ranks together; what is no size is every rank's."""
    settings = Settings.of({"path": "/x", "host_bytes": "3GiB", "policy": "lru", "ssd_bytes": 9000})
    assert settings.of_rank(3) == {"host_bytes": 1 << 30, "ssd_bytes": 3000, "policy": "lru"}


@pytest.mark.parametrize(
    ("given_settings", "said"),
    [
        ({}, "path is missing"),
        ({"path": ""}, "path: ''"),
        ({"path": "/x", "host_byte": 1}, "host_byte unknown; known are .*host_bytes"),
        ({"path": "/x", "policy": "fifo"}, "policy: 'fifo'"),
        ({"path": "/x", "host_bytes": "much"}, "host_bytes: 'much'"),
        ({"path": "/x", "save": "yes"}, "save: 'yes'"),
        ({"path": "/x", "compute_price_per_request": -1}, "compute_price_per_request: -1"),
        ({"path": "/x", "compute_price_per_request": True}, "compute_price_per_request: True"),
        ({"path": "/x", "links": {"tape": {}}}, "links: 'tape'"),
        ({"path": "/x", "links": {"ssd": {}}}, "links: 'ssd': bytes_per_s is missing"),
        ({"path": "/x", "links": {"ssd": {"bytes_per_s": 0}}}, "bytes_per_s: 0"),
    ],
)
def test_a_wrong_setting_is_named(given_settings: dict[str, Any], said: str) -> None:
    """Every mistake is an error at start that says which setting it is about."""
    with pytest.raises((TypeError, ValueError), match=said):
        Settings.of(given_settings)


# -- mirror


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 5),
            st.sampled_from([(), (HOST,), (SSD,), (HOST, SSD), (Tier.DEVICE,)]),
        ),
        max_size=40,
    )
)
def test_the_mirror_says_what_all_ranks_hold(
    changes: list[tuple[int, int, tuple[Tier, ...]]],
) -> None:
    """A block counts where every rank can load it, as from the slowest of them."""
    mirror, model = Mirror(3), [{}, {}, {}]
    for rank in range(3):
        assert not mirror.ready
        mirror.hello(hello_of({}, rank=rank, ranks=3))
    names = [bytes([n]) * 32 for n in range(6)]
    for rank, name, tiers in changes:
        space = spec_of(rank, 3).namespace
        others = (b"o" * 32, names[name], (HOST,))
        mirror.changed(rank, CatalogChanges(1, ((space, names[name], tiers), others)))
        model[rank][names[name]] = next((t for t in tiers if t is not Tier.DEVICE), None)
    expected = []
    for name in names:
        found = [each.get(name) for each in model]
        expected.append(None if None in found else SSD if SSD in found else HOST)
    assert mirror.tiers(names) == expected


def test_the_slowest_rank_counts() -> None:
    """Of every link the rank that takes longest is planned with."""
    mirror = Mirror(2)
    mirror.hello(hello_of({}, rank=0, ranks=2, costs=costs_of(0.01, 0.5)))
    mirror.hello(hello_of({}, rank=1, ranks=2, costs=costs_of(0.03, 0.1)))
    costs = mirror.costs
    assert costs.load_seconds(SSD, 1) == pytest.approx(0.5)
    assert costs.compute.seconds(0, BLOCK) == pytest.approx(0.03)


def test_ranks_with_different_weights_are_not_believed() -> None:
    """Until all ranks speak of the same weights nothing is looked up."""
    mirror = Mirror(2)
    mirror.hello(hello_of({}, rank=0, ranks=2))
    mirror.hello(hello_of({}, rank=1, ranks=2, weights="sha256:2"))
    assert not mirror.ready
    assert mirror.hello(hello_of({}, rank=0, ranks=2, weights="sha256:2"))
    assert mirror.ready


# -- holds and saves


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=60))
def test_every_reference_is_given_back_once(deeds: list[tuple[int, int]]) -> None:
    """Whatever is taken, dropped and lent in between, references end where they began."""
    pages, holds, held = FakePages(count=16), Holds(), {}
    holds.bind(pages)
    for number, (deed, at) in enumerate(deeds):
        if deed == 0:
            holds.take("save", number, [at, at + 8])
            held[number] = (at, at + 8)
        elif deed == 1 and held:
            one = sorted(held)[at % len(held)]
            holds.drop("save", one)
            del held[one]
        elif deed == 2:
            with holds.lent():
                assert not any(pages.references.values())
                if held and at % 2:
                    oldest = min(held)
                    holds.drop("save", oldest)
                    del held[oldest]
        expected = [page for mine in held.values() for page in mine]
        assert sorted(pages.references.elements()) == sorted(expected)
        assert holds.any_unshared == any(expected.count(page) == 1 for page in expected)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 1)), max_size=40),
    st.integers(4, 40),
)
def test_saves_hold_their_pages_until_all_ranks_let_go(
    deeds: list[tuple[int, int, int]], count: int
) -> None:
    """No block is on its way twice, too many pages are never held, none is held for ever."""
    pages, holds = FakePages(count=count), Holds()
    holds.bind(pages)
    saves = Saves(holds, 2, dropped=lambda _: None)
    keys = keys_of(tokens_of(1, 6 * BLOCK))
    mine = list(range(12))
    out: dict[int, set[int]] = {}
    started = 0
    for deed, block, rank in deeds:
        if deed == 0:
            at = saves.order_missing(keys, range(block, 6), [None] * (6 - block), mine, 2)
            started += 1
            assert at <= 6
        elif deed == 1:
            for save in saves.take():
                assert not save.keys.pending
                assert save.pages == tuple(mine[2 * save.start : 2 * save.stop])
                out[save.save] = {0, 1}
        elif out:
            number = sorted(out)[block % len(out)]
            out[number].discard(rank)
            saves.released(rank, number)
            if not out[number]:
                del out[number]
                assert saves.released(rank, number) == 0
        several = len(saves._waiting) > 1
        assert not several or holds.pages("save") <= count * SAVE_PAGES_SHARE_MAX
        blocks = [h for hashes in saves._hashes.values() for h in hashes]
        assert len(blocks) == len(set(blocks))
    saves.forget_queued()
    for number, ranks in out.items():
        for rank in sorted(ranks):
            saves.released(rank, number)
    assert not saves
    assert not any(pages.references.values())


# -- steps


def test_a_step_of_decodes_teaches_nothing() -> None:
    """Only steps that are prefill for the most part say what prefill costs."""
    assert learnable([]) is None
    assert learnable([(100, 1)] * 8) is None
    assert learnable([(0, 40), *[(100, 1)] * 40]) is None
    assert learnable([(0, 100), (50, 1)]) == (0, 100)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(16, 600)), min_size=1, max_size=5))
def test_several_chunks_are_as_one_with_their_attention(chunks: list[tuple[int, int]]) -> None:
    """One chunk stands for all: as many tokens, over as many earlier ones."""
    found = learnable(chunks)
    assert found is not None
    start, tokens = found
    assert tokens == sum(n for _, n in chunks)
    attention = sum(n * (s + (n - 1) / 2) for s, n in chunks)
    assert abs(tokens * (start + (tokens - 1) / 2) - attention) <= tokens * max(1, tokens / 2)


def test_a_pipelined_step_begins_when_the_one_before_it_ends() -> None:
    """Two steps scheduled at once take their own time each, not the sum."""
    now = 0.0
    steps = Steps(lambda: now)
    steps.began([(0, 100)], loading=True)
    steps.began([(100, 100)], loading=False)
    now = 1.0
    steps.ended(loading=False)
    now = 3.0
    steps.ended(loading=False)
    steps.ended(loading=False)
    first, second = steps.take()
    assert (first.start, first.tokens, first.seconds, first.overlap) == (0, 100, 1.0, 0.5)
    assert (second.start, second.seconds, second.overlap) == (100, 2.0, 0.0)
    assert steps.take() == ()
    assert steps.cover_s == 4.0


# -- planning


def planned(tokens: list[int], stored: list[int], local: int = 0, **changes: Any) -> Any:
    """Plan a prompt of which these blocks are stored."""
    keys = keys_of(tokens)
    costs = costs_of(load_s=changes.pop("load_s", 1e-6))
    mirror = mirror_of({keys.hashes[block]: SSD for block in stored}, costs)
    return plan_restore(
        FakeRequest("r", tokens),
        keys,
        local,
        limits=limits_of(**changes),
        mirror=mirror,
        busy=changes.pop("busy", 0),
        now=0.0,
        cover_s=0.0,
    )


def test_a_prompt_of_whole_blocks_is_restored_as_a_whole() -> None:
    """The engine computes its last token again, and no more; what is not full is not restored."""
    assert planned(tokens_of(1, 3 * BLOCK), [0, 1, 2]).end == 3 * BLOCK
    assert planned(tokens_of(1, 3 * BLOCK + 1), [0, 1, 2]).end == 3 * BLOCK


def test_what_follows_the_last_stored_block_is_no_part_of_it() -> None:
    """The engine computes the rest by itself, without a cap."""
    assert planned(tokens_of(1, 6 * BLOCK), [0, 2]).end == 3 * BLOCK
    assert planned(tokens_of(1, 6 * BLOCK), []) is None
    assert planned(tokens_of(1, 6 * BLOCK), [0, 1], local=2 * BLOCK) is None


def test_a_block_of_which_pages_are_held_is_computed() -> None:
    """Others may read the pages of a local hit: nothing is loaded over them."""
    restore = planned(tokens_of(1, 6 * BLOCK), [0, 1, 2, 3], local=BLOCK + PAGE)
    assert restore.plan.resident == 1
    assert sorted(restore.plan.load) == [2, 3]
    assert restore.cap == 2 * BLOCK
    assert restore.first_loadable == 2


def test_a_plain_load_needs_a_contiguous_prefix() -> None:
    """Without our scheduler what comes after a hole, or in the midst of a block, is computed."""
    assert planned(tokens_of(1, 6 * BLOCK), [0, 1, 3], hybrid=False).end == 2 * BLOCK
    assert planned(tokens_of(1, 6 * BLOCK), [1, 2], hybrid=False) is None
    assert planned(tokens_of(1, 6 * BLOCK), [0, 1, 2], local=PAGE, hybrid=False) is None
    assert planned(tokens_of(1, 6 * BLOCK), [0, 1], load_s=1.0, hybrid=False) is None


# -- coordinator


class Driver:
    """A coordinator, a pool, and one rank whose answers the test gives."""

    def __init__(self, stored: dict[bytes, Tier] | None = None, **changes: Any) -> None:
        self.now = 0.0
        self.said: list[str] = []
        limits = limits_of(**changes)
        self.tiers = Coordinator(limits, say=self.said.append, clock=lambda: self.now)
        self.pages = FakePages()
        self.tiers.bind(self.pages)
        if limits.hybrid:
            self.tiers.drive(lambda: len(self.pages.free_pages))
        self.tiers.hello(hello_of(stored or {}, costs=costs_of(load_s=1e-6)))
        self.requests: dict[str, FakeRequest] = {}

    def arrive(self, name: str, tokens: list[int], **how: Any) -> FakeRequest:
        """Queue a request."""
        request = self.requests[name] = FakeRequest(name, tokens)
        self.tiers.arrived(request, **how)
        return request

    def admit(self, name: str, local: int = 0) -> tuple[int | None, bool]:
        """Look it up and give it its first pages."""
        found = self.tiers.lookup(name, local)
        if found[0] is not None:
            self.pages.extend(name, local + found[0] + PAGE)
            self.tiers.admitted(name)
        return found

    def compute(self, name: str, tokens: int) -> Any:
        """Schedule and process a step of one request; return its orders."""
        request = self.requests[name]
        self.pages.extend(name, request.num_computed_tokens + tokens)
        orders = self.tiers.orders({name: tokens})
        request.num_computed_tokens += tokens
        self.tiers.step_done()
        return orders

    def finish(self, name: str) -> None:
        """End a request."""
        self.tiers.finished(name)
        self.pages.give_up(name)

    def report(self, **what: Any) -> None:
        """Let the rank report."""
        self.tiers.report(0, RankReport(**what))


def stored(tokens: list[int], tier: Tier = SSD) -> dict[bytes, Tier]:
    """Return where all blocks of a prompt are."""
    return dict.fromkeys(keys_of(tokens).hashes, tier)


def test_prompts_and_answers_are_saved_as_they_are_known() -> None:
    """A full block is ordered with the step that computes it, and no token beyond what is known."""
    driver = Driver()
    tokens = tokens_of(1, 2 * BLOCK + 5)
    request = driver.arrive("a", tokens)
    driver.admit("a")
    (first,) = driver.compute("a", BLOCK).saves
    assert (first.start, first.stop, first.keys.pending) == (0, 1, b"")
    (second,) = driver.compute("a", BLOCK + 5).saves
    assert (second.start, second.stop) == (1, 2)
    # Drafts and placeholders are scheduled beyond the tokens that are known.
    assert driver.compute("a", 11).saves == ()
    request.num_computed_tokens -= 11
    for token in range(11):
        request.all_token_ids.append(token)
    (third,) = driver.compute("a", 11).saves
    assert (third.start, third.stop) == (2, 3)
    assert third.keys.hashes[2] == keys_of(request.all_token_ids).hashes[2]
    driver.finish("a")
    assert driver.tiers.expects_answers
    driver.report(released=(0, 1, 2))
    assert not driver.tiers.expects_answers
    assert not any(driver.pages.references.values())


def test_what_is_left_is_saved_at_the_end() -> None:
    """Tokens that were accepted with the last output complete a block; the next step takes it."""
    driver = Driver()
    request = driver.arrive("a", tokens_of(1, BLOCK - 2))
    driver.admit("a")
    assert driver.compute("a", BLOCK - 2).saves == ()
    request.all_token_ids += [1, 2, 3]  # two drafts accepted, one more sampled
    request.num_computed_tokens += 2
    driver.finish("a")
    (save,) = driver.tiers.orders({}).saves
    assert (save.start, save.stop) == (0, 1)
    assert driver.tiers.frees_pages
    driver.report(released=(0,))
    assert not any(driver.pages.references.values())


def test_a_request_that_is_refused_is_left_alone() -> None:
    """Neither looked up, nor hinted, nor saved."""
    tokens = tokens_of(1, 3 * BLOCK + 1)
    driver = Driver(stored(tokens))
    driver.arrive("a", tokens, refused="it has images")
    assert driver.admit("a") == (0, False)
    orders = driver.compute("a", 3 * BLOCK + 1)
    assert orders.saves == orders.hints == orders.loads == ()


def test_tenants_do_not_hit_each_other() -> None:
    """A salt is another root: what another client stored is a miss."""
    tokens = tokens_of(1, 3 * BLOCK + 1)
    driver = Driver(stored(tokens))
    driver.arrive("a", tokens, tenant="salt")
    assert driver.admit("a") == (0, False)
    driver.arrive("b", tokens, adapter="sha256:lora")
    assert driver.admit("b") == (0, False)
    driver.arrive("c", tokens)
    assert driver.admit("c") == (3 * BLOCK, True)


def test_a_second_request_waits_for_the_first_ones_restore_but_not_for_ever() -> None:
    """It is deferred while its blocks are brought, and plans for itself after the bound."""
    tokens = tokens_of(1, 3 * BLOCK + 1)
    driver = Driver(stored(tokens))
    driver.arrive("a", tokens)
    driver.arrive("b", list(tokens))
    driver.admit("a")
    assert driver.admit("b") == (None, False)
    driver.now = DEFER_S_MAX - 0.1
    assert driver.admit("b") == (None, False)
    driver.now = DEFER_S_MAX + 0.1
    assert driver.admit("b") == (3 * BLOCK, True)
    assert driver.tiers.tally.take()["requests_deferred"] == 1


def test_without_a_prefix_cache_nobody_waits_for_another_ones_blocks() -> None:
    """Where the engine shares no pages, each request loads its own."""
    tokens = tokens_of(1, 3 * BLOCK + 1)
    driver = Driver(stored(tokens), prefix_caching=False)
    for name in "ab":
        driver.arrive(name, list(tokens))
        assert driver.admit(name) == (3 * BLOCK, True)


def test_a_restore_that_finds_no_spare_pages_is_dropped() -> None:
    """Pages that prefills under way count on are not taken: the prompt is computed as usual."""
    tokens = tokens_of(1, 4 * BLOCK + 1)
    driver = Driver({keys_of(tokens).hashes[3]: SSD})
    driver.tiers.drive(lambda: 2)
    driver.arrive("a", tokens)
    assert driver.admit("a") == (0, False)
    assert driver.tiers.cap("a") is None
    assert driver.tiers.orders({"a": 32}).loads == ()


def test_waiting_requests_are_hinted_until_they_are_admitted() -> None:
    """What is on the SSD is promoted meanwhile; what is in host memory already is not hinted."""
    slow, fast = tokens_of(1, 3 * BLOCK + 1), tokens_of(2, 3 * BLOCK + 1)
    driver = Driver({**stored(slow), **stored(fast, HOST)})
    driver.arrive("a", slow)
    driver.arrive("b", fast)
    (hint,) = driver.tiers.orders({}).hints
    assert (len(hint.keys), hint.keys.pending) == (3, b"")
    assert driver.tiers.orders({}).hints == ()
    driver.admit("a")
    assert driver.tiers.orders({}).unhints == (hint.hint,)


def test_hints_are_bounded_and_come_later_instead() -> None:
    """More waiting requests than the bound get theirs when others are taken back."""
    prompts = [tokens_of(seed, BLOCK + 1) for seed in range(HINTS_MAX + 2)]
    driver = Driver({digest: SSD for each in prompts for digest in keys_of(each).hashes})
    for name, tokens in enumerate(prompts):
        driver.arrive(str(name), tokens)
    assert len(driver.tiers.orders({}).hints) == HINTS_MAX
    driver.finish("0")
    orders = driver.tiers.orders({})
    assert (len(orders.hints), len(orders.unhints)) == (1, 1)


def test_nothing_is_looked_up_between_a_reset_and_its_answer() -> None:
    """Until the ranks have said hello anew every lookup misses and nothing is saved."""
    tokens = tokens_of(1, 3 * BLOCK + 1)
    driver = Driver(stored(tokens))
    driver.tiers.reset()
    assert driver.tiers.expects_answers
    driver.arrive("a", tokens)
    assert driver.admit("a") == (0, False)
    orders = driver.compute("a", BLOCK)
    assert (orders.resets, orders.saves) == (1, ())
    driver.report(hello=hello_of({}, resets=1))
    assert not driver.tiers.expects_answers
    (save,) = driver.compute("a", BLOCK).saves
    assert (save.start, save.stop) == (0, 2), "the weights are the same: all of it is good"


def test_what_other_weights_computed_is_not_saved() -> None:
    """A request that outlives a change of weights stores nothing; one that begins anew does."""
    driver = Driver()
    driver.arrive("a", tokens_of(1, 3 * BLOCK + 1))
    driver.admit("a")
    driver.compute("a", 2 * BLOCK)
    driver.tiers.reset()
    driver.report(hello=hello_of({}, resets=1, weights="sha256:2"), released=(0,))
    assert driver.compute("a", BLOCK + 1).saves == ()
    driver.tiers.preempted("a")
    driver.pages.give_up("a")
    driver.requests["a"].num_computed_tokens = 0
    driver.admit("a")
    (save,) = driver.compute("a", BLOCK).saves
    assert save.keys.hashes == keys_of(tokens_of(1, BLOCK), "sha256:2").hashes


def test_nothing_is_saved_while_the_engines_own_cache_may_be_stale() -> None:
    """Other weights without an emptied prefix cache: said once, and off until it is emptied."""
    driver = Driver()
    driver.pages.prefix_cache_empty = False
    driver.tiers.reset()
    driver.report(hello=hello_of({}, resets=1, weights="sha256:2"))
    assert "prefix cache was not emptied" in driver.said[-1]
    driver.arrive("a", tokens_of(1, 2 * BLOCK))
    driver.admit("a")
    assert driver.compute("a", BLOCK).saves == ()
    driver.tiers.cleared()
    assert driver.compute("a", BLOCK).saves != ()


def test_stale_weights_are_answered_with_a_reset() -> None:
    """A rank that finds its weights changed has the cache reset, once."""
    driver = Driver()
    driver.report(stale=True)
    driver.report(stale=True)
    assert driver.tiers.orders({}).resets == 1


def test_the_start_is_said_once() -> None:
    """One line with what is on, where, how large, how the disk is accessed, which namespace."""
    driver = Driver(where="/nvme/kvtier, 5 bytes")
    driver.report(hello=hello_of({}))
    (line,) = driver.said
    for part in ("/nvme/kvtier", "recomputes heads", "direct I/O", spec_of().namespace.hex()[:16]):
        assert part in line


def test_a_plain_load_lets_its_request_go_on_when_it_is_over() -> None:
    """Under any scheduler: received when all is there, and as far as it came if not."""
    tokens = tokens_of(1, 4 * BLOCK + 1)
    driver = Driver(stored(tokens), hybrid=False)
    request = driver.arrive("a", tokens)
    assert driver.admit("a") == (4 * BLOCK, True)
    loads = driver.tiers.orders({}).loads
    assert sorted(load.block for load in loads) == [0, 1, 2, 3]
    driver.report(landed=((0, 0), (0, 1)), failed=((0, 2),))
    assert driver.tiers.received() == []
    assert driver.tiers.orders({}).cancels == ((0, 3),)
    driver.report(failed=((0, 3),))
    assert driver.tiers.received() == ["a"]
    assert request.num_computed_tokens == 2 * BLOCK
    assert driver.tiers.orders({}).ends == (0,)
    driver.report(ended=(0,))
    assert driver.tiers.received() == []


def test_an_aborted_plain_load_gives_its_pages_back_when_it_is_over() -> None:
    """The engine keeps them until it is told, which is when no rank writes any more."""
    tokens = tokens_of(1, 4 * BLOCK + 1)
    driver = Driver(stored(tokens), hybrid=False)
    driver.arrive("a", tokens)
    driver.admit("a")
    driver.tiers.orders({})
    driver.tiers.finished("a")
    assert driver.tiers.received() == []
    driver.report(ended=(0,))
    assert driver.tiers.received() == ["a"]
