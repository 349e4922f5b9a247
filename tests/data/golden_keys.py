"""Write golden_keys.json: frozen identities, computed without kvtier and without msgpack.

Run it only for a new format version; a change of its output is a bug otherwise::

    python tests/data/golden_keys.py > tests/data/golden_keys.json

The msgpack encoder below is written from the msgpack specification for the few types that occur,
and the encodings of the smallest case are also spelled out byte by byte, so that three things must
agree: the documented encoding, this file, and kvtier.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from typing import Any

NOTE = (
    "Made by tests/data/golden_keys.py with hashlib and struct only: no kvtier, no msgpack. "
    "Stored blocks are addressed by these values; they change with a new format version only."
)


def pack(value: Any) -> bytes:  # noqa: PLR0911 - one return per type
    """Encode as msgpack, shortest form."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return pack_int(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return sized(len(data), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + data
    if isinstance(value, bytes):
        return sized(len(value), None, (0xC4, 0xC5, 0xC6)) + value
    return sized(len(value), (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(map(pack, value))


def pack_int(value: int) -> bytes:
    """Encode an integer in the fewest bytes."""
    if -32 <= value < 128:
        return struct.pack("b", value)
    unsigned = ((0xCC, "B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
    signed = ((0xD0, "b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
    for tag, code in unsigned if value >= 0 else signed:
        try:
            return bytes([tag]) + struct.pack(code, value)
        except struct.error:
            continue
    raise ValueError(value)


def sized(size: int, fixed: tuple[int, int] | None, tags: tuple[int | None, int, int]) -> bytes:
    """Encode a length with the smallest header that holds it."""
    if fixed is not None and size < fixed[1]:
        return bytes([fixed[0] | size])
    for tag, code, limit in zip(tags, ("B", ">H", ">I"), (1 << 8, 1 << 16, 1 << 32), strict=True):
        if tag is not None and size < limit:
            return bytes([tag]) + struct.pack(code, size)
    raise ValueError(size)


def sha(data: bytes) -> bytes:
    """Return the SHA-256 digest."""
    return hashlib.sha256(data).digest()


def case(
    name: str,
    arguments: dict[str, Any],
    resolved: list[list[Any]],
    prompt: dict[str, Any],
) -> dict[str, Any]:
    """Compute one vector. ``prompt["tokens"]`` is [first, step, count, modulus]."""
    fields = dict(resolved)
    first, step, count, modulus = prompt["tokens"]
    ids = [(first + step * index) % modulus for index in range(count)]
    extra = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in prompt["extra"]]
    spec = pack(["kvtier.spec", 1, *resolved])
    root = pack(
        [
            "kvtier.root", 1, fields["model"], fields["weights"], prompt["tenant"],
            prompt["adapter"], extra,
        ]
    )  # fmt: skip
    hashes, previous = [], sha(root)
    width = fields["block_tokens"]
    for start in range(0, count - width + 1, width):
        previous = sha(previous + struct.pack(f"<{width}I", *ids[start : start + width]))
        hashes.append(previous.hex())
    return {
        "name": name,
        "spec": arguments,
        "prompt": prompt,
        "spec_encoding": spec.hex() if len(spec) < 512 else None,
        "root_encoding": root.hex() if len(root) < 512 else None,
        "namespace": sha(spec).hex(),
        "root": sha(root).hex(),
        "tenant_digest": sha(prompt["tenant"].encode()).hex(),
        "hashes": hashes,
    }


def resolved(**fields: Any) -> list[list[Any]]:
    """Return every field of a spec in declaration order, defaults filled in."""
    default = {
        "model": None, "weights": None, "dtype": None, "layers": None, "kv_heads": 0,
        "head_dim": 0, "v_head_dim": 0, "parts": [], "quantization": "none", "kv_scales": "none",
        "layout": "hnd", "rope": [], "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1,
        "block_tokens": 256, "version": 1,
    }  # fmt: skip
    if fields.keys() - default.keys():
        raise ValueError(fields)
    return [[name, fields.get(name, value)] for name, value in default.items()]


SMALL_SPEC = bytes.fromhex(
    "dc0014"  # array of 20
    "ab" + b"kvtier.spec".hex() + "01"
    "92" "a5" + b"model".hex() + "a1" + b"m".hex() +
    "92" "a7" + b"weights".hex() + "a1" + b"w".hex() +
    "92" "a5" + b"dtype".hex() + "a7" + b"float32".hex() +
    "92" "a6" + b"layers".hex() + "01"
    "92" "a8" + b"kv_heads".hex() + "01"
    "92" "a8" + b"head_dim".hex() + "02"
    "92" "aa" + b"v_head_dim".hex() + "02"
    "92" "a5" + b"parts".hex() + "91" "92" "920102" "920102"
    "92" "ac" + b"quantization".hex() + "a4" + b"none".hex() +
    "92" "a9" + b"kv_scales".hex() + "a4" + b"none".hex() +
    "92" "a6" + b"layout".hex() + "a3" + b"hnd".hex() +
    "92" "a4" + b"rope".hex() + "90"
    "92" "a7" + b"tp_rank".hex() + "00"
    "92" "a7" + b"tp_size".hex() + "01"
    "92" "a7" + b"pp_rank".hex() + "00"
    "92" "a7" + b"pp_size".hex() + "01"
    "92" "ac" + b"block_tokens".hex() + "02"
    "92" "a7" + b"version".hex() + "01"
)  # fmt: skip
SMALL_ROOT = bytes.fromhex(
    "97" "ab" + b"kvtier.root".hex() + "01"
    "a1" + b"m".hex() + "a1" + b"w".hex() + "a1" + b"t".hex() + "a0" "90"
)  # fmt: skip


def main() -> None:
    """Print the file."""
    small = case(
        "small",
        {"model": "m", "weights": "w", "dtype": "float32", "layers": 1, "kv_heads": 1,
         "head_dim": 2, "block_tokens": 2},
        resolved(model="m", weights="w", dtype="float32", layers=1, kv_heads=1, head_dim=2,
                 v_head_dim=2, parts=[[[1, 2], [1, 2]]], block_tokens=2),
        {"tokens": [1, 1, 5, 1 << 32], "tenant": "t", "adapter": "", "extra": []},
    )  # fmt: skip
    # The chain of [1, 2 | 3, 4 | 5] once more, from the bytes.
    first = sha(sha(SMALL_ROOT) + bytes.fromhex("0100000002000000"))
    second = sha(first + bytes.fromhex("0300000004000000"))
    if (small["spec_encoding"], small["root_encoding"], small["hashes"]) != (
        SMALL_SPEC.hex(), SMALL_ROOT.hex(), [first.hex(), second.hex()],
    ):  # fmt: skip
        sys.exit("the encoder and the spelled-out bytes disagree")
    llama = case(
        "llama-8b, rank 1 of 2",
        {"model": "org/llama-8b", "weights": "sha256:" + "ab" * 32, "dtype": "bfloat16",
         "layers": 32, "kv_heads": 4, "head_dim": 128, "tp_rank": 1, "tp_size": 2,
         "rope": [["type", "llama3"], ["theta", 500000], ["factor", 8.0]]},
        resolved(model="org/llama-8b", weights="sha256:" + "ab" * 32, dtype="bfloat16", layers=32,
                 kv_heads=4, head_dim=128, v_head_dim=128, parts=[[[4, 128], [4, 128]]] * 32,
                 tp_rank=1, tp_size=2,
                 rope=[["factor", 8.0], ["theta", 500000.0], ["type", "llama3"]]),
        {"tokens": [7, 7919, 1000, 128256], "tenant": "", "adapter": "", "extra": []},
    )  # fmt: skip
    mixed = case(
        "layers that differ, V narrower, tenant, adapter and extra",
        {"model": "modèle", "weights": "w" * 300, "dtype": "float8_e4m3fn", "layers": 3,
         "parts": [[[8, 192], [8, 128]], [[1, 576]], [[70000, 2], [1, 2]]],
         "quantization": "awq", "kv_scales": "k=0.5,v=0.25", "layout": "nhd",
         "rope": [["scaled", True], ["none", None]], "pp_rank": 1, "pp_size": 3,
         "block_tokens": 64},
        resolved(model="modèle", weights="w" * 300, dtype="float8_e4m3fn", layers=3,
                 parts=[[[8, 192], [8, 128]], [[1, 576]], [[70000, 2], [1, 2]]],
                 quantization="awq", kv_scales="k=0.5,v=0.25", layout="nhd",
                 rope=[["none", None], ["scaled", 1.0]], pp_rank=1, pp_size=3, block_tokens=64),
        {"tokens": [(1 << 32) - 100, 1, 200, 1 << 32], "tenant": "acme", "adapter": "lora:1",
         "extra": ["image", {"hex": "00ff"}, -5, (1 << 64) - 1]},
    )  # fmt: skip
    json.dump({"note": NOTE, "cases": [small, llama, mixed]}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
