from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import BlockKeys, FormatError, KVSpec
from kvtier.identity import spec_differences

DATA = Path(__file__).with_name("data")
GOLDEN = json.loads((DATA / "golden_keys.json").read_text())["cases"]
GQA: dict[str, Any] = {
    "model": "org/model",
    "weights": "sha256:00",
    "dtype": "bfloat16",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "block_tokens": 4,
}
SPEC = KVSpec(**GQA)
TOKEN_IDS = st.integers(0, (1 << 32) - 1)


def spec_with(**changes: Any) -> KVSpec:
    """Return the small spec with some fields changed."""
    return KVSpec(**{**GQA, **changes})


def golden_spec(case: dict[str, Any]) -> KVSpec:
    """Build a golden case's spec; JSON has lists where the spec has tuples."""
    return KVSpec(**{name: tuple_deep(value) for name, value in case["spec"].items()})


def tuple_deep(value: Any) -> Any:
    """Turn nested lists into tuples."""
    return tuple(map(tuple_deep, value)) if isinstance(value, list) else value


def golden_keys(case: dict[str, Any]) -> BlockKeys:
    """Hash a golden case's prompt."""
    prompt = case["prompt"]
    first, step, count, modulus = prompt["tokens"]
    return BlockKeys.of(
        golden_spec(case),
        [(first + step * index) % modulus for index in range(count)],
        prompt["tenant"],
        prompt["adapter"],
        [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in prompt["extra"]],
    )


# -- frozen values


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_spec(case: dict[str, Any]) -> None:
    """A spec's encoding and namespace are those that were frozen with format 1."""
    spec = golden_spec(case)
    if case["spec_encoding"] is not None:
        assert case["spec_encoding"] == spec.to_bytes().hex()
    assert case["namespace"] == spec.namespace.hex()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_keys(case: dict[str, Any]) -> None:
    """A prompt's root, tenant digest and block hashes are those that were frozen with format 1."""
    keys = golden_keys(case)
    assert case["namespace"] == keys.namespace.hex()
    assert case["root"] == keys.root.hex()
    assert case["tenant_digest"] == keys.tenant_digest.hex()
    assert case["hashes"] == [digest.hex() for digest in keys]


def test_golden_file_is_what_the_generator_writes() -> None:
    """The frozen values still follow from the independent encoder next to them."""
    made = subprocess.run(
        [sys.executable, str(DATA / "golden_keys.py")], capture_output=True, check=True, timeout=60
    )
    assert (DATA / "golden_keys.json").read_bytes() == made.stdout


def test_keys_are_the_same_in_every_process() -> None:
    """Keys do not depend on the hash seed of the process that makes them."""
    code = (
        "import sys; from kvtier import BlockKeys, KVSpec\n"
        f"spec = KVSpec(**{GQA!r}, rope=(('theta', 1), ('factor', 2)))\n"
        "keys = BlockKeys.of(spec, list(range(99)), 'tenant', 'adapter', ('x', b'y', 3))\n"
        "sys.stdout.buffer.write(keys.to_bytes())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    spec = spec_with(rope=(("theta", 1), ("factor", 2)))
    here = BlockKeys.of(spec, list(range(99)), "tenant", "adapter", ("x", b"y", 3))
    assert outputs == {here.to_bytes()}


# -- token ids


def test_every_form_of_token_ids_gives_the_same_keys() -> None:
    """List, tuple, numpy array and torch tensor of any integer width, [n] or [1, n], are one."""
    import torch

    ids = [0, 1, 2, 3, 65535, 5, 127, 1, 0, 77]
    wanted = BlockKeys.of(SPEC, ids)
    forms: list[Any] = [tuple(ids), [np.int64(i) for i in ids], [np.uint32(i) for i in ids]]
    for dtype in (np.int32, np.int64, np.uint32, np.uint64, np.uint16, ">i4", ">i8"):
        array = np.array(ids, dtype=dtype)
        forms += [array, array[None], np.repeat(array, 2)[::2], np.asfortranarray(array[None])]
    for kind in (torch.int32, torch.int64):
        tensor = torch.tensor(ids, dtype=kind)
        forms += [tensor, tensor[None], torch.tensor(ids + ids, dtype=kind)[: len(ids)]]
    readonly = np.array(ids)
    readonly.flags.writeable = False
    forms.append(readonly)
    for form in forms:
        assert wanted == BlockKeys.of(SPEC, form)


def test_uint32_reaches_its_maximum() -> None:
    """The largest u32 is a legal id in every form that can hold it."""
    top = (1 << 32) - 1
    wanted = BlockKeys.of(SPEC, [top] * 4)
    for dtype in (np.uint32, np.int64, np.uint64):
        assert wanted == BlockKeys.of(SPEC, np.full(4, top, dtype))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (-1, ValueError),
        (1 << 32, ValueError),
        (1 << 70, ValueError),
        (-(1 << 70), ValueError),
        (np.int64(-1), ValueError),
        (1.0, TypeError),
        (1.5, TypeError),
        (np.float32(2.0), TypeError),
        (True, TypeError),
        (False, TypeError),
        (np.bool_(True), TypeError),  # noqa: FBT003 - the value under test
        (None, TypeError),
        ("1", TypeError),
        (b"1", TypeError),
        ([1], TypeError),
        ((), TypeError),
        (np.array([1]), TypeError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("index", [0, 2, 5])
def test_bad_id_is_named_by_its_index(bad: object, error: type[Exception], index: int) -> None:
    """One bad id in a sequence is refused, and the message says where it is."""
    ids: list[object] = [3, 1, 0, 9, 8, 7]
    ids[index] = bad
    for form in (ids, tuple(ids)):
        with pytest.raises(error, match=rf"token_ids\[{index}\]"):
            BlockKeys.of(SPEC, form)


@pytest.mark.parametrize("bad", [-1, -(1 << 31), 1 << 32, (1 << 62)])
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_bad_id_in_an_array_is_named_by_its_index(bad: int, form: str) -> None:
    """One bad id in an array or tensor is refused, and the message says where it is."""
    import torch

    ids = [3, 1, 0, bad, 8, 7]
    array = np.array(ids, np.int64) if form == "numpy" else torch.tensor(ids)
    with pytest.raises(ValueError, match=r"token_ids\[3\]"):
        BlockKeys.of(SPEC, array)


def test_uint64_beyond_int64_is_named_by_its_index() -> None:
    """An id that fits neither u32 nor int64 is refused like any other."""
    with pytest.raises(ValueError, match=r"token_ids\[1\]"):
        BlockKeys.of(SPEC, np.array([0, (1 << 64) - 1], np.uint64))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (np.zeros((2, 4), np.int64), ValueError),
        (np.zeros((1, 1, 4), np.int64), ValueError),
        (np.int64(3), (TypeError, ValueError)),
        (np.array(3), ValueError),
        (np.zeros(4), TypeError),
        (np.zeros(4, np.bool_), TypeError),
        (np.array([1, 2], object), TypeError),
        (np.array(["1"]), TypeError),
        (None, TypeError),
        (7, TypeError),
        ("1234", TypeError),
        (b"1234", TypeError),
        ({1, 2}, TypeError),
        ({1: 2}, TypeError),
        (range(4), TypeError),
        pytest.param(iter([1]), TypeError, id="iterator"),
    ],
    ids=str,
)
def test_bad_shape_or_type_names_token_ids(ids: object, error: type[Exception]) -> None:
    """What is not a flat sequence of integers is refused with a message about token_ids."""
    with pytest.raises(error, match="token_ids"):
        BlockKeys.of(SPEC, ids)


@pytest.mark.parametrize("ids", [np.zeros(0), np.zeros((1, 0)), np.zeros(0, np.bool_)], ids=repr)
def test_empty_array_of_any_type_is_an_empty_prompt(ids: np.ndarray[Any, Any]) -> None:
    """Numpy's empty array is float by default: no ids, nothing to refuse."""
    assert BlockKeys.of(SPEC, ids) == BlockKeys.of(SPEC, [])


def test_empty_prompt() -> None:
    """No ids make no blocks, and the keys still know their root."""
    keys = BlockKeys.of(SPEC, [])
    assert (len(keys), keys.num_tokens, tuple(keys)) == (0, 0, ())
    assert keys.parent(0) == keys.root
    assert keys == keys.extend([])


def test_parents_are_the_chain() -> None:
    """Each block's parent is the block before it; the first block's is the root."""
    keys = BlockKeys.of(SPEC, list(range(13)))
    assert (len(keys), keys.num_tokens) == (3, 13)
    assert [keys.root, keys[0], keys[1]] == [keys.parent(block) for block in range(3)]


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKEN_IDS, max_size=20), st.data())
def test_extending_is_hashing_the_concatenation(ids: list[int], data: st.DataObject) -> None:
    """However a prompt is cut in three, extending gives the keys of the whole."""
    first, second = sorted(data.draw(st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids)))))
    whole = BlockKeys.of(SPEC, ids, "t", "a", ("x",))
    start = BlockKeys.of(SPEC, ids[:first], "t", "a", ("x",))
    before = (start.hashes, start.pending)
    middle = start.extend(np.array(ids[first:second], np.int64))
    assert whole == middle.extend(tuple(ids[second:]))
    assert whole.hashes[: len(start)] == start.hashes
    assert before == (start.hashes, start.pending)


@pytest.mark.parametrize("split", range(14))
def test_every_split_of_one_prompt(split: int) -> None:
    """All cuts around block edges agree, from a deserialised value too."""
    ids = list(range(100, 113))
    start = BlockKeys.from_bytes(BlockKeys.of(SPEC, ids[:split]).to_bytes())
    assert BlockKeys.of(SPEC, ids) == start.extend(ids[split:])


def test_one_token_changes_its_block_and_all_after() -> None:
    """A block's hash covers everything before it and nothing after it."""
    ids = list(range(16))
    a = BlockKeys.of(SPEC, ids)
    for place in range(16):
        changed = list(ids)
        changed[place] += 1000
        b = BlockKeys.of(SPEC, changed)
        same = [x == y for x, y in zip(a, b, strict=True)]
        assert [block < place // 4 for block in range(4)] == same


# -- what separates keys


def test_tenant_adapter_and_extra_separate_keys() -> None:
    """Any two different (tenant, adapter, extra) share no block, however they concatenate."""
    ids = list(range(8))
    variants: list[tuple[str, str, tuple[Any, ...]]] = [
        ("", "", ()),
        ("ab", "c", ()),
        ("a", "bc", ()),
        ("abc", "", ()),
        ("", "abc", ()),
        ("ab", "", ("c",)),
        ("", "", ("abc",)),
        ("", "", ("ab", "c")),
        ("", "", ("a", "bc")),
        ("", "", ("c", "ab")),
        ("", "", (b"abc",)),
        ("", "", ("",)),
        ("", "", ("", "")),
        ("", "", (b"",)),
        ("", "", (1,)),
        ("", "", ("1",)),
        ("", "", (-1,)),
        ("", "", (0,)),
        ("", "", (b"\x00",)),
    ]
    hashes = [BlockKeys.of(SPEC, ids, *variant).hashes for variant in variants]
    assert len(variants) * 2 == len({digest for chain in hashes for digest in chain})


def test_extra_is_a_sequence_of_any_kind() -> None:
    """A list and a tuple of the same items are the same extra."""
    assert BlockKeys.of(SPEC, [1] * 4, extra=["a", 1]) == BlockKeys.of(
        SPEC, [1] * 4, extra=("a", 1)
    )


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"tenant": "x" * 1025}, ValueError, "tenant"),
        ({"tenant": "é" * 513}, ValueError, "tenant"),
        ({"tenant": "\ud800"}, ValueError, "tenant"),
        ({"tenant": b"x"}, TypeError, "tenant"),
        ({"tenant": None}, TypeError, "tenant"),
        ({"tenant": 1}, TypeError, "tenant"),
        ({"adapter": "x" * 1025}, ValueError, "adapter"),
        ({"adapter": "a\udfffb"}, ValueError, "adapter"),
        ({"adapter": None}, TypeError, "adapter"),
        ({"extra": ("ok", "x" * 1025)}, ValueError, r"extra\[1\]"),
        ({"extra": ("\ud800",)}, ValueError, r"extra\[0\]"),
        ({"extra": (b"x" * 1025,)}, ValueError, r"extra\[0\]"),
        ({"extra": (1 << 64,)}, ValueError, r"extra\[0\]"),
        ({"extra": (-(1 << 63) - 1,)}, ValueError, r"extra\[0\]"),
        ({"extra": (1.0,)}, TypeError, r"extra\[0\]"),
        ({"extra": (True,)}, TypeError, r"extra\[0\]"),
        ({"extra": (None,)}, TypeError, r"extra\[0\]"),
        ({"extra": (("a",),)}, TypeError, r"extra\[0\]"),
        ({"extra": ("x",) * 4097}, ValueError, "extra"),
        ({"extra": 5}, TypeError, "extra"),
        ({"extra": "image"}, TypeError, "extra"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_bad_labels_are_named(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    """A tenant, adapter or extra that cannot be hashed as given is refused by name."""
    with pytest.raises(error, match=name):
        BlockKeys.of(SPEC, [1], **arguments)


def test_longest_labels_are_taken() -> None:
    """Labels of exactly the limit work."""
    keys = BlockKeys.of(SPEC, [1], "x" * 1024, "é" * 512, (b"y" * 1024, (1 << 64) - 1, -(1 << 63)))
    assert BlockKeys.from_bytes(keys.to_bytes()) == keys


def test_ranks_share_keys_and_not_namespaces() -> None:
    """Every rank of a model derives the same hashes and stores under a namespace of its own."""
    ranks = [
        spec_with(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2) for tp in (0, 1) for pp in (0, 1)
    ]
    keys = [BlockKeys.of(spec, list(range(9))) for spec in ranks]
    assert len({chain.hashes for chain in keys}) == 1
    assert len({chain.namespace for chain in keys}) == 4
    assert {spec.namespace for spec in ranks} == {chain.namespace for chain in keys}


# -- namespaces

OTHER: dict[str, dict[str, Any]] = {
    "model": {"model": "org/other"},
    "weights": {"weights": "sha256:01"},
    "dtype": {"dtype": "float16"},
    "layers": {"layers": 3},
    "kv_heads": {"kv_heads": 4},
    "head_dim": {"head_dim": 8},
    "v_head_dim": {"v_head_dim": 2},
    "parts": {"kv_heads": 0, "head_dim": 0, "parts": (((2, 4), (2, 4)), ((2, 4), (1, 4)))},
    "quantization": {"quantization": "awq"},
    "kv_scales": {"kv_scales": "k=1"},
    "layout": {"layout": "nhd"},
    "layout in pages": {"layout": "cpu-lbhnc/2"},
    "layout in other pages": {"layout": "cpu-lbhnc/1"},
    "rope": {"rope": (("theta", 10000),)},
    "tp_rank": {"tp_rank": 1, "tp_size": 2},
    "tp_size": {"tp_size": 2},
    "pp_rank": {"pp_rank": 1, "pp_size": 2},
    "pp_size": {"pp_size": 2},
    "block_tokens": {"block_tokens": 8},
    "version": {},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVSpec)])
def test_every_field_makes_another_namespace(name: str) -> None:
    """Changing any one field of a spec moves it to another namespace; a new field needs a case."""
    if name == "version":
        with pytest.raises(ValueError, match="version"):
            spec_with(version=2)
        encoded = msgpack.unpackb(SPEC.to_bytes())
        assert encoded[-1] == ["version", 1]
        return
    other = spec_with(**OTHER[name])
    assert name in spec_differences(SPEC, other)
    assert SPEC.namespace != other.namespace


def test_cases_differ_from_each_other() -> None:
    """No two of the changed specs share a namespace."""
    namespaces = [spec_with(**changes).namespace for changes in OTHER.values()]
    assert len(OTHER) == len(set(namespaces))


def test_short_form_and_parts_are_one_spec() -> None:
    """Both spellings of a uniform model are equal, with one namespace and one layout."""
    short = spec_with(v_head_dim=3)
    numbers = {"kv_heads": 0, "head_dim": 0}
    parts = spec_with(**numbers, parts=(((2, 4), (2, 3)),) * 2)
    lists = spec_with(**numbers, parts=[[[2, 4], [2, 3]]] * 2)
    both = spec_with(v_head_dim=3, parts=(((2, 4), (2, 3)),) * 2)
    assert short == parts == lists == both
    assert len({spec.namespace for spec in (short, parts, lists, both)}) == 1
    assert len({hash(spec) for spec in (short, parts, lists, both)}) == 1
    assert (parts.kv_heads, parts.head_dim, parts.v_head_dim) == (2, 4, 3)
    assert spec_with() == spec_with(v_head_dim=4)


def test_rope_numbers_are_one_identity() -> None:
    """Integers and floats of equal value, and any order of the pairs, are one spec."""
    a = spec_with(rope=(("theta", 10000), ("factor", 8)))
    b = spec_with(rope=(("factor", 8.0), ("theta", 10000.0)))
    c = spec_with(rope=[["theta", 10000], ["factor", 8]])
    assert a == b == c
    assert a.namespace == b.namespace == c.namespace
    assert a.namespace != spec_with(rope=(("theta", 10001), ("factor", 8))).namespace


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"rope": (("scaled", True),)}, {"rope": (("scaled", 1.0),)}),
        ({"rope": (("scaled", False),)}, {"rope": (("scaled", 0),)}),
        ({"rope": (("x", -0.0),)}, {"rope": (("x", 0.0),)}),
        ({"version": 1}, {"version": True}),
        ({"version": 1}, {"version": 1.0}),
    ],
    ids=str,
)
def test_equal_specs_have_equal_namespaces(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Specs that compare equal are stored in one place (or the odd one is refused)."""
    try:
        first, second = spec_with(**a), spec_with(**b)
    except (ValueError, TypeError):
        return
    assert (first == second) == (first.namespace == second.namespace)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "x" * 1025}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"weights": ""}, "weights"),
        ({"weights": b"sha"}, "weights"),
        ({"dtype": "int4"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"dtype": ["bfloat16"]}, "dtype"),
        ({"layers": 0}, "layers"),
        ({"layers": -1}, "layers"),
        ({"layers": 4097}, "layers"),
        ({"layers": True}, "layers"),
        ({"layers": 2.0}, "layers"),
        ({"layers": "2"}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"kv_heads": -2}, "kv_heads"),
        ({"kv_heads": 2.0}, "kv_heads"),
        ({"kv_heads": None}, "kv_heads"),
        ({"kv_heads": (1 << 24) + 1}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"v_head_dim": -1}, "v_head_dim"),
        ({"v_head_dim": 2.5}, "v_head_dim"),
        ({"v_head_dim": "4"}, "v_head_dim"),
        ({"quantization": ""}, "quantization"),
        ({"kv_scales": None}, "kv_scales"),
        ({"layout": "bhnd"}, "layout"),
        ({"layout": None}, "layout"),
        ({"layout": "/4"}, "layout"),
        ({"layout": "cpu/0"}, "layout"),
        ({"layout": "cpu/04"}, "layout"),
        ({"layout": "CPU/4"}, "layout"),
        ({"layout": "cpu/4/4"}, "layout"),
        ({"layout": "cpu/4\n"}, "layout"),
        ({"layout": "cpu/3"}, "layout: pages of 3 tokens do not fill a block of 4"),
        ({"layout": "cpu/8"}, "layout: pages of 8 tokens do not fill a block of 4"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": True}, "tp_size"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"tp_rank": False}, "tp_rank"),
        ({"pp_size": -1}, "pp_size"),
        ({"pp_rank": 2, "pp_size": 2}, "pp_rank"),
        ({"pp_rank": 0.0}, "pp_rank"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": (1 << 16) + 1}, "block_tokens"),
        ({"block_tokens": 256.0}, "block_tokens"),
        ({"version": 0}, "version"),
        ({"version": None}, "version"),
        ({"parts": (((2, 4), (2, 4)),)}, "parts"),
        ({"parts": ((), ())}, "parts"),
        ({"parts": (((2, 4),) * 5,) * 2}, "parts"),
        ({"parts": (((2, 0), (2, 4)),) * 2}, "parts"),
        ({"parts": (((2, 4), (True, 4)),) * 2}, "parts"),
        ({"parts": (((3, 4), (3, 4)),) * 2}, "kv_heads"),
        ({"parts": (((2, 5), (2, 5)),) * 2}, "head_dim"),
        ({"parts": 7}, "parts"),
        ({"parts": (7, 7)}, "parts"),
        ({"parts": (((2,), (2,)),) * 2}, "parts"),
        ({"rope": (("theta", 1), ("theta", 2))}, "rope"),
        ({"rope": (("", 1),)}, "rope"),
        ({"rope": ((1, 1),)}, "rope"),
        ({"rope": (("theta", (1, 2)),)}, "rope"),
        ({"rope": (("theta", b"1"),)}, "rope"),
        ({"rope": (("theta",),)}, "rope"),
        ({"rope": 10000}, "rope"),
        ({"rope": (("theta", 10**400),)}, "rope"),
        ({"rope": (("theta", float("nan")),)}, "rope"),
        ({"rope": (("type", "\ud800"),)}, "rope"),
        ({"rope": (("type", "x" * (17 << 20)),)}, "rope"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
def test_invalid_spec_names_its_field(changes: dict[str, Any], name: str) -> None:
    """A value that cannot be part of an identity is refused, and the message names the field."""
    with pytest.raises((ValueError, TypeError), match=name):
        spec_with(**changes)


def test_specs_are_values() -> None:
    """A spec is frozen, hashable and equal to its copy."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.layers = 3  # type: ignore[misc]
    assert {SPEC} == {spec_with()}
    assert spec_differences(SPEC, spec_with()) == {}
    assert {"layers": (2, 3), "parts": (SPEC.parts, spec_with(layers=3).parts)} == spec_differences(
        SPEC, spec_with(layers=3)
    )


# -- encodings


@pytest.mark.parametrize("changes", list(OTHER.values()), ids=list(OTHER))
def test_spec_round_trip(changes: dict[str, Any]) -> None:
    """Decoding an encoded spec gives the spec back."""
    spec = spec_with(**changes)
    decoded = KVSpec.from_bytes(spec.to_bytes())
    assert spec == decoded
    assert spec.namespace == decoded.namespace


@settings(max_examples=40, deadline=None)
@given(st.lists(TOKEN_IDS, max_size=14), st.text(max_size=5), st.text(max_size=5))
def test_keys_round_trip(ids: list[int], tenant: str, adapter: str) -> None:
    """Decoding encoded keys gives the keys back."""
    keys = BlockKeys.of(SPEC, ids, tenant, adapter)
    assert keys == BlockKeys.from_bytes(keys.to_bytes())


def check_hostile(kind: type[KVSpec | BlockKeys], data: bytes) -> None:
    """Decode; what is accepted must be usable and encode back to the same bytes."""
    try:
        value = kind.from_bytes(data)
    except FormatError:
        return
    assert data == value.to_bytes()
    if isinstance(value, BlockKeys):
        value.extend([1] * 300)
        assert value.num_tokens >= 0
        repr(value)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([KVSpec, BlockKeys]), st.binary(max_size=200))
def test_random_bytes_are_format_errors(kind: type[KVSpec | BlockKeys], data: bytes) -> None:
    """Decoding noise raises FormatError and nothing else."""
    check_hostile(kind, data)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([SPEC, BlockKeys.of(SPEC, list(range(7)))]), st.data())
def test_mutated_encodings_are_format_errors(
    value: KVSpec | BlockKeys, data: st.DataObject
) -> None:
    """A changed encoding is refused with FormatError, or is another value's encoding."""
    encoded = bytearray(value.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(encoded) - 1))
        what = data.draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        if what == "flip":
            encoded[place] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del encoded[max(place, 1) :]
        elif what == "insert":
            encoded[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        elif len(encoded) > 1:
            del encoded[place]
    check_hostile(type(value), bytes(encoded))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([SPEC, BlockKeys.of(SPEC, list(range(7)))]), st.integers(0, 7), JUNK)
def test_well_formed_junk_is_a_format_error(
    value: KVSpec | BlockKeys, place: int, junk: object
) -> None:
    """Any msgpack value in the place of any item is refused with FormatError."""
    items = msgpack.unpackb(value.to_bytes())
    if isinstance(value, KVSpec) and place >= 2:
        items[place] = [items[place][0], junk]
    else:
        items[place] = junk
    check_hostile(type(value), msgpack.packb(items))


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("junk", [True, 1.0, 4.0, -4, 1 << 40, "x", b"x" * 32, [1] * 32, {}, None])
def test_keys_with_one_wrong_item(place: int, junk: object) -> None:
    """Each item of encoded keys is checked for its type and range."""
    items = msgpack.unpackb(BlockKeys.of(SPEC, list(range(7))).to_bytes())
    items[place] = junk
    check_hostile(BlockKeys, msgpack.packb(items))


@pytest.mark.parametrize("kind", [KVSpec, BlockKeys])
def test_deep_nesting_is_a_format_error(kind: type[KVSpec | BlockKeys]) -> None:
    """Nesting beyond any limit raises FormatError, not RecursionError."""
    head = msgpack.packb(["kvtier.spec", 1])[1:]
    for depth in (100, 480, 505, 900, 1020, 5000, 100_000):
        nested = b"\x93" + head + b"\x92" + msgpack.packb("rope") + b"\x91" * depth + b"\xc0"
        for data in (nested, b"\x91" * depth + b"\xc0", b"\x81\xa0" * depth + b"\xc0"):
            with pytest.raises(FormatError):
                kind.from_bytes(data)


@pytest.mark.parametrize("kind", [KVSpec, BlockKeys])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90",
        b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=bytes.hex,
)
def test_lying_lengths_are_format_errors(kind: type[KVSpec | BlockKeys], data: bytes) -> None:
    """A header that announces more than there is costs nothing and is refused."""
    with pytest.raises(FormatError):
        kind.from_bytes(data)


# -- no prompt text in logs


def test_repr_shows_no_token_ids() -> None:
    """Neither keys nor what holds them print the ids of the unfinished block."""
    ids = [0x41424344] * 4 + [305419896, 305419896]
    keys = BlockKeys.of(SPEC, ids, "tenant-name")
    for text in (repr(keys), str(keys), f"{keys}", repr([keys]), repr({"keys": keys})):
        assert "305419896" not in text
        assert repr(keys.pending)[2:-1] not in text
        assert "xV4" not in text
        assert "tenant-name" not in text
