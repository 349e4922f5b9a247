"""vLLM's real scheduler under ours, with ranks whose pages hold what they should hold, by name.

A token's entry in a page is a digest of all tokens up to it. Computing needs every earlier entry to
be right and writes its own; a load writes what is stored; so a page that was reused too early, read
too early or never filled is an error at once, without any model.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import kvtier
from kvtier import CatalogChanges, CostModel, KVSpec, Tier
from kvtier.cost import ComputeCost, LinkCost
from kvtier_vllm import connector as connector_module
from kvtier_vllm import scheduler as scheduler_module
from kvtier_vllm.connector import StepReports, StoreHello
from kvtier_vllm.messages import Hello, RankReport

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from kvtier_vllm.messages import Load, Orders, Save

PAGE = 8
BLOCK = 16
VOCAB = 50

hash_fn = get_hash_fn_by_name("sha256")
init_none_hash(hash_fn)


def entries(tokens: list[int], start: int = 0, before: bytes = b"") -> list[bytes]:
    """Return the digest of every position's prefix, from ``start`` on."""
    digest, found = before, []
    for token in tokens[start:]:
        digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()
        found.append(digest)
    return found


def answer_to(tokens: list[int]) -> int:
    """Return the token that follows, of a model that depends on every token before."""
    return entries(tokens)[-1][0] % VOCAB


@dataclass
class Rank:
    """One rank's pages, store and transfers; the test says when what moves."""

    rank: int
    spec: KVSpec
    pool: Any
    costs: CostModel
    pages: dict[int, list[bytes | None]] = field(default_factory=dict)
    stored: dict[bytes, tuple[list[bytes], Tier]] = field(default_factory=dict)
    loads: dict[tuple[int, int], Load] = field(default_factory=dict)
    puts: dict[int, tuple[Save, list[bytes | None]]] = field(default_factory=dict)
    ending: list[int] = field(default_factory=list)
    done: RankReport = field(default_factory=RankReport)
    moved: dict[bytes, tuple[Tier, ...]] = field(default_factory=dict)
    sequence: int = 0
    resets: int = 0
    hello_due: bool = False
    hints: set[int] = field(default_factory=set)
    loaded_blocks: int = 0

    def page(self, number: int) -> list[bytes | None]:
        """Return what a page holds."""
        return self.pages.setdefault(number, [None] * PAGE)

    def hello(self) -> Hello:
        everything = tuple(
            (self.spec.namespace, digest, (tier,)) for digest, (_, tier) in self.stored.items()
        )
        self.moved.clear()
        return Hello(
            self.rank,
            self.spec.to_bytes(),
            self.spec.block_layout.block_bytes,
            CatalogChanges(self.sequence, everything, complete=True),
            self.costs,
            self.resets,
        )

    def take(self, orders: Orders) -> None:
        """Do what a worker does before its forward."""
        if orders.resets > self.resets:
            self.resets = orders.resets
            self.stored.clear()
            for key in list(self.loads):
                self.answer(key, landed=False)
            for number in list(self.puts):
                self.release(number, keep=False)
            self.hello_due = True
        for load in orders.loads:
            key = (load.restore, load.block)
            assert key not in self.loads
            assert len(load.pages) == BLOCK // PAGE
            self.loads[key] = load
        for key in orders.cancels:
            if key in self.loads:
                self.answer(key, landed=False)
        for hint in orders.hints:
            assert hint.hint not in self.hints
            assert not hint.keys.pending, "tokens must not travel"
            self.hints.add(hint.hint)
        for number in orders.unhints:
            self.hints.remove(number)
        self.ending += orders.ends

    def after_forward(self, orders: Orders) -> None:
        """Do what a worker does once the step is computed."""
        for save in orders.saves:
            held = [entry for number in save.pages for entry in self.page(number)]
            self.puts[save.save] = (save, held)

    def answer(self, key: tuple[int, int], *, landed: bool) -> None:
        """Land a load or fail it; what does not land may have written anything."""
        load = self.loads.pop(key)
        content = self.stored.get(load.hash)
        for index, number in enumerate(load.pages):
            assert self.pool.blocks[number].ref_cnt > 0, "a load writes into a free page"
            fresh: list[bytes | None] = [b"junk"] * PAGE
            if landed and content is not None:
                fresh = list(content[0][index * PAGE : (index + 1) * PAGE])
            self.pages[number] = fresh
        if landed and content is not None:
            self.loaded_blocks += 1
            self.done = _with(self.done, landed=(*self.done.landed, key))
        else:
            self.done = _with(self.done, failed=(*self.done.failed, key))

    def release(self, number: int, *, keep: bool = True) -> None:
        """Be done with a save: its pages must still hold what they held."""
        save, held = self.puts.pop(number)
        now = [entry for page in save.pages for entry in self.page(page)]
        assert now == held, "a page was reused while it was being saved"
        for page in save.pages:
            assert self.pool.blocks[page].ref_cnt > 0
        if keep:
            for block in range(save.start, save.stop):
                at = (block - save.start) * BLOCK
                content = held[at : at + BLOCK]
                assert None not in content
                assert b"junk" not in content, "what was never computed was saved"
                self.store(save.keys.hashes[block], content, Tier.HOST)
        self.done = _with(self.done, released=(*self.done.released, number))

    def store(self, digest: bytes, content: list[Any], tier: Tier) -> None:
        """Have a block."""
        self.stored[digest] = (content, tier)
        self.moved[digest] = (tier,)

    def lose(self, digest: bytes) -> None:
        """Evict a block."""
        del self.stored[digest]
        self.moved[digest] = ()

    def report(self) -> RankReport | None:
        """Return what a worker reports after a step."""
        busy = {restore for restore, _ in self.loads}
        ended = tuple(number for number in self.ending if number not in busy)
        self.ending = [number for number in self.ending if number in busy]
        changes = None
        if self.moved:
            self.sequence += 1
            changes = CatalogChanges(
                self.sequence,
                tuple((self.spec.namespace, d, tiers) for d, tiers in self.moved.items()),
            )
            self.moved = {}
        hello = None
        if self.hello_due:
            self.hello_due, hello, changes = False, self.hello(), None
        report = _with(self.done, ended=ended, changes=changes, hello=hello)
        self.done = RankReport()
        return None if report == RankReport() else report


def _with(report: RankReport, **changes: Any) -> RankReport:
    return dataclasses.replace(report, **changes)


@dataclass
class Seat:
    """What a model runner remembers of a request."""

    tokens: list[int]
    pages: list[int]
    computed: int


class Rig:
    """A scheduler, its ranks, and the steps between them; ``now`` is the only clock."""

    def __init__(
        self,
        model: Path,
        *,
        ranks: int = 1,
        ahead: bool = False,
        pages: int = 64,
        step_tokens: int = 32,
        plain: bool = False,
        compute_s: float = 0.01,
        load_s: float = 0.01,
        price: float = 0.0,
        caching: bool = True,
    ) -> None:
        self.now = 100.0
        self.ahead = ahead
        self.plain = plain
        name = "HybridAsyncScheduler" if ahead else "HybridScheduler"
        scheduling = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=ahead,
            scheduler_cls=None if plain else f"kvtier_vllm.scheduler.{name}",
        )
        cache = CacheConfig(
            block_size=PAGE, gpu_memory_utilization=0.5, enable_prefix_caching=caching
        )
        cache.num_gpu_blocks = pages
        transfer = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier_vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": "/nowhere", "compute_price_per_request": price},
        )
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), dtype="float32", max_model_len=1024, skip_tokenizer_init=True
            ),
            cache_config=cache,
            scheduler_config=scheduling,
            kv_transfer_config=transfer,
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.block_size = PAGE
        config.scheduler_config.async_scheduling = ahead
        config.parallel_config.world_size = ranks
        layout = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=4, dtype="float32")
        kv = KVCacheConfig(
            num_blocks=pages,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layout)],
        )
        kind = config.scheduler_config.get_scheduler_cls()
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.coordinator = self.connector.coordinator
        self.coordinator._clock = lambda: self.now
        self.coordinator._steps._clock = lambda: self.now
        self.pool = self.scheduler.kv_cache_manager.block_pool
        costs = CostModel(
            ComputeCost(token_s=compute_s / BLOCK, samples=9),
            LinkCost(1e12, load_s, 9),
            LinkCost(1e12, load_s, 9),
        )
        specs = [
            KVSpec(
                model="rig",
                weights="sha256:1",
                dtype="float32",
                layers=1,
                kv_heads=1,
                head_dim=4,
                block_tokens=BLOCK,
                tp_rank=rank,
                tp_size=ranks,
            )
            for rank in range(ranks)
        ]
        self.ranks = [Rank(each.tp_rank, each, self.pool, costs) for each in specs]
        self.connector.set_xfer_handshake_metadata(
            {rank.rank: StoreHello(rank.hello()) for rank in self.ranks}
        )
        self.seats: dict[str, Seat] = {}
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.out: list[tuple[Any, ModelRunnerOutput]] = []
        self.computed_tokens = 0
        self._names = 0

    # -- what tests do

    def add(self, tokens: list[int], answer: int = 4, salt: str | None = None) -> str:
        """Queue a request; return its name."""
        self._names += 1
        name = f"r{self._names}"
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
        sampling.update_from_generation_config({}, None)
        request = Request(
            name,
            list(tokens),
            sampling,
            None,
            block_hasher=get_request_block_hasher(PAGE, hash_fn),
            cache_salt=salt,
        )
        self.prompts[name] = list(tokens)
        self.answers[name] = []
        self.scheduler.add_request(request)
        return name

    def keys(self, tokens: list[int]) -> kvtier.BlockKeys:
        """Return the keys of a prompt."""
        return kvtier.BlockKeys.of(self.ranks[0].spec, tokens)

    def put(self, tokens: list[int], blocks: Any, tier: Tier = Tier.SSD) -> None:
        """Have blocks of a prompt stored on all ranks, and known to the scheduler."""
        content, keys = entries(tokens), self.keys(tokens)
        for rank in self.ranks:
            for block in blocks:
                part = content[block * BLOCK : (block + 1) * BLOCK]
                rank.store(keys.hashes[block], part, tier)
            report = rank.report()
            if report is not None:
                self.coordinator.report(rank.rank, report)

    def step(self, seconds: float = 0.01) -> int:
        """Schedule and run a step; with ``ahead``, the one before it is processed afterwards."""
        if not self.scheduler.has_requests() and not self.out:
            return 0
        scheduled = 0
        if self.scheduler.has_requests():
            so = self.scheduler.schedule()
            scheduled = so.total_num_scheduled_tokens
            self.out.append((so, self._execute(so)))
        self.now += seconds
        if len(self.out) > (1 if self.ahead and self.scheduler.has_requests() else 0):
            self._process()
        return scheduled

    def drain(self) -> None:
        """Process the steps that are out."""
        while self.out:
            self._process()

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished.add(name)

    def change_weights(self, weights: str) -> None:
        """Load other weights: what a rank stores from its next reset on is under their name."""
        for rank in self.ranks:
            rank.spec = dataclasses.replace(rank.spec, weights=weights)

    def land(self, chance: random.Random | None = None, fail: float = 0.0) -> None:
        """Let loads and saves make progress: all of them, or some by chance."""
        for rank in self.ranks:
            for key in list(rank.loads):
                if chance is None or chance.random() < 0.5:
                    rank.answer(key, landed=chance is None or chance.random() >= fail)
            for number in list(rank.puts):
                if chance is None or chance.random() < 0.5:
                    rank.release(number, keep=chance is None or chance.random() >= fail)

    def run(self, steps_max: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests() and not self.out:
                break
            self.step()
            self.land()
        else:
            raise AssertionError(f"not over after {steps_max} steps")

    def check(self) -> None:
        """Hold that every answer is right and every page is free."""
        for name, given in self.answers.items():
            tokens = list(self.prompts[name])
            for token in given:
                assert token == answer_to(tokens), f"{name}: a wrong token"
                tokens.append(token)
        assert not self.scheduler.requests
        held = [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        assert not held, f"pages {held} are not given back"
        assert not self.coordinator._holds._held
        assert not self.coordinator._restores
        assert not any(rank.loads or rank.puts for rank in self.ranks)

    def tokens_of(self, name: str) -> list[int]:
        """Return a prompt and its answer."""
        return self.prompts[name] + self.answers[name]

    # -- the ranks' side of a step

    def _execute(self, so: Any) -> ModelRunnerOutput:
        orders = so.kv_connector_metadata.orders
        for rank in self.ranks:
            rank.take(orders)
        self._seat(so)
        loading = {
            page for rank in self.ranks for load in rank.loads.values() for page in load.pages
        }
        sampled: dict[str, list[int]] = {}
        for name, count in so.num_scheduled_tokens.items():
            seat = self.seats[name]
            stop = seat.computed + count
            assert stop <= len(seat.tokens), "tokens that nobody knows are computed"
            wanted = entries(seat.tokens[:stop])
            for rank in self.ranks:
                for at in range(stop):
                    page = seat.pages[at // PAGE]
                    if at >= seat.computed:
                        assert page not in loading, "computed over a load"
                        assert self.pool.blocks[page].ref_cnt > 0
                        rank.page(page)[at % PAGE] = wanted[at]
                    else:
                        got = rank.page(page)[at % PAGE]
                        assert got == wanted[at], f"{name}: token {at} is not in place"
            self.computed_tokens += count
            seat.computed = stop
            sampled[name] = []
            if stop == len(seat.tokens):
                token = answer_to(seat.tokens)
                seat.tokens.append(token)
                sampled[name] = [token]
        for rank in self.ranks:
            rank.after_forward(orders)
        names = list(so.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
        )

    def _seat(self, so: Any) -> None:
        """Keep a runner's books as Model Runner V2 does: a position is told once, then counted."""
        for name in {*so.finished_req_ids, *(so.preempted_req_ids or ())}:
            self.seats.pop(name, None)
        for new in so.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            tokens = list(new.prompt_token_ids)
            tokens += self.answers[new.req_id] if request.num_preemptions else []
            self.seats[new.req_id] = Seat(tokens, list(new.block_ids[0]), new.num_computed_tokens)
        cached = so.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            pages = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                assert name not in self.seats
                known = cached.all_token_ids.get(name)
                assert known is not None, "a resumed request comes without its tokens"
                self.seats[name] = Seat(list(known), [], 0)
                self.seats[name].computed = cached.num_computed_tokens[i]
            seat = self.seats[name]
            assert seat.computed == cached.num_computed_tokens[i], "a jump in place"
            seat.pages += [] if pages is None else list(pages[0])
        for name in so.num_scheduled_tokens:
            held = [b.block_id for b in self.scheduler.kv_cache_manager.get_blocks(name).blocks[0]]
            assert self.seats[name].pages == held[: len(self.seats[name].pages)]

    def _process(self) -> None:
        so, output = self.out.pop(0)
        reports = {rank.rank: rank.report() for rank in self.ranks}
        told = {rank: report for rank, report in reports.items() if report is not None}
        if told:
            output.kv_connector_output = KVConnectorOutput(
                kv_connector_worker_meta=StepReports(told)
            )
        for outputs in self.scheduler.update_from_output(so, output).values():
            for each in outputs.outputs:
                if each.request_id not in self.finished:
                    self.answers[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finished.add(each.request_id)


__all__ = ["BLOCK", "PAGE", "Rig", "connector_module", "entries", "scheduler_module"]
