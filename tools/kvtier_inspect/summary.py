"""What a bundle holds, as a value, for people and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier_inspect.render import count, safe, size

if TYPE_CHECKING:
    from kvtier.identity import KVSpec

__all__ = ["Summary", "summary_facts", "summary_plain"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a bundle holds: specs by namespace, blocks, bytes uncompressed and in the file."""

    specs: dict[bytes, KVSpec]
    blocks: int
    content_bytes: int
    file_bytes: int
    sha256: str


def summary_facts(made: Summary) -> list[tuple[str, str]]:
    """Return what a bundle holds, for people."""
    share = f", {made.file_bytes / made.content_bytes:.0%}" if made.content_bytes else ""
    return [
        *(("spec", f"{key.hex()[:12]}  {safe(spec.model)}") for key, spec in made.specs.items()),
        ("blocks", count(made.blocks)),
        ("content", size(made.content_bytes)),
        ("file", f"{size(made.file_bytes)}{share}"),
        ("sha256", made.sha256),
    ]


def summary_plain(made: Summary) -> dict[str, Any]:
    """Return what a bundle holds, for JSON."""
    return {
        "namespaces": [key.hex() for key in made.specs],
        "blocks": made.blocks,
        "content_bytes": made.content_bytes,
        "file_bytes": made.file_bytes,
        "sha256": made.sha256,
    }
