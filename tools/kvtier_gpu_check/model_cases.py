"""Part one, kvtier with transformers: the same tokens, and an 8B prompt brought back three ways."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any, Final

import torch

import kvtier
from kvtier import Tier
from kvtier_gpu_check.case import CannotRun, Case, Place
from kvtier_gpu_check.store_cases import GIB, WAIT_S_MAX, wait

__all__ = ["CASES"]

NEEDS: Final = ("torch", "kvtier", "transformers", "accelerate")
GPU_GIB_MIN: Final = 40
"""16 for the weights, 4 for the KV of 32K tokens twice, and what a forward needs."""

SMALL: Final = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "initializer_range": 0.2,  # wide enough that every prompt has an answer of its own
}  # fmt: skip
LARGE: Final = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip
"""The shape of an 8B model."""


def model_of(place: Place, shape: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a Llama with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, max_position_embeddings=1 << 16, eos_token_id=None)
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(place.device):
            model: Any = LlamaForCausalLM(config)
        return model.eval().requires_grad_(requires_grad=False)
    finally:
        torch.set_default_dtype(before)


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    """Return a prompt, [1, tokens]."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (1, tokens), generator=made)


def tokens(place: Place) -> dict[str, Any]:
    """Loaded, recomputed and mixed prompts give the tokens that a fresh one gives, in float32."""
    import kvtier_hf

    model = model_of(place, SMALL, torch.float32)
    asked = prompt(4 * 256 + 40).to(place.device)
    wanted = model.generate(asked, max_new_tokens=24, do_sample=False).tolist()
    counts = {}
    room: dict[str, Any] = {"host_bytes": "256MiB", "ssd_bytes": "1GiB"}
    with kvtier_hf.open(model, place.fresh("tokens"), **room) as kv:
        first: Any = kv.generate(asked, max_new_tokens=24, do_sample=False)
        assert first.tolist() == wanted, "a prompt that is not stored: other tokens"
        assert kv.last_put is not None
        kv.last_put.result(WAIT_S_MAX)
        for way, recomputed in (("load", ()), ("mixed", (0, 1)), ("recompute", (0, 1, 2, 3))):
            plan = plan_of(kv, asked, recomputed)
            cache = kv.prefill(asked, plan=plan)
            with warnings.catch_warnings():
                # Transformers before 5.24 knows only this name, and later ones warn of it.
                warnings.simplefilter("ignore", FutureWarning)
                got = model.generate(
                    asked, past_key_values=cache, max_new_tokens=24, do_sample=False
                )
            assert got.tolist() == wanted, f"{way}: other tokens"
            assert kv.last_report is not None
            counts[f"{way}_loaded"] = kv.last_report.loaded
    return counts


def plan_of(kv: Any, asked: torch.Tensor, recomputed: tuple[int, ...]) -> kvtier.RestorePlan:
    """Return a plan that recomputes just these blocks."""
    plan: kvtier.RestorePlan = kv.plan(asked)
    load = tuple(block for block in range(len(plan.hashes)) if block not in recomputed)
    return replace(plan, recompute=recomputed, load=load, adaptive=False)


def restore_8b(place: Place) -> dict[str, Any]:
    """An 8B prompt of 32K tokens: recomputed, loaded, and both at once over links of its speed."""
    import kvtier_hf

    if not place.small:
        place.need_cuda()
        free = torch.cuda.mem_get_info(place.device)[0] / GIB
        if free < GPU_GIB_MIN:
            raise CannotRun(f"{free:.0f} GiB of GPU memory are free, {GPU_GIB_MIN} are wanted")
    length = (4 if place.small else 128) * 256
    shape = SMALL if place.small else LARGE
    model = model_of(place, shape, torch.bfloat16)
    asked = prompt(length + 32).to(place.device)
    path = place.fresh("restore_8b")
    found: dict[str, Any] = {}
    with kvtier_hf.open(model, path, **_room(model, length)) as kv:
        found["recompute_s"] = min(_fresh_s(kv, place, asked) for _ in range(2))
        kv.put(kv.prefill(asked)).result(WAIT_S_MAX)
        kv.store.flush(WAIT_S_MAX)
        found["host_load_s"] = min(_ttft_s(kv, place, asked, ()) for _ in range(3))
        block_bytes = kv.spec.block_layout.block_bytes
    found["prompt_gib"] = length // 256 * block_bytes / GIB
    equal = length // 256 * block_bytes / found["recompute_s"]
    for name, share in (("equal", 1.0), ("quarter", 4.0)):
        links = {Tier.SSD: kvtier.LinkThrottle(share * equal)}
        with kvtier_hf.open(model, path, links=links, **_room(model, length, host="0")) as kv:
            load_s = _ttft_s(kv, place, asked, ())
            _ttft_s(kv, place, asked, None)  # what the split is learned from
            planned_s = _ttft_s(kv, place, asked, None)
            report = kv.last_report
        assert report is not None
        better = min(load_s, found["recompute_s"])
        found[f"{name}_load_s"], found[f"{name}_planned_s"] = load_s, planned_s
        found[f"{name}_loaded"], found[f"{name}_recomputed"] = report.loaded, report.recomputed
        found[f"{name}_gain"] = better / planned_s
    return found


def _room(model: Any, length: int, host: str = "") -> dict[str, Any]:
    import kvtier_hf

    nbytes = (length // 256 + 8) * kvtier_hf.spec_of(model).block_layout.block_bytes
    # Without room in host memory every load comes over the SSD's link.
    return {"host_bytes": host or 2 * nbytes, "ssd_bytes": 2 * nbytes + GIB}


def _fresh_s(kv: Any, place: Place, asked: torch.Tensor) -> float:
    """Return the time to prefill a prompt by the adapter's own steps, nothing loaded."""
    return _ttft_s(kv, place, asked, tuple(range(asked.shape[1] // 256)))


def _ttft_s(
    kv: Any, place: Place, asked: torch.Tensor, recomputed: tuple[int, ...] | None
) -> float:
    """Return the time to the first token's logits; ``recomputed`` None: by the planner."""
    plan = None if recomputed is None else plan_of(kv, asked, recomputed)
    wait(place)
    begun = time.perf_counter()
    cache = kv.prefill(asked, plan=plan)
    with torch.no_grad():
        kv.model(asked[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)
    wait(place)
    return time.perf_counter() - begun


CASES: Final = (
    Case("tokens", tokens, 25, NEEDS),
    Case("restore_8b", restore_8b, 90, NEEDS, low={"equal_gain": 1.5, "quarter_gain": 0.95}),
)
