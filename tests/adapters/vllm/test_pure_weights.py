from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtier import UnsupportedModel
from kvtier_vllm.lora import AdapterDigests
from kvtier_vllm.weights import (
    PIECE_BYTES,
    ROTARY_ROWS,
    WeightWatch,
    checkpoint_digest,
    has_packed,
    unknown_digest,
    weights_digest,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Layer(torch.nn.Module):
    """A layer as a backend leaves it: a weight, one that is transposed, scales, a rotary table."""

    def __init__(self, rows: int = 100) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
        self.turned = torch.nn.Parameter(torch.randn(64, 48, generator=generator).t())
        self.register_buffer("scale", torch.tensor([1.0, float("nan")]))
        table = torch.arange(max(rows, 200) * 4.0).reshape(-1, 4)[:rows]
        self.register_buffer("cos_sin_cache", table.clone(), persistent=False)


class Wrapped(torch.nn.Module):
    """A layer that vLLM has wrapped so that it can take a LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = Layer()


def model_of(**layers: torch.nn.Module) -> torch.nn.Module:
    """Return a model of some layers."""
    return torch.nn.ModuleDict(layers)


def test_equal_weights_have_one_digest() -> None:
    """Models with the same names and bytes agree, whatever order they were made in."""
    one = model_of(a=Layer(), b=Layer())
    other = model_of(b=Layer(), a=Layer())
    assert weights_digest(one) == weights_digest(other)
    assert weights_digest(one).startswith("sha256:")


def test_a_model_that_may_take_adapters_is_the_same() -> None:
    """Wrapping layers for LoRA changes no weight, so it changes no digest."""
    assert weights_digest(model_of(a=Layer())) == weights_digest(model_of(a=Wrapped()))


def test_a_longer_rotary_table_is_the_same() -> None:
    """How long the model may run is not in the digest; another table is."""
    assert weights_digest(model_of(a=Layer(100))) == weights_digest(model_of(a=Layer(180)))
    other = Layer()
    other.cos_sin_cache[ROTARY_ROWS - 1, 2] += 1
    assert weights_digest(model_of(a=Layer())) != weights_digest(model_of(a=other))


def last_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the last value."""
    return tensor[tuple(size - 1 for size in tensor.shape)]


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a value": lambda layer: last_value(layer.weight.data).add_(1e-6),
    "a value of a transposed weight": lambda layer: last_value(layer.turned.data).add_(1e-6),
    "a buffer": lambda layer: layer.scale[0].add_(1),
    "a dtype": lambda layer: (
        setattr(layer, "weight", None)
        or layer.register_parameter("weight", torch.nn.Parameter(Layer().weight.double()))
    ),
    "a shape": lambda layer: setattr(layer.weight, "data", layer.weight.data.reshape(30, 40)),
    "one more": lambda layer: layer.register_buffer("zero", torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_makes_another_digest(change: str) -> None:
    """One changed value, dtype, shape or tensor is another model."""
    layer = Layer()
    CHANGES[change](layer)
    assert weights_digest(model_of(a=layer)) != weights_digest(model_of(a=Layer()))


def test_a_large_tensor_is_read_to_its_end() -> None:
    """A tensor of several pieces differs by its last byte."""
    tensor = torch.zeros(PIECE_BYTES + 3, dtype=torch.uint8)
    one = checkpoint_digest([("w", tensor)])
    tensor[-1] = 1
    assert one != checkpoint_digest([("w", tensor)])


def test_what_cannot_be_read_is_refused() -> None:
    """A weight without content is refused by name."""
    with pytest.raises(UnsupportedModel, match=r"a\.weight.*meta"):
        weights_digest(model_of(a=torch.nn.Linear(2, 2, device="meta")))


def packed_layer() -> Layer:
    """Return a layer whose weight a CPU backend has packed away."""
    layer = Layer()
    layer.weight = torch.nn.Parameter(torch.empty(0))
    layer.cpu_linear = object()
    return layer


def test_packed_weights_are_told_by_what_stands_for_them() -> None:
    """Without readable weights the digest is that of what stands for them."""
    model = model_of(a=packed_layer())
    assert has_packed(model)
    assert not has_packed(model_of(a=Layer()))
    digests = {weights_digest(model, packed) for packed in (b"one", b"two", unknown_digest())}
    assert len(digests) == 3
    assert unknown_digest() != unknown_digest()


def test_a_checkpoint_is_its_content() -> None:
    """The order of a checkpoint's files does not matter; a name, a dtype or a value does."""
    a, b = torch.arange(3.0), torch.ones(2, dtype=torch.int8)
    one = checkpoint_digest([("a", a), ("b", b)])
    assert one == checkpoint_digest(iter([("b", b), ("a", a)]))
    assert one != checkpoint_digest([("a", b), ("b", a)])
    assert one != checkpoint_digest([("a", a), ("b", b.view(torch.uint8))])
    assert one != checkpoint_digest([("a", a + 1), ("b", b)])


def update(layer: Layer) -> None:
    """Write over a weight as loaders do, past what torch counts."""
    layer.turned.data.copy_(layer.turned.data * 1.001)


MOVES: dict[str, Callable[[Layer], Any]] = {
    "written over": update,
    "replaced": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.clone())),
    "given other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "another scale": lambda layer: layer.scale.fill_(2),
    "packed anew": lambda layer: setattr(layer, "cpu_linear", object()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_look_sees_weights_that_moved(move: str) -> None:
    """Weights that were replaced or written over are seen; those that were left alone are not."""
    layer = packed_layer() if move == "packed anew" else Layer()
    watch = WeightWatch(model_of(a=layer))
    assert watch.look().ready
    assert not watch.look().changed
    MOVES[move](layer)
    assert watch.look().changed
    assert not WeightWatch(model_of(a=layer)).look().changed


def test_a_look_under_inference_mode() -> None:
    """The worker's steps run under inference mode, where a look works as well."""
    watch = WeightWatch(model_of(a=Layer()))
    with torch.inference_mode():
        assert not watch.look().changed
        inside = WeightWatch(model_of(a=Layer()))
    assert not inside.look().changed


def adapter(path: Path, weights: bytes = b"w", config: bytes = b"{}") -> str:
    """Write a LoRA's files."""
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_bytes(config)
    (path / "README.md").write_bytes(str(path).encode())
    return str(path)


def test_an_adapter_is_its_files_content(tmp_path: Path) -> None:
    """Two folders with the same weights and config are one adapter; another byte is another."""
    digests = AdapterDigests()
    one = digests.of(adapter(tmp_path / "one"))
    assert one is not None
    assert one == digests.of(adapter(tmp_path / "two"))
    assert one == AdapterDigests().of(str(tmp_path / "one"))
    others = [
        digests.of(adapter(tmp_path / "three", weights=b"v")),
        digests.of(adapter(tmp_path / "four", config=b"{ }")),
    ]
    assert len({one, *others}) == 3


def test_an_adapter_that_is_written_over_is_another(tmp_path: Path) -> None:
    """What is remembered of a file is forgotten once the file is another one."""
    digests = AdapterDigests()
    path = adapter(tmp_path / "one")
    before = digests.of(path)
    os.replace(adapter(tmp_path / "next", weights=b"x") + "/adapter_model.safetensors",
               path + "/adapter_model.safetensors")  # fmt: skip
    after = digests.of(path)
    assert before != after
    assert after == AdapterDigests().of(path)


def test_an_adapter_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    """A name on a hub, an empty folder or a file is no adapter that can be told by content."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    digests = AdapterDigests()
    assert [digests.of(str(tmp_path / n)) for n in ("org/name", "empty", "file")] == [None] * 3
