"""The main job, start to end: one process stores a document's KV, the next one restores it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Annotated

import typer

THREADS_HELP = "Compute threads. More than the idle cores make every way slower."


def demo(
    tokens: Annotated[int, typer.Option(help="Length of the document.", min=512)] = 2048,
    questions: Annotated[int, typer.Option(help="Questions to answer.", min=1, max=3)] = 3,
    answer_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 24,
    threads: Annotated[int, typer.Option(help=THREADS_HELP, min=1)] = 1,
    json: Annotated[
        str, typer.Option(help="Also write the numbers to this file ('-': standard output).")
    ] = "",
) -> None:
    """Store a long document's KV cache in one process and restore it in the next, three ways.

    Process A reads the document with SmolLM2-135M and stores its KV cache in a temporary folder.
    Process B answers questions about it by recomputing (stock transformers), by loading, and by
    kvtier's plan, over links of three speeds, and shows that the answers are the same.
    """
    common = ["--tokens", str(tokens), "--threads", str(threads)]
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        run(["-m", "kvtier_demo.remember", folder, *common])
        asked = ["--questions", str(questions), "--answer-tokens", str(answer_tokens)]
        run(["-m", "kvtier_demo.ask", folder, *common, *asked, "--json-file", json])


def run(arguments: list[str]) -> None:
    """Run one process of the demo; its failure is the demo's."""
    code = subprocess.run([sys.executable, *arguments], check=False).returncode  # noqa: S603 - this interpreter
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(demo)
