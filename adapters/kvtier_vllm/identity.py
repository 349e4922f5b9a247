"""What makes a rank's stored KV interchangeable, from vLLM's configuration; and what is refused.

The engine's pages are kept as they are, so the attention backend, the order of its axes and the
page size are part of the identity: none of them says what the bytes mean, all of them change it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvtier
from kvtier import KVSpec, UnsupportedModel
from kvtier.fingerprint import config_bytes
from kvtier.layout import DTYPE_BYTES
from kvtier_vllm.slots import EnginePages
from kvtier_vllm.weights import (
    Look,
    WeightWatch,
    checkpoint_digest,
    has_packed,
    unknown_digest,
    weights_digest,
)
from kvtier_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtier_vllm.settings import Settings

__all__ = ["block_tokens_of", "check_supported", "worker_side"]

BLOCK_TOKENS: Final = 256
DRAFTS_WITHOUT_KV: Final = (None, "ngram", "ngram_gpu", "suffix")
KINDS: Final = {
    "SlidingWindowSpec": "sliding-window attention: layers that forget",
    "SlidingWindowMLASpec": "sliding-window attention: layers that forget",
    "ChunkedLocalAttentionSpec": "chunked local attention: layers that forget",
    "MLAAttentionSpec": "multi-head latent attention (MLA)",
    "MambaSpec": "recurrent layers",
    "UniformTypeKVCacheSpecs": "layers whose KV heads or widths differ",
}
"""What vLLM's KV cache specs stand for."""
NOT_YET: Final = "kvtier does not hold this yet"


def block_tokens_of(page_tokens: int) -> int:
    """Return how many tokens a kvtier block has: whole pages, 256 where that is possible."""
    return page_tokens * max(1, BLOCK_TOKENS // page_tokens)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ``UnsupportedModel`` with the reason if this engine's KV cannot be held correctly."""
    for refused, reason in _refusals(vllm_config, kv_cache_config):
        if refused:
            raise UnsupportedModel(f"{reason}; {NOT_YET}: start without the connector")


def _refusals(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Iterator[tuple[bool, str]]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    yield model.is_encoder_decoder, f"{model.architecture} has an encoder and cross-attention"
    yield model.runner_type != "generate", f"runner {model.runner_type!r}: only generation has KV"
    yield parallel.pipeline_parallel_size > 1, "pipeline parallelism (each rank has some layers)"
    yield parallel.decode_context_parallel_size > 1, "decode context parallelism"
    yield parallel.prefill_context_parallel_size > 1, "prefill context parallelism"
    yield bool(parallel.enable_eplb), "expert load balancing, which moves weights while serving"
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    yield (
        len(groups) != 1,
        f"{len(groups)} kinds of KV ({', '.join(KINDS.get(kind, kind) for kind in kinds)})",
    )
    spec: Any = groups[0].kv_cache_spec
    yield type(spec) is not FullAttentionSpec, KINDS.get(kinds[0], f"a KV cache of {kinds[0]}")
    window = spec.sliding_window or spec.attention_chunk_size
    yield window is not None, f"layers that forget what is {window} tokens back"
    yield bool(spec.non_causal), "attention that is not causal"
    yield spec.tokens_per_state != 1, f"{spec.tokens_per_state} tokens in one KV state"
    yield spec.page_size_padded is not None, "pages that are padded"
    name = str(spec.dtype).removeprefix("torch.")
    yield name not in DTYPE_BYTES, f"KV of {name}, not one of {', '.join(DTYPE_BYTES)}"
    cache = vllm_config.cache_config
    yield bool(getattr(cache, "calculate_kv_scales", False)), "KV scales that are found on the way"
    draft = vllm_config.speculative_config
    method = draft.method if draft is not None else None
    yield method not in DRAFTS_WITHOUT_KV, f"speculation by {method!r}, a model with KV of its own"


class VllmEngine:
    """``engine.Engine`` over a vLLM worker."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = vllm_config
        self._kv = kv_cache_config
        self._caches: dict[str, torch.Tensor] = {}
        self._runner: Any = None
        self._watch: WeightWatch | None = None
        self._packed: bytes | None = None
        self._spec: KVSpec | None = None

    @property
    def rank(self) -> int:
        """This worker's rank among those that share the model."""
        return int(get_tp_group().rank_in_group)

    @property
    def ranks(self) -> int:
        """How many they are."""
        return int(get_tp_group().world_size)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV tensors; to be called, on whatever way, by its model runner."""
        # Layers that share the KV of others come beside those of the group.
        self._caches = {name: caches[name] for name in self._kv.kv_cache_groups[0].layer_names}
        self._runner = _calling_runner()

    def spec(self) -> KVSpec:
        """Return the spec with the weights as they are now; all ranks ask at the same time."""
        config, model = self._config, self._runner.get_model()
        digest = weights_digest(model, self._packed_digest(model))
        settings = config_bytes(config.model_config.hf_config.to_dict())
        own = hashlib.sha256(digest.encode() + settings).hexdigest()
        first = next(iter(self._caches.values()))
        page = config.cache_config.block_size
        self._watch = WeightWatch(model)
        cache_dtype = str(config.cache_config.cache_dtype)
        self._spec = KVSpec(
            model=config.model_config.architecture,
            weights=_of_all_ranks(own),
            dtype=str(first.dtype).removeprefix("torch."),
            layers=len(self._caches),
            parts=(((first.shape[1], first.shape[3]),),) * len(self._caches),
            quantization=str(config.model_config.quantization or "none"),
            kv_scales=cache_dtype if cache_dtype.startswith("fp8") else "none",
            layout=f"{_label(config, self._kv, self._caches)}/{page}",
            rope=_rope(config),
            tp_rank=self.rank,
            tp_size=self.ranks,
            block_tokens=block_tokens_of(page),
        )
        return self._spec

    def pages(self) -> EnginePages:
        """Return the engine's pages, in the spec's layout."""
        if self._spec is None:
            raise RuntimeError("pages: spec() comes first")
        return EnginePages(self._spec.block_layout, self._caches, self._kv.num_blocks)

    def look(self) -> Look:
        """Look whether the weights are those of the last ``spec``."""
        if self._watch is None:
            raise RuntimeError("look: spec() comes first")
        return self._watch.look()

    def fence(self) -> Any:
        """Return an event after all that the engine has queued; None on a CPU."""
        first = next(iter(self._caches.values()))
        if first.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(first.device))
        return event

    def _packed_digest(self, model: torch.nn.Module) -> bytes:
        """Return what stands for weights that the backend has packed away."""
        if not has_packed(model):
            return b""
        if self._packed is None:
            # They were loaded from there a moment ago.
            loader = get_model_loader(self._config.load_config)
            every = getattr(loader, "get_all_weights", None)  # as vLLM's own reload asks for them
            if every is None:
                # Dummy weights follow from the shapes; other loaders leave nothing to go by.
                dummy = self._config.load_config.load_format == "dummy"
                self._packed = b"dummy" if dummy else unknown_digest()
            else:
                self._packed = checkpoint_digest(every(self._config.model_config, model))
        elif self._watch is None or self._watch.look().changed:
            self._packed = unknown_digest()
        return self._packed


def worker_side(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    *,
    contiguous: bool = False,
) -> WorkerSide:
    """Return the side of this worker, whose store opens once the KV tensors are registered.

    ``contiguous``: the scheduler can only use prefixes without holes.
    """
    check_supported(vllm_config, kv_cache_config)
    engine = VllmEngine(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    # Replicas behind one endpoint are engines of their own, whose schedulers know nothing of each
    # other.
    replica = f"replica-{parallel.data_parallel_index}/" if parallel.data_parallel_size > 1 else ""
    path = f"{settings.path}/{replica}rank-{engine.rank}-of-{engine.ranks}"
    options = settings.of_rank(engine.ranks)
    if contiguous:
        options["policy"] = "prefix-closed"
    reads_only = not vllm_config.kv_transfer_config.is_kv_producer
    device = str(vllm_config.device_config.device_type)

    def open_store(spec: KVSpec) -> kvtier.Store | kvtier.StoreReader:
        links: dict[kvtier.Tier | str, kvtier.LinkThrottle] = {
            str(tier): link for tier, link in settings.throttles().items()
        }
        if reads_only:
            options.pop("ssd_bytes", None)  # the writer's
            return kvtier.open_reader(path, spec, device=device, links=links, **options)
        return kvtier.open(path, spec, device=device, links=links, **options)

    return WorkerSide(engine, open_store)


def _calling_runner() -> Any:
    """Return the model runner that registers its KV tensors, from further up the stack.

    A connector is given neither the worker nor the model, and vLLM keeps no list of either: who
    calls ``register_kv_caches`` is the one place where both can be had without another setting.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callable(getattr(owner, "get_model", None)):
            return owner
        frame = frame.f_back
    raise UnsupportedModel(
        "no model runner called register_kv_caches: this vLLM is not one that kvtier_vllm knows"
    )


def _of_all_ranks(own: str) -> str:
    """Return one digest over those of all ranks, in their order."""
    group = get_tp_group()
    every: list[Any] = [own]
    if group.world_size > 1:
        every = [None] * group.world_size
        torch.distributed.all_gather_object(every, own, group=group.cpu_group)
    return f"sha256:{hashlib.sha256(json.dumps(every).encode()).hexdigest()}"


def _label(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]
) -> str:
    """Return whose bytes a page holds.

    The backend, its instruction set on a CPU, the order of the axes, and the tokens in a block of
    the backend's where it has several in a page.
    """
    layers = get_layers_from_vllm_config(vllm_config, Attention, list(caches))
    kinds = {
        (layer.attn_backend.get_name(), getattr(layer, "isa", "")) for layer in layers.values()
    }
    if len(kinds) != 1:
        raise UnsupportedModel(f"layers of several attention backends ({kinds}); {NOT_YET}")
    inner = next(iter(caches.values())).shape[2]
    split = "" if inner == vllm_config.cache_config.block_size else f"by{inner}"
    words = [*kinds.pop(), str(kv_cache_config.kv_cache_layout), split]
    return re.sub(r"[^a-z0-9._-]", "_", "-".join(word for word in words if word).lower())[:64]


def _rope(vllm_config: VllmConfig) -> tuple[tuple[str, Any], ...]:
    """Return the rope parameters as flat (name, scalar) pairs."""
    model = vllm_config.model_config
    config = model.hf_text_config
    found = getattr(config, "rope_parameters", None)  # transformers 5 has everything in it
    if not found:
        names = ("rope_scaling", "rope_theta", "partial_rotary_factor")
        found = {name: getattr(config, name, None) for name in names}
    pairs = list(_flat("", {name: value for name, value in found.items() if value is not None}))
    if found.get("rope_type") == "longrope":
        # vLLM takes the long factors for every position once the longest prompt may need them.
        limit = found.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", 0
        )
        pairs.append(("long factors", model.max_model_len > limit))
    return tuple(pairs)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), item)
    elif isinstance(value, (list, tuple)):
        yield prefix, json.dumps(list(value))
    else:
        yield prefix, value
