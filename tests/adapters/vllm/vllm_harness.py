"""A vLLM engine in this process, made for looking inside.

A block is 256 tokens and the engine's own blocks are 32, so one of ours is eight of its. One step
computes at most 256 tokens, so that a prompt's head is one or more steps and a restore can meet its
loads in between.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK = 256
STEPS_MAX = 20_000
"""Engine steps that anything here may take: nothing waits for ever."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Ranks would compile a function of their embedding in C++, each for itself, which takes minutes
    # and fails in a folder whose path has a space.
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads collapse beside anything else that runs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

PROMPTS = [(seed, length) for seed in range(1, 5) for length in (1300, 1000, 768)]
"""(seed, tokens) of the prompts whose answers the fixture ``expected`` knows."""


def prepare() -> None:
    """Set what vLLM reads when it is imported."""
    os.environ.update(ENVIRONMENT)


def smollm2() -> str:
    """Name the folder of the real model."""
    from kvtier_demo.model import smollm2 as folder

    return str(folder())


def tiny_model(folder: Path, **changes: Any) -> Path:
    """Write a small Llama with random weights and no tokenizer; three ranks can share it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 576,
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,  # wide enough that every prompt has an answer of its own
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).save_pretrained(folder)
    return folder


def transfer(path: Path | str, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Return the transfer configuration that the README shows, for a small store at path."""
    usual = {"path": str(path), "host_bytes": "512MiB", "ssd_bytes": "2GiB"}
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**usual, **extra},
    }


def prompt(seed: int, tokens: int) -> list[int]:
    """Return token ids that share no block with those of another seed."""
    return [3 + (seed * 7919 + i * 31 + i * i // 7) % 500 for i in range(tokens)]


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    tokens: tuple[int, ...]
    prompt: int
    cached: int
    """Prompt tokens that were not computed, from wherever they came."""


class Engine:
    """An LLM in this process: what tests ask of it and of what lies behind."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._next = 0

    @property
    def core(self) -> Any:
        """The engine core, which vLLM runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler, ours or vLLM's."""
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side."""
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The worker's side: of this process, hence of the only rank."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def add(
        self, tokens: Sequence[int], *, answer: int = 4, salt: str | None = None, lora: Any = None
    ) -> str:
        """Queue a request; return its name."""
        from vllm import SamplingParams, TokensPrompt

        self._next += 1
        name = f"request-{self._next}"
        given = TokensPrompt(prompt_token_ids=list(tokens))
        if salt is not None:
            given["cache_salt"] = salt
        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(name, given, sampling, lora_request=lora)
        return name

    def step(self) -> dict[str, Answer]:
        """Take one step; return the answers that it finished."""
        return {
            out.request_id: Answer(
                tuple(out.outputs[0].token_ids),
                len(out.prompt_token_ids),
                out.num_cached_tokens or 0,
            )
            for out in self.llm.llm_engine.step()
            if out.finished
        }

    def abort(self, name: str) -> None:
        """Abort a request, as a client that hangs up does."""
        self.llm.llm_engine.abort_request([name])

    def finish(self) -> dict[str, Answer]:
        """Step until no request is left, and until nothing of the store is under way."""
        done: dict[str, Answer] = {}
        for _ in range(STEPS_MAX):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            done.update(self.step())
        else:
            raise AssertionError(f"requests unfinished after {STEPS_MAX} steps")
        self.settle()
        return done

    def run(self, *prompts: Sequence[int], **how: Any) -> list[Answer]:
        """Answer prompts, all at once; how: see ``add``."""
        names = [self.add(tokens, **how) for tokens in prompts]
        done = self.finish()
        return [done[name] for name in names]

    def settle(self) -> None:
        """Step without requests until no batch is in flight and the connector is idle."""
        for _ in range(STEPS_MAX):
            busy = self.connector is not None and self.connector.has_pending_push_work()
            if not busy and not self.core.batch_queue:
                return
            self.llm.llm_engine.step()
        raise AssertionError(f"the connector is still busy after {STEPS_MAX} steps")

    def forget(self, *, store_too: bool = False) -> None:
        """Empty the engine's own prefix cache: what comes back then comes from the store.

        With store_too it is the reset of vLLM's API that reaches the connector as well.
        """
        self.assert_pool_free()
        assert self.llm.llm_engine.reset_prefix_cache(reset_connector=store_too)

    def assert_pool_free(self) -> None:
        """Hold that every block of the engine's pool is free (one is vLLM's own null block)."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}
        held.pop(pool.null_block.block_id, None)
        assert not held
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def _quiet_llvm() -> None:
    """Let an engine start after one with drafts did.

    A start looks through the attributes of every module, and falls over the library object of
    llvmlite, which invents any attribute that it is asked for; drafts are made with it.
    """
    loaded = sys.modules.get("llvmlite.binding.ffi")
    if loaded is not None:
        loaded.lib._fntab["__dict__"] = {}


@contextlib.contextmanager
def engine(
    model: Path | str, kv: dict[str, Any] | None = None, *, scheduler: str | None = None, **own: Any
) -> Iterator[Engine]:
    """Start an engine; without kv it is stock vLLM. It is taken down on the way out."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    assert not has_kv_transfer_group(), "a process has one connector: another engine is running"
    usual = {
        "dtype": "float32",
        "max_model_len": 4096,
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": BLOCK,
        "num_gpu_blocks_override": 512,  # 16,384 tokens: less memory to clear at each start
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if kv is not None:
        usual["kv_transfer_config"] = KVTransferConfig(**kv)
        if scheduler is not None:
            usual["scheduler_cls"] = scheduler
    _quiet_llvm()
    llm = LLM(model=str(model), **{**usual, **own})
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def scatter(
    source: Path | str, target: Path | str, tokens: Sequence[int], blocks: Sequence[int]
) -> None:
    """Copy some blocks of a prompt from one closed store of one rank into another."""
    import kvtier

    folder = Path(source, "rank-0-of-1")
    (file,) = folder.glob("specs/*.msgpack")
    spec = kvtier.KVSpec.from_bytes(file.read_bytes())
    slots = kvtier.TensorSlots.empty(spec, blocks=len(tokens) // BLOCK)
    with kvtier.open_reader(folder, spec) as reader:
        keys = reader.keys(tokens)
        plan = reader.plan(reader.lookup(keys), compute_price=1e9)  # load all
        with reader.restore(plan, into=slots) as session:
            assert session.next_step(timeout=30) is None, "a block is missing in the source"
    with kvtier.open(Path(target, "rank-0-of-1"), spec, host_bytes=0, ssd_bytes="2GiB") as store:
        for block in blocks:
            store.put(keys, source=slots, blocks=range(block, block + 1)).result(timeout=30)


def equal_link(path: Path | str, *, ranks: int = 1) -> dict[str, float]:
    """Return a link over which a block loads as long as it took the engine to compute.

    The store in path is closed; the engine that filled it taught it the cost.
    """
    import kvtier

    folder = Path(path, f"rank-0-of-{ranks}")
    (file,) = folder.glob("specs/*.msgpack")
    spec = kvtier.KVSpec.from_bytes(file.read_bytes())
    with kvtier.open_reader(folder, spec) as reader:
        compute_s = reader.costs.compute.seconds(0, BLOCK)
    return {"bytes_per_s": spec.block_layout.block_bytes / compute_s, "latency_s": 0.0}


def damage(path: Path | str, tokens: Sequence[int], block: int) -> None:
    """Change one byte in a block of a prompt in a closed store of one rank."""
    import kvtier

    folder = Path(path, "rank-0-of-1")
    (file,) = folder.glob("specs/*.msgpack")
    spec = kvtier.KVSpec.from_bytes(file.read_bytes())
    block_hash = kvtier.BlockKeys.of(spec, tokens).hashes[block]
    hit = 0
    for segment in folder.glob("segments/*.seg"):
        content = bytearray(segment.read_bytes())
        if (record := content.find(block_hash)) >= 0:
            content[record + 8192] ^= 1  # past the header: among the payload's bytes
            segment.write_bytes(content)
            hit += 1
    assert hit == 1


def stored(path: Path | str, tokens: Sequence[int], *, ranks: int = 1, **root: Any) -> list[int]:
    """Return which blocks of a prompt are on the SSD of every rank, whoever may be writing."""
    import kvtier

    held: set[int] | None = None
    for rank in range(ranks):
        folder = Path(path, f"rank-{rank}-of-{ranks}")
        on_rank: set[int] = set()
        for file in sorted(folder.glob("specs/*.msgpack")):
            spec = kvtier.KVSpec.from_bytes(file.read_bytes())
            with kvtier.open_reader(folder, spec) as reader:
                residency = reader.lookup(reader.keys(tokens, **root))
                on_rank |= {i for i, tier in enumerate(residency.tiers) if tier is not None}
        held = on_rank if held is None else held & on_rank
    return sorted(held or ())
