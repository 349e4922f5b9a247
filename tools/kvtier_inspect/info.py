"""``info``: what a store holds, who writes it, and whether it is well."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.identity import KVSpec
from kvtier.live import live_of
from kvtier.tiers import keeper
from kvtier.tiers.record_io import probe_reads
from kvtier.tiers.segment import FORMAT_VERSION
from kvtier_inspect.opened import Finding, opened, plain
from kvtier_inspect.render import ExitCode, ago, console, count, emit, facts, safe, size
from kvtier_inspect.table import distinct, namespaces, total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tiers.entries import Entries
    from kvtier_inspect.opened import Opened

__all__ = ["NamespaceInfo", "StoreInfo", "namespaces_of", "run", "store_info"]

OTHERS_MODE = 0o077


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace; times in ns since 1970, 0 where there is no block. ``spec`` may be lost."""

    namespace: bytes
    spec: KVSpec | None
    blocks: int
    payload_bytes: int
    slot_bytes: int
    tenants: int
    hits: int
    created_ns: int
    last_use_ns: int

    @property
    def tokens(self) -> int | None:
        """Tokens that the blocks cover; None where the spec is lost."""
        return None if self.spec is None else self.blocks * self.spec.block_tokens


@dataclass(frozen=True, slots=True)
class Shown:
    """What the writer shows of itself while somebody looks."""

    host_blocks: int
    host_used_bytes: int
    host_limit_bytes: int
    ssd_limit_bytes: int
    rates: tuple[tuple[str, float], ...]
    """What its counters rise by in a second."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One store at one moment; sizes in bytes as they occupy the disk."""

    path: str
    writer: int | None
    source: str
    io: str
    mode: int
    namespaces: tuple[NamespaceInfo, ...]
    segments: int
    segment_disk_bytes: int
    index_disk_bytes: int
    free_bytes: int
    shown: Shown | None
    findings: tuple[Finding, ...]
    read_ns: int


def namespaces_of(entries: Entries, specs: Mapping[bytes, KVSpec]) -> tuple[NamespaceInfo, ...]:
    """Sum up the entries of each namespace; one that has a spec and no block is there too."""
    parts = namespaces(entries)
    found = [_namespace(name, specs.get(name), entries[rows]) for name, rows in parts.items()]
    empty = (
        NamespaceInfo(name, spec, 0, 0, 0, 0, 0, 0, 0)
        for name, spec in specs.items()
        if name not in parts
    )
    return (*found, *sorted(empty, key=lambda each: each.namespace))


def _namespace(name: bytes, spec: KVSpec | None, rows: Entries) -> NamespaceInfo:
    return NamespaceInfo(
        name, spec, len(rows), total(rows["payload_bytes"]), total(rows["slot_bytes"]),
        len(distinct(rows, "tenant")[0]), total(rows["hits"]),
        int(rows["created_ns"].min()), int(rows["last_use_ns"].max()),
    )  # fmt: skip


def shown_by(store: Opened) -> Shown | None:
    """Return what the writer of a store shows; None if there is none, or not yet."""
    live = live_of(store.directory.read_live(), time.time_ns())
    if live is None or store.writer == 0:
        return None
    try:
        host, limits = live["tiers"]["host"], live["limits"]
        rates = tuple((str(name), float(rate)) for name, rate in live["rates"].items())
        return Shown(
            int(host["ready"]),
            int(host["used_bytes"]),
            int(limits["host_bytes"]),
            int(limits["ssd_bytes"]),
            rates if all(isfinite(rate) for _, rate in rates) else (),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def store_info(store: Opened) -> StoreInfo:
    """Gather what ``info`` shows."""
    directory, fs = store.directory, store.fs
    findings = list(store.findings)
    mode = os.stat(store.path).st_mode & 0o7777
    if mode & OTHERS_MODE:
        findings.append(Finding(".", f"others may enter this directory (mode {mode:04o})"))
    names = [name for name in fs.names(directory.segments) if name.endswith(".seg")]
    there = dict.fromkeys(names, 0)
    for name in names:
        with suppress(OSError):  # the writer gave it up meanwhile
            there[name] = fs.disk_bytes(directory.segments, name)
    missing, blocks = np.unique(store.entries["segment"], return_counts=True)
    for segment, number in zip(missing.tolist(), blocks.tolist(), strict=True):
        if f"{segment:016x}.seg" not in there and store.writer == 0:
            where = f"segments/{segment:016x}.seg"
            findings.append(Finding(where, f"is gone, with {number} blocks that the index names"))
    found = namespaces_of(store.entries, store.specs)
    for each in found:
        if each.spec is None:
            where = f"specs/{each.namespace.hex()}.msgpack"
            findings.append(Finding(where, f"is missing: {each.blocks} blocks have no spec"))
    disk = os.statvfs(store.path)
    probed = probe_reads(directory.segments, fs, int(names[0][:16], 16)) if names else None
    return StoreInfo(
        store.path, store.writer, store.source, probed.io if probed else "unknown", mode,
        found, len(names), sum(there.values()),
        keeper.disk_bytes(directory.index_path), disk.f_bavail * disk.f_frsize,
        shown_by(store), tuple(findings), store.read_ns,
    )  # fmt: skip


def run(path: str, *, as_json: bool) -> int:
    """Print it; 1 if something is not as it should be."""
    with opened(path) as store:
        found = store_info(store)
    if as_json:
        emit(to_json(found))
    else:
        show(found)
    return ExitCode.PROBLEMS if found.findings else ExitCode.FINE


def to_json(info: StoreInfo) -> dict[str, Any]:
    """Return plain values."""
    return {
        "path": info.path,
        "format": FORMAT_VERSION,
        "writer_pid": info.writer,
        "entries_from": info.source,
        "io": info.io,
        "mode": info.mode,
        "tiers": {
            "ssd": {
                "blocks": sum(each.blocks for each in info.namespaces),
                "payload_bytes": sum(each.payload_bytes for each in info.namespaces),
                "slot_bytes": sum(each.slot_bytes for each in info.namespaces),
                "segments": info.segments,
                "segment_disk_bytes": info.segment_disk_bytes,
                "index_disk_bytes": info.index_disk_bytes,
            },
        },
        "writer_shows": asdict(info.shown) | {"rates": dict(info.shown.rates)}
        if info.shown
        else None,
        "disk_free_bytes": info.free_bytes,
        "read_ns": info.read_ns,
        "namespaces": [_namespace_json(each) for each in info.namespaces],
        "findings": [plain(each) for each in info.findings],
    }


def _namespace_json(each: NamespaceInfo) -> dict[str, Any]:
    spec = None
    if each.spec is not None:
        spec = {field.name: getattr(each.spec, field.name) for field in fields(KVSpec)}
    return {
        "namespace": each.namespace.hex(),
        "spec": spec,
        "blocks": each.blocks,
        "tokens": each.tokens,
        "payload_bytes": each.payload_bytes,
        "slot_bytes": each.slot_bytes,
        "tenants": each.tenants,
        "hits": each.hits,
        "created_ns": each.created_ns,
        "last_use_ns": each.last_use_ns,
    }


def show(info: StoreInfo) -> None:
    """Print it for people."""
    out = console()
    blocks = sum(each.blocks for each in info.namespaces)
    payload = sum(each.payload_bytes for each in info.namespaces)
    disk = info.segment_disk_bytes + info.index_disk_bytes
    within = f"({count(info.segments)} segments, index {size(info.index_disk_bytes)})"
    out.print(
        facts(
            [
                ("store", f"{info.path}, format {FORMAT_VERSION}"),
                ("writer", writer_words(info.writer)),
                ("ssd", f"{count(blocks)} blocks, {size(payload)} of KV"),
                ("on disk", f"{size(disk)} {within}"),
                ("disk free", size(info.free_bytes)),
                *_shown_words(info.shown),
                ("access", info.io),
                ("entries from", info.source),
                ("health", _health(info.findings)),
            ]
        )
    )
    for finding in info.findings:
        out.print(f"  {safe(finding.where)}: {safe(finding.what, 1000)}", style="yellow")
    for each in info.namespaces:
        out.print()
        _show_namespace(each, info.read_ns)


def _health(findings: Sequence[Finding]) -> str:
    return "good" if not findings else f"{len(findings)} things are not as they should be"


def _shown_words(shown: Shown | None) -> list[tuple[str, object]]:
    if shown is None:
        return []
    host = f"{count(shown.host_blocks)} blocks, {size(shown.host_used_bytes)}"
    rates = ", ".join(f"{safe(name)} {rate:,.1f}" for name, rate in shown.rates)
    return [
        ("host", f"{host} of {size(shown.host_limit_bytes)}"),
        ("ssd budget", size(shown.ssd_limit_bytes)),
        ("in a second", rates or "nothing"),
    ]


def writer_words(writer: int | None) -> str:
    """Say who writes a store."""
    if writer is None:
        return "unknown (this system does not list locks)"
    return f"process {writer}" if writer else "none, the store is closed"


def _show_namespace(each: NamespaceInfo, now_ns: int) -> None:
    out = console()
    out.print(f"namespace {each.namespace.hex()}", style="bold")
    tokens = "" if each.tokens is None else f", {count(each.tokens)} tokens"
    used = f"oldest {ago(each.created_ns, now_ns)}, last use {ago(each.last_use_ns, now_ns)}"
    held = f"{count(each.blocks)}{tokens}, {size(each.payload_bytes)}, tenants: {each.tenants}"
    rows: list[tuple[str, object]] = [("blocks", held), ("age", used), ("hits", count(each.hits))]
    if each.spec is None:
        rows.append(("spec", "lost"))
    else:
        rows += [(field.name, _spec_value(each.spec, field.name)) for field in fields(KVSpec)]
        rows.append(("block", f"{size(each.spec.block_layout.block_bytes)}"))
    out.print(facts((f"  {name}", value) for name, value in rows))


def _spec_value(spec: KVSpec, name: str) -> str:
    value = getattr(spec, name)
    if name == "parts":
        kinds = dict.fromkeys(value)
        shapes = ("+".join(f"{heads}x{width}" for heads, width in part) for part in kinds)
        return f"{len(value)} layers of {', '.join(shapes)}"
    if name == "rope":
        return ", ".join(f"{key}={item}" for key, item in value) or "none"
    return str(value)
