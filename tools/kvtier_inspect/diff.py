"""`diff`: why one spec does not hit what another one stored, field by field."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import FormatError
from kvtier.identity import SPEC_BYTES_MAX, KVSpec, spec_differences
from kvtier.tiers.directory import ReadDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier_inspect.render import ExitCode, columns, console, emit, facts, safe, size
from kvtier_inspect.selecting import namespace_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Difference", "differences", "named_specs", "read_spec", "run"]

_WIDTH: Final = "K and V have other shapes: the bytes of a block mean something else"
_OTHERS: Final = "it is another rank's part of the model: other heads, or other layers"
_WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "another model's values; it is also in the root of the hash chain: other hashes",
        "weights": "values computed by other weights; also in the root of the chain: other hashes",
        "dtype": "the bytes are numbers of another type",
        "layers": "other layers: another model, or another part of it",
        "kv_heads": _WIDTH,
        "head_dim": _WIDTH,
        "v_head_dim": _WIDTH,
        "parts": _WIDTH,
        "quantization": "quantised weights compute other values",
        "kv_scales": "the same bytes stand for other values",
        "layout": "heads and tokens lie in another order within a tensor",
        "rope": "keys are rotated by other angles",
        "tp_rank": _OTHERS,
        "tp_size": _OTHERS,
        "pp_rank": _OTHERS,
        "pp_size": _OTHERS,
        "block_tokens": "blocks end at other tokens: other hashes too",
        "version": "of another version of the format",
    }
)
"""Why a hit is impossible if a field of a spec differs. Every field changes the namespace."""
_CHAIN: Final = ("model", "weights", "block_tokens")
"""Fields that change the blocks' hashes too."""
_DERIVED: Final = ("kv_heads", "head_dim", "v_head_dim", "layers")
"""Fields that say in short what ``parts`` says at length."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two specs differ, in words, and why that excludes a hit.

    ``hashes`` says whether the blocks' hashes differ too, and not only the namespace.
    """

    field: str
    a: str
    b: str
    why: str
    hashes: bool


def differences(a: KVSpec, b: KVSpec) -> list[Difference]:
    """Return what differs, in the order of the spec's fields; none means the same namespace."""
    found = spec_differences(a, b)
    short = [name for name in _DERIVED if name in found and all(found[name])]
    if short:
        found.pop("parts", None)
    if "head_dim" in found and all(spec.v_head_dim == spec.head_dim for spec in (a, b)):
        found.pop("v_head_dim")
    return [
        Difference(name, *_words(name, *values), _WHY[name], name in _CHAIN)
        for name, values in found.items()
    ]


def _words(name: str, a: Any, b: Any) -> tuple[str, str]:
    if name == "parts":
        return _layers(a, b), _layers(b, a)
    if name == "rope":
        return _pairs(a, b), _pairs(b, a)
    return str(a), str(b)


def _layers(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Name the layers whose shapes differ, with the first one's."""
    differ = [
        layer for layer, shape in enumerate(mine) if shape != (*theirs, *mine)[layer : layer + 1][0]
    ]
    if not differ:
        return f"{len(mine)} layers"
    shape = " ".join(f"{heads}x{width}" for heads, width in mine[differ[0]])
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"layer {differ[0]}{more}: {shape}"


def _pairs(mine: Sequence[tuple[str, Any]], theirs: Sequence[tuple[str, Any]]) -> str:
    """Name the settings that differ, and how."""
    others = dict(theirs)
    return ", ".join(
        f"{name}={value}"
        for name, value in mine
        if name not in others or others[name] != value or type(others[name]) is not type(value)
    ) or "none of the other's"  # fmt: skip


# -- where specs are from


def named_specs(first: str, second: str) -> list[tuple[str, KVSpec]]:
    """Return two specs with what to call them; one store that holds two specs is enough.

    Each is a store, a store with the first digits of a namespace (STORE@3f9a), or a file.
    """
    if second:
        return [(each, read_spec(each)) for each in (first, second)]
    specs = _store_specs(first)
    if len(specs) != 2:
        raise ValueError(
            f"{first}: it holds {len(specs)} specs; name two, as STORE@DIGITS: {_listed(specs)}"
        )
    return [(f"{first}@{each.hex()[:12]}", spec) for each, spec in sorted(specs.items())]


def read_spec(named: str) -> KVSpec:
    """Return the spec of a store, of STORE@DIGITS, or of a file; ``ValueError`` lists choices."""
    path, at, digits = (named, "", "") if os.path.exists(named) else named.rpartition("@")
    if not path:
        path, digits = digits, ""
    if os.path.isfile(path) and not at:
        return _file_spec(path)
    specs = _store_specs(path)
    if not specs:
        raise ValueError(f"{path}: the store holds no readable spec")
    try:
        return specs[namespace_of(digits, specs, specs)]
    except ValueError as error:
        hint = "" if digits else f"; name one, as {path}@DIGITS"
        raise ValueError(f"{path}: {error}{hint}") from None


def _store_specs(path: str) -> dict[bytes, KVSpec]:
    directory = ReadDirectory(path, PosixFileSystem())
    try:
        return directory.read_specs()[0]
    finally:
        directory.close()


def _file_spec(path: str) -> KVSpec:
    with open(path, "rb") as file:
        data = file.read(SPEC_BYTES_MAX + 1)
    if len(data) > SPEC_BYTES_MAX:
        raise ValueError(f"{path}: over {SPEC_BYTES_MAX} bytes, which no spec is")
    if not data.lstrip().startswith(b"{"):
        try:
            return KVSpec.from_bytes(data)
        except FormatError as error:
            raise ValueError(f"{path}: {error}; a spec's encoding or JSON is wanted") from None
    try:
        value = json.loads(data)
        return KVSpec(**{name: _tuples(each) for name, each in value.items()})
    except (ValueError, TypeError, RecursionError) as error:
        names = ", ".join(field.name for field in fields(KVSpec))
        raise ValueError(f"{path}: {error}; a JSON object with fields of {names}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _listed(specs: Mapping[bytes, KVSpec]) -> str:
    return ", ".join(f"{each.hex()[:12]} ({spec.model})" for each, spec in specs.items()) or "none"


# -- the command


def run(first: str, second: str, *, as_json: bool) -> int:
    """Print what differs between two specs."""
    (name_a, a), (name_b, b) = named_specs(first, second)
    found = differences(a, b)
    if as_json:
        plain = [
            {"name": name, "namespace": spec.namespace.hex(), "model": spec.model}
            for name, spec in ((name_a, a), (name_b, b))
        ]
        rows = [
            {"field": d.field, "a": d.a, "b": d.b, "why": d.why, "hashes": d.hashes} for d in found
        ]
        emit({"specs": plain, "same": not found, "differences": rows})
        return ExitCode.PROBLEMS if found else ExitCode.FINE
    out = console()
    out.print(facts([("A", _facts(name_a, a)), ("B", _facts(name_b, b))]))
    if not found:
        out.print(
            "the same namespace: each hits what the other stored, for the same tokens, tenant, "
            "adapter and extra items"
        )
        return ExitCode.FINE
    out.print(columns(
        ["field", "A", "B", "why no hit"],
        [(d.field, d.a, d.b, d.why) for d in found],
        left=["field", "A", "B", "why no hit"],
    ))  # fmt: skip
    hashes = " Their blocks' hashes differ as well." if any(d.hashes for d in found) else ""
    out.print(f"other namespaces: neither ever hits what the other stored.{hashes}")
    return ExitCode.PROBLEMS


def _facts(name: str, spec: KVSpec) -> str:
    nbytes = size(spec.block_layout.block_bytes)
    return (
        f"{safe(name)}: {safe(spec.model)}, {nbytes} a block, namespace {spec.namespace.hex()[:16]}"
    )
