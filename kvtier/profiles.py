"""What devices, links and models are like: numbers to plan and simulate with, ahead of measuring.

Recomputing T tokens from position p takes one step of

    step + max(2 P T / (F g), W / B) + A T (p + (T - 1) / 2) / (F a)     A = 2 layers heads (k + v)

P parameters in matrix products, F peak FLOP/s, g and a the shares of it that matrix products and
attention achieve, W bytes of weights read once per step, B memory bytes/s, k and v the widths of a
head's keys and values. Embedding and output head are left out: the head runs for one token only.

Where the numbers come from:

* peak FLOP/s (dense bf16, float32 accumulation, no sparsity) and memory bytes/s: NVIDIA's data
  sheets of A100 80 GB SXM, H100 SXM, H200 SXM and L40S; the Ada architecture paper for RTX 4090;
* achieved shares and step seconds: assumed for A100 and H100 so that 8B on one H100 prefills 35 K
  and 70B on eight of them 25 K tokens/s; plausible, not measured; 40 % more or less moves the
  gain of a hybrid restore of 32 K tokens from a 7 GB/s SSD from 1.45 to 1.60 or 1.28;
* **those of every other device are assumed equal to a sibling's**: H200 as H100 (the same chip),
  L40S and RTX 4090 as A100 (Ada is programmed like Ampere);
* eight devices in tensor parallel are assumed to do 0.85 of eight times the work of one;
* links: effective rates, 0.92 of a network's line rate and 0.8 of what PCIe signals (nvbandwidth
  reports 25-26 and 54-56 GB/s from pinned memory); SSD classes are named by what they deliver;
* models: the published configurations; parameters are counted from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.cost import ComputeCost, CostModel, LinkCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "DEVICES",
    "LINKS",
    "MODELS",
    "ActivationSplit",
    "Device",
    "Link",
    "ModelShape",
    "activation_split",
    "at_distance",
    "block_bytes",
    "cost_model",
]

FIBRE_KM_PER_S: Final = 200_000.0
"""Light in glass: 5 us per km and direction."""

ASSUMED_SAMPLES: Final = 100
"""How many observations a profile counts for: enough to plan by, and soon outweighed."""


@dataclass(frozen=True, slots=True)
class Device:
    """What computes: one accelerator, or several in tensor parallel that act as one.

    ``peak_flops`` (dense bf16 FLOP/s) and ``memory_bytes_per_s`` are per accelerator. Matrix
    products and attention achieve ``gemm_share`` and ``attention_share`` of the peak; ``step_s``
    is a step's fixed cost. ``parallel`` accelerators do ``parallel_efficiency`` times their number.
    """

    name: str
    peak_flops: float
    gemm_share: float
    attention_share: float
    step_s: float
    memory_bytes_per_s: float
    parallel: int = 1
    parallel_efficiency: float = 1.0

    @property
    def flops(self) -> float:
        """Peak FLOP/s of all accelerators together, as far as parallelism lets them."""
        return self.peak_flops * self.parallel * self.parallel_efficiency


@dataclass(frozen=True, slots=True)
class Link:
    """What bytes come over: effective bytes/s one way, and seconds before a transfer's first byte.

    One FIFO: a transfer ends at max(now, busy until) + latency + bytes / rate.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a model's prefill cost and the size of its KV.

    ``linear_params`` are those that each token is multiplied with (of a mixture of experts the
    active ones), embedding and output head left out. ``v_head_dim`` 0 means ``head_dim``.
    ``latent`` is how many values per layer and token a model with latent attention (MLA) keeps
    instead of K and V; 0 for others. ``weight_bytes`` is what one step reads; 0 means
    ``linear_params`` in ``value_bytes`` each, which is also what one value of KV takes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_params: float
    value_bytes: int = 2
    v_head_dim: int = 0
    latent: int = 0
    weight_bytes: float = 0.0

    @property
    def kv_values(self) -> int:
        """Values of KV per layer and token."""
        return self.latent or self.kv_heads * self._head_widths

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV per token, all layers and ranks together."""
        return self.layers * self.kv_values * self.value_bytes

    @property
    def linear_flops(self) -> float:
        """FLOPs of matrix products with weights, per token."""
        return 2 * self.linear_params

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention, per token and position before it (scores, then weighted values)."""
        return 2.0 * self.layers * self.heads * self._head_widths

    @property
    def step_bytes(self) -> float:
        """Bytes of weights that one step reads, however few its tokens."""
        return self.weight_bytes or self.linear_params * self.value_bytes

    @property
    def _head_widths(self) -> int:
        return self.head_dim + (self.v_head_dim or self.head_dim)


def block_bytes(model: ModelShape, block_tokens: int = 256, kv_bits: float | None = None) -> int:
    """Return the bytes of one block, all layers and ranks; ``kv_bits`` per value if compressed."""
    values = model.layers * model.kv_values * block_tokens
    return math.ceil(values * (8 * model.value_bytes if kv_bits is None else kv_bits) / 8)


def cost_model(
    model: ModelShape,
    device: Device,
    *,
    ssd: Link,
    host: Link,
    block_tokens: int = 256,
    step_blocks: int = 1,
    share: float = 1.0,
) -> CostModel:
    """Return the costs of restoring a model's blocks on a device over two links.

    ``ssd`` is the slow source, be it an SSD or a network; all ranks share it. Each rank has a
    ``host`` link of its own, over which it brings its heads' part; a latent has no heads, so every
    rank needs all of it. ``share`` is the part of each step that the restore gets: at 0.25
    recomputing takes four times as long. A compressed block has fewer bytes (``block_bytes``),
    which changes no cost per byte.

    A step never takes less than reading the weights once. Costs are linear in tokens, so where that
    floor binds (short steps; mixtures of experts) the difference at steps of ``step_blocks`` blocks
    goes to the fixed cost: exact there, too much for longer steps, too little for shorter ones.
    """
    token_s = model.linear_flops / (device.flops * device.gemm_share)
    attention_s = model.attention_flops / (device.flops * device.attention_share)
    floor_s = model.step_bytes / (device.memory_bytes_per_s * device.parallel)
    fixed_s = device.step_s + max(floor_s - token_s * block_tokens * step_blocks, 0.0)
    links = 1 if model.latent else device.parallel
    costs = CostModel(
        ComputeCost(fixed_s, token_s, attention_s, ASSUMED_SAMPLES),
        host=LinkCost(host.bytes_per_s * links, host.latency_s, ASSUMED_SAMPLES),
        ssd=LinkCost(ssd.bytes_per_s, ssd.latency_s, ASSUMED_SAMPLES),
    )
    return costs.shared(compute=share)


def at_distance(link: Link, km: float) -> Link:
    """Return a network link to a machine so far away: a request goes there, its answer back."""
    latency_s = link.latency_s + 2 * km / FIBRE_KM_PER_S
    return replace(link, name=f"{link.name} over {km:g} km", latency_s=latency_s)


# -- activations instead of KV


@dataclass(frozen=True, slots=True)
class ActivationSplit:
    """How many of the first tokens to rebuild from activations, and the seconds with and without.

    Of one layer in one decode step whose KV lies in host memory.
    """

    tokens: int
    seconds: float
    load_s: float

    @property
    def gain(self) -> float:
        """How many times faster than bringing all KV."""
        return self.load_s / self.seconds


def activation_split(
    model: ModelShape, tokens: int, *, batch: int, flops_per_s: float, bytes_per_s: float
) -> ActivationSplit:
    """Return the best number l of tokens whose K and V are rebuilt from a layer's inputs (KVPR).

    t(l) = l x + max(l r, (tokens - l) v): bring the inputs of l tokens, then rebuild their K and V
    while the KV of the others comes. That falls until both terms of the maximum are equal, provided
    that inputs are smaller than KV (x < v), and rises otherwise. x < v holds for multi-head
    attention (x = v / 2) and for no model whose heads share K and V by more than twos.
    """
    x = batch * model.hidden * model.value_bytes / bytes_per_s
    v = batch * model.kv_values * model.value_bytes / bytes_per_s
    r = batch * 2 * model.hidden * model.kv_values / flops_per_s
    even = tokens * v / (r + v) if x < v else 0.0

    def seconds(split: int) -> float:
        return split * x + max(split * r, (tokens - split) * v)

    best = min(math.floor(even), math.ceil(even), key=seconds)
    return ActivationSplit(best, seconds(best), seconds(0))


# -- the tables


_Named = TypeVar("_Named", Device, Link, ModelShape)


def _by_name(values: Iterable[_Named]) -> Mapping[str, _Named]:
    return MappingProxyType({value.name: value for value in values})


def _eight(device: Device) -> Device:
    return replace(device, name=f"{device.name} x8", parallel=8, parallel_efficiency=0.85)


# Data sheets: peak, memory. Assumed: shares, step (see above).
_A100: Final = Device("A100", 312e12, 0.60, 0.40, 0.004, 2.0e12)
_H100: Final = Device("H100", 989e12, 0.50, 0.35, 0.004, 3.35e12)

DEVICES: Final = _by_name(
    [
        _A100,
        _eight(_A100),
        _H100,
        _eight(_H100),
        replace(_H100, name="H200", memory_bytes_per_s=4.8e12),
        replace(_A100, name="L40S", peak_flops=362e12, memory_bytes_per_s=0.864e12),
        replace(_A100, name="RTX 4090", peak_flops=165.2e12, memory_bytes_per_s=1.008e12),
    ]
)
"""Accelerators by name; sources in the module's docstring."""

LINKS: Final = _by_name(
    [
        Link("SSD 3 GB/s", 3e9, 100e-6),
        Link("SSD 7 GB/s", 7e9, 100e-6),
        Link("SSD 14 GB/s", 14e9, 100e-6),
        Link("NIC 10G", 1.15e9, 100e-6),
        Link("NIC 100G", 11.5e9, 30e-6),
        Link("NIC 400G", 46e9, 30e-6),
        Link("PCIe 4 x16", 25e9, 10e-6),
        Link("PCIe 5 x16", 50e9, 10e-6),
    ]
)
"""Links by name; networks within one rack, see ``at_distance``."""

MODELS: Final = _by_name(
    [
        ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 6.48e9),
        ModelShape("Llama-2-13B", 40, 5120, 40, 40, 128, 12.69e9),
        ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 6.98e9),
        ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 68.45e9),
        ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 6.53e9),
        ModelShape("Mistral-7B", 32, 4096, 32, 8, 128, 6.98e9),
        # Scores over 128 + 64 values, a latent of 512 + 64; 35.7e9 active of 669e9 parameters, fp8
        # (counted at the bf16 peak). Expanding the latents of earlier tokens is not counted.
        ModelShape(
            "DeepSeek-V3", 61, 7168, 128, 128, 192, 35.7e9,
            v_head_dim=128, latent=576, weight_bytes=669e9,
        ),
    ]
)  # fmt: skip
"""Models by name, KV in bf16."""
