"""What a model keeps per token, read from its Hugging Face config.json alone: no weights, no torch.

Layers are grouped by what they keep. A layer with full attention keeps K and V of every token, one
with a sliding window those of the last so many, one with latent attention (MLA) one latent instead
of heads, a recurrent one a state of fixed size that no number of tokens changes. Rotary settings
do not matter here: they change values, not sizes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtier.layout import DTYPE_BYTES
from kvtier_inspect.published import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LayerGroup", "ModelKV", "dtype_name", "from_config", "named", "read_model"]

CONFIG_BYTES_MAX: Final = 16 << 20
LAYERS_MAX: Final = 4096
DIMENSION_MAX: Final = 1 << 24

_NESTED: Final = ("text_config", "llm_config", "language_config")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_DTYPES: Final = {
    "fp64": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_FULL: Final = "full attention"
_WINDOW: Final = "sliding window"
_LATENT: Final = "latent (MLA)"
_STATE: Final = "recurrent state"
_KINDS: Final = {
    "full_attention": _FULL,
    "attention": _FULL,
    "hybrid": _FULL,  # attention beside a recurrent half
    "sliding_attention": _WINDOW,
    "chunked_attention": _WINDOW,
    "local_attention": _WINDOW,
    "linear_attention": _STATE,
    "recurrent": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
}
_RECURRENT: Final = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_WINDOWED: Final = ("mistral", "starcoder2", "phi3", "mixtral")
"""Model types all of whose layers slide if ``sliding_window`` is set."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same: ``values`` per token and layer, of the last ``window`` tokens.

    ``window`` 0 keeps all tokens; ``values`` 0 keeps a state of fixed size, which is not counted.
    """

    kind: str
    layers: int
    values: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelKV:
    """A model's KV: its layers by what they keep, the KV's dtype, and what there is to say."""

    name: str
    dtype: str
    groups: tuple[LayerGroup, ...]
    attention: str
    """Multi-head, grouped-query, multi-query or latent, in words."""
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(group.layers for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes per token before any window is full, all layers and ranks together."""
        return self._bytes(1)

    def kept_bytes(self, tokens: int) -> int:
        """Return the bytes that a request of so many tokens keeps, windows taken into account."""
        return self._bytes(tokens)

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes of a block, which holds every layer's tokens."""
        return self.token_bytes * block_tokens

    def _bytes(self, tokens: int) -> int:
        kept = (
            group.layers * group.values * (min(tokens, group.window) if group.window else tokens)
            for group in self.groups
        )
        return sum(kept) * DTYPE_BYTES[self.dtype]


def read_model(name_or_path: str, dtype: str = "") -> ModelKV:
    """Return the KV of a config.json, of a folder that has one, or of a published model.

    ``dtype`` replaces the config's. Raises ``ValueError`` or ``OSError`` naming what is wrong.
    """
    path = name_or_path
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not os.path.exists(path):
        if os.sep not in name_or_path and not name_or_path.endswith(".json"):
            return named(name_or_path, dtype)
        raise FileNotFoundError(2, "no such config.json", path)
    with open(path, "rb") as file:
        data = file.read(CONFIG_BYTES_MAX + 1)
    if len(data) > CONFIG_BYTES_MAX:
        raise ValueError(f"{path}: over {CONFIG_BYTES_MAX} bytes, which no config.json is")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument
            f"{path}: a JSON object is wanted, as in a model's config.json"
        )
    try:
        return from_config(_label(config, path), config, dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def named(name: str, dtype: str = "") -> ModelKV:
    """Return a published model's KV; ``ValueError`` lists the names that are known."""
    wanted = _plain(name.rpartition("/")[2])
    for known, config in PUBLISHED.items():
        if _plain(known) == wanted:
            return from_config(known, config, dtype)
    raise ValueError(
        f"{name}: no config.json there, and not a model known by name; known: "
        + ", ".join(PUBLISHED)
    )


def from_config(name: str, config: Mapping[str, Any], dtype: str = "") -> ModelKV:
    """Return the KV of a model from its configuration; ``ValueError`` names the field."""
    inner = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), None)
    if inner is not None:
        outer = {key: config[key] for key in ("torch_dtype", "dtype") if key in config}
        config = {**outer, **inner}
    if config.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder: only decoders' KV is counted")
    notes: list[str] = []
    kept = _dtype(config, dtype, notes)
    layers = _count(config, _LAYERS, LAYERS_MAX)
    kinds = _kinds(config, layers, notes)
    if set(kinds) == {_STATE}:
        return ModelKV(name, kept, _grouped(kinds, [0] * layers, 0), "no attention", tuple(notes))
    values, attention = _values(config, layers)
    if attention == _LATENT:
        kinds = [_LATENT if kind == _FULL else kind for kind in kinds]
    window = _window(config) if _WINDOW in kinds else 0
    if _WINDOW in kinds:
        notes.append(
            f"{kinds.count(_WINDOW)} layers keep only the last {window} tokens; a stored block "
            "has every layer's, and kvtier does not restore such models yet"
        )
    return ModelKV(name, kept, _grouped(kinds, values, window), attention, tuple(notes))


def dtype_name(name: str) -> str:
    """Return the one name that kvtier has for a dtype; ``ValueError`` lists them."""
    plain = str(name).removeprefix("torch.").lower()
    found = _DTYPES.get(plain, plain)
    if found not in DTYPE_BYTES:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(DTYPE_BYTES)}")
    return found


def _plain(name: str) -> str:
    plain = name.lower().replace("_", "-").removesuffix("-hf")
    return plain.removeprefix("meta-").removesuffix("-instruct").replace("-", "")


def _label(config: Mapping[str, Any], path: str) -> str:
    name = config.get("_name_or_path") or config.get("model_type")
    return os.path.basename(str(name).rstrip("/")) if name else path


def _count(config: Mapping[str, Any], names: Sequence[str], limit: int = DIMENSION_MAX) -> int:
    found = _optional(config, names, limit)
    if found is None:
        raise ValueError(f"it has none of {', '.join(names)}")
    return found


def _optional(
    config: Mapping[str, Any], names: Sequence[str], limit: int = DIMENSION_MAX
) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name}: {value!r} is not an integer from 1 to {limit}")
        return value
    return None


def _dtype(config: Mapping[str, Any], asked: str, notes: list[str]) -> str:
    if asked:
        return dtype_name(asked)
    quantised = config.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, dict) else None
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        notes.append("its quantization_config keeps KV in 8 bits")
        return "float8_e4m3fn" if scheme.get("type") == "float" else "int8"
    given = config.get("torch_dtype") or config.get("dtype")
    if given:
        return dtype_name(given)
    notes.append("it names no dtype: bfloat16 is assumed")
    return "bfloat16"


def _values(config: Mapping[str, Any], layers: int) -> tuple[list[int], str]:
    """Return the values per token of each layer that attends, and how it attends, in words."""
    latent = _optional(config, ("kv_lora_rank",))
    if latent is not None:
        rotary = _optional(config, ("qk_rope_head_dim",)) or 0
        return [latent + rotary] * layers, _LATENT
    heads = _count(config, _HEADS)
    width = _optional(config, ("head_dim", "attention_head_dim", "kv_channels"))
    if width is None:
        hidden = _count(config, _HIDDEN)
        if hidden % heads:
            raise ValueError(f"hidden size {hidden} is no multiple of {heads} heads")
        width = hidden // heads
    v_width = _optional(config, ("v_head_dim",)) or width
    each = _kv_heads(config, heads, layers)
    values = [kv_heads * (width + v_width) for kv_heads in each]
    most = max(each)
    if len(set(each)) > 1:
        return values, f"grouped-query (GQA): {heads} heads over {min(each)} to {most}"
    if most == heads:
        return values, f"multi-head (MHA): {heads} heads"
    words = "multi-query (MQA)" if most == 1 else "grouped-query (GQA)"
    return values, f"{words}: {heads} heads over {most}"


def _kv_heads(config: Mapping[str, Any], heads: int, layers: int) -> list[int]:
    listed = next((config[name] for name in _KV_HEADS if isinstance(config.get(name), list)), None)
    if listed is not None:
        if len(listed) != layers or any(
            type(one) is not int or not 0 <= one <= DIMENSION_MAX for one in listed
        ):
            raise ValueError(f"KV heads per layer: {layers} integers are wanted")
        return list(listed)
    inner = config.get("attn_config")
    grouped = _optional(inner, ("kv_n_heads",)) if isinstance(inner, dict) else None
    if grouped is not None:
        return [grouped] * layers
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return [1] * layers
    return [_optional(config, _KV_HEADS) or heads] * layers


def _window(config: Mapping[str, Any]) -> int:
    names = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
    return _count(config, names)


def _kinds(config: Mapping[str, Any], layers: int, notes: list[str]) -> list[str]:
    """Return what each layer is; layers that keep nothing of their own are left out."""
    kinds = _declared(config, layers)
    states = kinds.count(_STATE)
    if states:
        notes.append(
            f"{states} recurrent layers keep a state of fixed size per request, which is not "
            "counted, and which kvtier does not store yet"
        )
    shared = config.get("num_kv_shared_layers")
    if type(shared) is int and 0 < shared < layers:
        notes.append(f"the last {shared} layers use other layers' KV")
        kinds = [*kinds[:-shared], *[""] * shared]
    crossed = config.get("cross_attention_layers")
    if isinstance(crossed, list) and crossed:
        notes.append(f"{len(crossed)} layers attend to images; what they keep is not counted")
        kinds = ["" if layer in crossed else kind for layer, kind in enumerate(kinds)]
    return kinds


def _declared(config: Mapping[str, Any], layers: int) -> list[str]:
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers:
            raise ValueError(f"layer_types: a list of {layers} is wanted")
        strange = {str(one) for one in listed} - _KINDS.keys()
        if strange:
            raise ValueError(f"layer_types: {min(strange)!r} is not known here")
        return [_KINDS[one] for one in listed]
    model_type = str(config.get("model_type", ""))
    if model_type in _RECURRENT:
        return [_STATE] * layers
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == layers:
        return [{"*": _FULL, "M": _STATE}.get(one, "") for one in pattern]
    period = _optional(config, ("attn_layer_period", "full_attention_interval"), LAYERS_MAX)
    if period is not None:
        offset = config.get("attn_layer_offset", period - 1)
        return [_FULL if n % period == offset else _STATE for n in range(layers)]
    types = config.get("block_types") or config.get("_block_types")
    if isinstance(types, list) and types and "recurrent" in types:
        window = {"attention": _WINDOW, "recurrent": _STATE}
        return [window.get(str(types[n % len(types)]), _FULL) for n in range(layers)]
    return _sliding(config, model_type, layers)


def _sliding(config: Mapping[str, Any], model_type: str, layers: int) -> list[str]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * layers
    period = _optional(config, ("sliding_window_pattern",), LAYERS_MAX)
    if period is None and model_type in ("gemma2", "cohere2", "gemma3_text"):
        period = {"gemma2": 2, "cohere2": 4, "gemma3_text": 6}[model_type]
    if period is not None:
        return [_FULL if (n + 1) % period == 0 else _WINDOW for n in range(layers)]
    if config.get("use_sliding_window"):
        first = config.get("max_window_layers", 0)
        if type(first) is not int:
            raise ValueError(f"max_window_layers: {first!r} is not an integer")
        return [_WINDOW if n >= first else _FULL for n in range(layers)]
    return [_WINDOW if model_type in _WINDOWED else _FULL] * layers


def _grouped(kinds: Sequence[str], values: Sequence[int], window: int) -> tuple[LayerGroup, ...]:
    groups: Counter[tuple[str, int]] = Counter()
    for kind, each in zip(kinds, values, strict=True):
        groups[kind or "keeps nothing of its own", 0 if kind in (_STATE, "") else each] += 1
    return tuple(
        LayerGroup(kind, layers, each, window if kind == _WINDOW else 0)
        for (kind, each), layers in groups.items()
    )
