"""The first process: read the document once, store its KV cache, exit."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer
from rich.console import Console

import kvtier_hf
from kvtier_demo.prompt import Reader


def main(
    folder: Path,
    tokens: Annotated[int, typer.Option()],
    threads: Annotated[int, typer.Option()],
) -> None:
    """Prefill the document and store its full blocks in ``folder``."""
    console = Console()
    with console.status("process A: loading the model") as status:
        reader = Reader.load(tokens, threads, status.update)
        status.update("process A: reading the document")
        with kvtier_hf.open(reader.model, folder, host_bytes=0, calibrate=False) as kv:
            begun = time.perf_counter()
            cache = kv.prefill(reader.document)
            seconds = time.perf_counter() - begun
            stored = kv.put(cache).result(timeout=60)
            kv.store.flush()
            size = kv.store.stats()["tiers"]["ssd"]["used_bytes"]
    console.print(
        f"process A read {reader.document.shape[1]} tokens in {seconds:.1f} s and stored "
        f"{stored.stored} blocks ({size / 1e6:.0f} MB on disk); it is gone now."
    )


if __name__ == "__main__":
    typer.run(main)
