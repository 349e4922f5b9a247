"""Part two, kvtier in vLLM: both model runners, and an 8B prompt brought back three ways.

Each engine is a process of its own, in the interpreter that has vLLM. Weights are vLLM's dummies,
which are the same in every engine of one version.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier_gpu_check.case import CannotRun, Case, Place
from kvtier_vllm_run.process import EngineProcess, Served, transfer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CASES"]

BLOCK: Final = 256
GIB: Final = 1 << 30
SMALL: Final = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
LARGE: Final = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip
"""The shape of an 8B model: 128 KiB of KV a token."""
SCHEDULERS: Final = "kvtier_vllm.scheduler.HybridAsyncScheduler"
SPLIT_LINK_S: Final = 4.0
"""How long the small prompt takes to load where it is to be loaded and recomputed at once."""
OTHERS: Final = 8
"""Requests that decode while the measured one comes."""


def model_folder(place: Place, name: str, shape: Mapping[str, Any], dtype: str) -> Path:
    """Write the configuration of a Llama; there are no weights."""
    folder = place.fresh(name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **shape,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def prompt(tokens: int, seed: int = 1) -> list[int]:
    """Return token ids that share no block with those of another seed."""
    return [3 + (seed * 7919 + i * 31 + i * i // 7) % 500 for i in range(tokens)]


def engine(
    place: Place, log: str, arguments: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> EngineProcess:
    """Start an engine with dummy weights."""
    if not _has_vllm(place.python):
        raise CannotRun(f"{place.python or 'this Python'} has no vllm: name one with --python")
    given = {"load_format": "dummy", "enforce_eager": True, **arguments}
    return EngineProcess(place.python, given, log=place.folder / f"{log}.log", env=env or {})


def _has_vllm(python: str) -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", look], check=False, timeout=60).returncode == 0  # noqa: S603 - the chosen Python
    except OSError:
        return False


def one(ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Return a request."""
    return {"ids": ids, "max_tokens": max_tokens}


def equality(runner: str, place: Place) -> dict[str, Any]:
    """What was loaded, and loaded and recomputed at once, gives a fresh prompt's tokens."""
    model = model_folder(place, f"model_{runner}", SMALL, "float32")
    path, env = place.folder / f"equality_{runner}", {"VLLM_USE_V2_MODEL_RUNNER": runner}
    arguments = {
        "model": str(model), "dtype": "float32", "max_model_len": 4096,
        "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 512,
        "scheduler_cls": SCHEDULERS,
    }  # fmt: skip
    asked = [one(prompt(6 * BLOCK + 40, seed), 24) for seed in (1, 2)]
    room = {"host_bytes": "1GiB", "ssd_bytes": "4GiB"}
    started: dict[str, Any] = {}

    def answers(log: str, settings: Mapping[str, Any]) -> tuple[list[Served], dict[str, float]]:
        given = {**arguments, "kv_transfer_config": transfer(path, **{**room, **settings})}
        with engine(place, f"{runner}-{log}", given, env) as running:
            started.update(running.started)
            served = [running.serve([each])[0] for each in asked]
            leaked = running.leaked()
            assert leaked == 0, f"{log}: {leaked} of the engine's blocks leaked"
            return served, running.counts()

    block_bytes = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"]
    block_bytes *= SMALL["head_dim"] * BLOCK * 4
    slow = {"ssd": {"bytes_per_s": 6 * block_bytes / SPLIT_LINK_S}}
    fresh, _ = answers("fresh", {})
    found: dict[str, Any] = {}
    for way, settings in (
        ("load", {"hybrid": False}),
        ("hybrid", {"host_bytes": 0, "links": slow}),
    ):
        served, counts = answers(way, settings)
        for wanted, got in zip(fresh, served, strict=True):
            assert got.tokens == wanted.tokens, f"{way}: other tokens than a fresh prompt's"
        found[f"{way}_loaded"] = loaded(counts)
        found[f"{way}_recomputed"] = counts.get('restored_blocks{by="recomputed"}', 0)
    assert found["load_loaded"] > 0, "nothing was loaded"
    assert found["hybrid_recomputed"] > 0, "nothing was recomputed while the rest loaded"
    return {**found, **{name: started[name] for name in ("vllm", "scheduler", "async_scheduling")}}


def loaded(counts: Mapping[str, float]) -> float:
    """Return how many blocks restores loaded."""
    return counts.get('restored_blocks{by="loaded"}', 0)


def restore_8b(place: Place) -> dict[str, Any]:
    """An 8B prompt of 32K tokens: recomputed, loaded, and both at once; and others' stutter."""
    blocks = 4 if place.small else 128
    shape, dtype = (SMALL, "float32") if place.small else (LARGE, "bfloat16")
    model = model_folder(place, "model_8b", shape, dtype)
    path, ids = place.folder / "restore_8b", prompt(blocks * BLOCK + 32)
    block_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"]
    block_bytes *= shape["head_dim"] * BLOCK * (4 if place.small else 2)
    room = {"host_bytes": 2 * blocks * block_bytes + GIB, "ssd_bytes": 4 * blocks * block_bytes}
    arguments = {
        "model": str(model), "dtype": dtype, "max_model_len": (blocks + 4) * BLOCK,
        "gpu_memory_utilization": 0.3 if place.small else 0.85, "max_num_batched_tokens": 2048,
        "scheduler_cls": SCHEDULERS,
    }  # fmt: skip
    others = [
        one(prompt(40, seed), 4000 if not place.small else 400) for seed in range(9, 9 + OTHERS)
    ]
    found: dict[str, Any] = {}

    def start(log: str, **settings: Any) -> EngineProcess:
        config = transfer(path, **{**room, **settings})
        return engine(place, f"8b-{log}", {**arguments, "kv_transfer_config": config})

    def ttft(running: EngineProcess) -> float:
        running.forget()
        return running.serve([one(ids, 1)])[0].ttft_s

    with start("first") as running:
        running.serve([one(prompt(2 * BLOCK, 99), 1)])
        found["recompute_s"] = ttft(running)
        fresh = running.serve([one(prompt(blocks * BLOCK + 32, 2), 1)])[0].ttft_s
        found["recompute_s"] = min(found["recompute_s"], fresh)
        found["host_s"] = min(ttft(running) for _ in range(3))
        plain = running.meanwhile(others, one(prompt(blocks * BLOCK + 32, 3), 1))[1]
        assert running.leaked() == 0, "blocks leaked"
    equal = blocks * block_bytes / found["recompute_s"]
    slow = {"host_bytes": 0, "links": {"ssd": {"bytes_per_s": equal}}}
    with start("load", hybrid=False, **slow) as running:
        found["load_s"] = ttft(running)
    with start("hybrid", compute_price_per_request=0.0, **slow) as running:
        ttft(running)  # what the split is learned from
        found["hybrid_s"] = min(ttft(running) for _ in range(2))
        running.forget()
        beside = running.meanwhile(others, one(ids, 1))[1]
        assert running.leaked() == 0, "blocks leaked"
        found["loaded"] = loaded(running.counts())
    found["gain"] = min(found["recompute_s"], found["load_s"]) / found["hybrid_s"]
    found["prefill_itl_p99_s"], found["hybrid_itl_p99_s"] = p99(plain), p99(beside)
    found["itl_p99_ratio"] = found["hybrid_itl_p99_s"] / found["prefill_itl_p99_s"]
    found["itl_kept"] = 1 / found["itl_p99_ratio"]
    return found


def p99(others: list[Served]) -> float:
    """Return the 99th percentile of the times between the others' tokens."""
    gaps = sorted(gap for each in others for gap in (*each.times_s[:1], *each.gaps_s))
    return gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))]


NEEDS: Final = ("kvtier",)
CASES: Final = (
    Case("vllm_equality_v2", partial(equality, "1"), 90, NEEDS),
    Case("vllm_equality_v1", partial(equality, "0"), 90, NEEDS),
    Case("vllm_restore_8b", restore_8b, 150, NEEDS, low={"gain": 1.5, "itl_kept": 0.95}),
)
