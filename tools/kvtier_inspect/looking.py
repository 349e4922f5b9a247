"""The commands that look: their arguments and help; each imports its work when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_inspect.render import CODES

__all__ = ["AsJson", "StorePath", "declare", "epilog"]

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, numbers raw.")]


def epilog(*examples: str) -> str:
    """Return the end of a command's help: how it is called, and what its exit code says."""
    lines = "\n".join(f"  kvtier-inspect {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\n{CODES}"


def declare(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog=epilog("info /nvme/kvtier", "info --json /nvme/kvtier"))(info)


def info(store: StorePath, *, json: AsJson = False) -> int:
    """Show what a store holds: namespaces, specs, blocks, bytes, writer, health."""
    from kvtier_inspect.info import run

    return run(store, as_json=json)
