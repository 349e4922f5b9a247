from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier.profiles import (
    DEVICES,
    LINKS,
    MODELS,
    Link,
    activation_split,
    at_distance,
    block_bytes,
    cost_model,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.profiles import Device, ModelShape

A100, H100 = DEVICES["A100"], DEVICES["H100"]
SSD, PCIE = LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]


# -- the tables


@pytest.mark.parametrize("table", [DEVICES, LINKS, MODELS], ids=["devices", "links", "models"])
def test_tables_are_keyed_by_name_and_cannot_be_changed(table: Mapping[str, Link]) -> None:
    """Every profile is found under its own name, and a table is read-only."""
    assert all(name == profile.name for name, profile in table.items())
    with pytest.raises(TypeError):
        table["other"] = LINKS["NIC 10G"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "feed_forward"),
    [
        ("Llama-2-7B", 11008), ("Llama-2-13B", 13824), ("Llama-3-8B", 14336),
        ("Mistral-7B", 14336), ("Llama-3-70B", 28672), ("Qwen2.5-7B", 18944),
    ],
)  # fmt: skip
def test_parameters_follow_from_the_configuration(name: str, feed_forward: int) -> None:
    """Q, K, V, O and a gated feed-forward per layer give the parameters, to 0.1 %."""
    m = MODELS[name]
    attention = 2 * m.hidden * m.head_dim * (m.heads + m.kv_heads)
    whole = m.layers * (attention + 3 * m.hidden * feed_forward)
    assert m.linear_params == pytest.approx(whole, rel=1e-3)


def test_parameters_of_a_mixture_of_experts() -> None:
    """DeepSeek-V3 multiplies each token with 9 of 257 experts and reads all of them per step."""
    m = MODELS["DeepSeek-V3"]
    q = m.hidden * 1536 + 1536 * m.heads * m.head_dim
    kv = m.hidden * m.latent + 512 * m.heads * (128 + m.v_head_dim)
    attention = m.layers * (q + kv + m.heads * m.v_head_dim * m.hidden)
    dense = attention + 3 * 3 * m.hidden * 18432 + 58 * m.hidden * 256
    expert = 58 * 3 * m.hidden * 2048
    assert m.linear_params == pytest.approx(dense + 9 * expert, rel=1e-3)
    assert m.step_bytes == pytest.approx(dense + 257 * expert, rel=1e-3)


# -- bytes


@pytest.mark.parametrize(
    ("name", "kib"),
    [("Llama-3-8B", 128), ("Qwen2.5-7B", 56), ("Llama-3-70B", 320), ("Llama-2-7B", 512)],
)
def test_kv_bytes(name: str, kib: int) -> None:
    """Keys and values of all layers in bf16; a block is 256 tokens of them."""
    assert MODELS[name].kv_token_bytes == kib * 1024
    assert block_bytes(MODELS[name]) == 256 * kib * 1024


def test_latent_attention_keeps_one_latent_per_token() -> None:
    """DeepSeek-V3 keeps 576 values per layer and token, 69 KiB per token: less than 8B with GQA."""
    assert MODELS["DeepSeek-V3"].kv_token_bytes == 61 * 576 * 2
    assert MODELS["DeepSeek-V3"].kv_token_bytes < MODELS["Llama-3-8B"].kv_token_bytes


def test_compressed_blocks_have_fewer_bytes() -> None:
    """8 bits per value halve a bf16 block, 3 bits make 3/16 of it; a part of a byte counts."""
    m = MODELS["Llama-2-13B"]
    assert block_bytes(m, kv_bits=8) == block_bytes(m) // 2
    assert block_bytes(m, kv_bits=3) == block_bytes(m) * 3 // 16
    assert block_bytes(replace(m, layers=1, kv_heads=1, head_dim=1), 3, 3) == 3


# -- costs


@pytest.mark.parametrize(
    ("model", "device", "head_us", "double_k", "even_gb"),
    [
        ("Llama-3-8B", "H100", 28.2, 18, 4.6), ("Llama-3-8B", "A100", 74.6, 17, 1.8),
        ("Qwen2.5-7B", "H100", 26.4, 22, 2.2), ("Qwen2.5-7B", "A100", 69.8, 21, 0.8),
        ("Llama-3-70B", "H100 x8", 40.7, 36, 8.0), ("Llama-3-70B", "A100 x8", 107.5, 34, 3.0),
    ],
)  # fmt: skip
def test_recompute_costs(
    model: str, device: str, head_us: float, double_k: int, even_gb: float
) -> None:
    """Per token: the head's cost, where position doubles it, and the rate that loads as fast."""
    compute = cost_model(MODELS[model], DEVICES[device], ssd=SSD, host=PCIE).compute
    assert round(compute.token_s * 1e6, 1) == head_us
    assert round(compute.token_s / compute.attention_s / 1024) == double_k
    assert round(MODELS[model].kv_token_bytes / compute.token_s / 1e9, 1) == even_gb
    assert compute.fixed_s == DEVICES[device].step_s
    assert compute.known


def roofline(model: ModelShape, device: Device, start: int, tokens: int) -> float:
    """Return a step's seconds: the slower of matrix products and reading weights, and the rest."""
    flops = device.peak_flops * device.parallel * device.parallel_efficiency
    products = 2 * model.linear_params * tokens / (flops * device.gemm_share)
    weights = model.step_bytes / (device.memory_bytes_per_s * device.parallel)
    per_position = 2 * model.layers * model.heads * (model.head_dim + (model.v_head_dim or 128))
    attention = per_position * tokens * (start + (tokens - 1) / 2)
    floor = max(products, weights)
    return device.step_s + floor + attention / (flops * device.attention_share)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step_blocks", [1, 8])
def test_steps_are_at_least_one_read_of_the_weights(
    model: str, device: str, step_blocks: int
) -> None:
    """A step of the stated length costs its roofline exactly, a longer one never less than it."""
    m, d = MODELS[model], DEVICES[device]
    compute = cost_model(m, d, ssd=SSD, host=PCIE, step_blocks=step_blocks).compute
    for start in (0, 100_000):
        tokens = 256 * step_blocks
        assert compute.seconds(start, tokens) == pytest.approx(roofline(m, d, start, tokens))
        assert compute.seconds(start, 4 * tokens) >= roofline(m, d, start, 4 * tokens) * 0.999


def test_the_floor_binds_where_few_tokens_meet_many_weights() -> None:
    """One block of a dense model is bound by FLOPs, of a mixture of experts by reading weights."""
    dense = cost_model(MODELS["Llama-3-70B"], DEVICES["H100 x8"], ssd=SSD, host=PCIE)
    sparse = cost_model(MODELS["DeepSeek-V3"], DEVICES["H100 x8"], ssd=SSD, host=PCIE)
    short = cost_model(MODELS["Llama-3-8B"], H100, ssd=SSD, host=PCIE, block_tokens=16)
    assert dense.compute.fixed_s == 0.004
    assert sparse.compute.seconds(0, 256) == pytest.approx(0.004 + 669e9 / (8 * 3.35e12), rel=0.01)
    assert short.compute.seconds(0, 16) == pytest.approx(0.004 + 2 * 6.98e9 / 3.35e12, rel=0.01)


def test_a_share_of_the_device_takes_longer() -> None:
    """With a quarter of each step's budget all of recomputing takes four times as long."""
    whole = cost_model(MODELS["Llama-3-8B"], H100, ssd=SSD, host=PCIE)
    part = cost_model(MODELS["Llama-3-8B"], H100, ssd=SSD, host=PCIE, share=0.25)
    for start, tokens in ((0, 256), (30_000, 1024)):
        assert part.compute.seconds(start, tokens) == 4 * whole.compute.seconds(start, tokens)
    assert (part.ssd, part.host) == (whole.ssd, whole.host)
    for share in (0.0, -1.0, 1.01):
        with pytest.raises(ValueError, match="share"):
            cost_model(MODELS["Llama-3-8B"], H100, ssd=SSD, host=PCIE, share=share)


@pytest.mark.parametrize(("model", "links"), [("Llama-3-70B", 8), ("DeepSeek-V3", 1)])
def test_every_rank_has_a_copy_link_of_its_own(model: str, links: int) -> None:
    """Eight ranks share one SSD and copy their heads over eight links; a latent goes to each."""
    costs = cost_model(MODELS[model], DEVICES["H100 x8"], ssd=SSD, host=PCIE)
    assert costs.ssd.bytes_per_s == SSD.bytes_per_s
    assert costs.host.bytes_per_s == links * PCIE.bytes_per_s
    assert costs.ssd.latency_s == SSD.latency_s


def test_distance_costs_a_round_trip() -> None:
    """A machine 50 km away answers 0.5 ms later; the rate stays."""
    near, far = LINKS["NIC 100G"], at_distance(LINKS["NIC 100G"], 50)
    assert far.latency_s == pytest.approx(near.latency_s + 0.0005)
    assert far.bytes_per_s == near.bytes_per_s
    assert "50 km" in far.name


# -- activations instead of KV


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 32])
def test_activation_split_equals_search(name: str, batch: int) -> None:
    """The closed form is as fast as the best integer of all, for any context and speeds."""
    m = MODELS[name]
    rng = np.random.default_rng(3)
    for _ in range(50):
        tokens = int(rng.integers(1, 3000))
        flops, rate = 10 ** rng.uniform(12, 15), 10 ** rng.uniform(9, 11)
        made = activation_split(
            m, tokens, batch=batch, flops_per_s=flops, bytes_per_s=rate
        )  # fmt: skip
        split = np.arange(tokens + 1)
        inputs = batch * split * m.hidden * 2 / rate
        rebuild = 2.0 * batch * split * m.hidden * m.kv_values / flops
        bring = batch * (tokens - split) * m.kv_values * 2 / rate
        seconds = inputs + np.maximum(rebuild, bring)
        assert made.seconds == pytest.approx(float(seconds.min()), rel=1e-9)
        assert made.seconds == pytest.approx(float(seconds[made.tokens]), rel=1e-9)
        assert made.load_s == pytest.approx(float(seconds[0]), rel=1e-9)


def test_activations_pay_for_multi_head_attention_only() -> None:
    """Inputs are half of MHA's KV: 1.42 x at 608 of 1,024 tokens; shared K and V gain nothing."""
    made = {
        name: activation_split(model, 1024, batch=32, flops_per_s=150e12, bytes_per_s=25e9)
        for name, model in MODELS.items()
    }
    d, tokens = MODELS["Llama-2-7B"].hidden, 1024
    closed = tokens * 2 * 150e12 / (2 * d * 25e9 + 2 * 150e12)  # s p v / (2 d w + p v)
    assert abs(made["Llama-2-7B"].tokens - closed) <= 1
    assert made["Llama-2-7B"].tokens == 608
    assert round(made["Llama-2-7B"].gain, 2) == 1.42
    assert made["Llama-2-13B"].gain > 1.3
    for name in ("Llama-3-8B", "Llama-3-70B", "Qwen2.5-7B", "Mistral-7B", "DeepSeek-V3"):
        assert (made[name].tokens, made[name].gain) == (0, 1.0)
