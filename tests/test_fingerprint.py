from __future__ import annotations

import enum

import pytest
import torch

from kvtier import UnsupportedModel
from kvtier.fingerprint import NO_EFFECT_ON_KV, config_bytes


class Kind(enum.Enum):
    """A value as transformers' configs have them."""

    ONE = "one"


def test_one_config_has_one_encoding() -> None:
    """Order, tuples for lists and enums for their values make no difference."""
    one = {"a": 1, "b": {"x": [1, 2], "y": None}, "kind": Kind.ONE}
    other = {"kind": "one", "b": {"y": None, "x": (1, 2)}, "a": 1}
    assert config_bytes(one) == config_bytes(other)


@pytest.mark.parametrize("name", sorted(NO_EFFECT_ON_KV))
def test_what_cannot_change_kv_is_left_out(name: str) -> None:
    """A field that cannot change the KV of given tokens is not in it."""
    assert config_bytes({"a": 1, name: 5}) == config_bytes({"a": 1})


@pytest.mark.parametrize(
    "other", [{"a": 2}, {"a": 1, "unknown": 5}, {"a": 1.5}, {"a": "1"}, {"a": [1]}, {}]
)
def test_everything_else_is_in_it(other: dict[str, object]) -> None:
    """Any other field or value is another config, known to us or not."""
    assert config_bytes(other) != config_bytes({"a": 1})


def test_a_dtype_is_its_name() -> None:
    """A torch dtype within a config counts by name."""
    assert config_bytes({"a": torch.float16}) == config_bytes({"a": "torch.float16"})


def test_what_is_not_plain_is_refused_by_name() -> None:
    """An object that has no encoding is refused, with its place."""
    with pytest.raises(UnsupportedModel, match=r"config\.a\.b\[1\]: a object"):
        config_bytes({"a": {"b": [1, object()]}})
