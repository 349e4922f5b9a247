"""The commands that look: their arguments and help; each imports its work when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_inspect.render import CODES

__all__ = ["AsJson", "StorePath", "declare", "epilog"]

PAGE_LINES_MAX = 100_000
"""Lines of one page; each is a few Python objects."""
StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, numbers raw.")]

Namespace = Annotated[
    str, typer.Option(metavar="HEX", help="Only namespaces that begin with these digits.")
]
Tenant = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this tenant; '' is nobody in particular.")
]
Offset = Annotated[int, typer.Option(min=0, help="How many to pass over.")]
Limit = Annotated[int, typer.Option(min=1, max=PAGE_LINES_MAX, help="How many to show.")]


def epilog(*examples: str) -> str:
    """Return the end of a command's help: how it is called, and what its exit code says."""
    lines = "\n".join(f"  kvtier-inspect {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\n{CODES}"


def declare(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog=epilog("info /nvme/kvtier", "info --json /nvme/kvtier"))(info)
    app.command(
        epilog=epilog(
            "ls /nvme/kvtier", "ls /nvme/kvtier --sort hits --limit 10", "ls . --tenant me"
        )
    )(ls)
    app.command(
        epilog=epilog("tree /nvme/kvtier", "tree /nvme/kvtier --namespace 2118bd --sort used")
    )(tree)
    app.command(epilog=epilog("check /nvme/kvtier", "check --json /nvme/kvtier"))(check)
    app.command(epilog=epilog("show /nvme/kvtier 2118bd95/00652d5e", "show . 00652d5e --json"))(
        show
    )
    app.command(epilog=epilog("du /nvme/kvtier", "du /nvme/kvtier --tenant acme --json"))(du)
    app.command(epilog=epilog("stats /nvme/kvtier", "stats --json /nvme/kvtier"))(stats)
    app.command(
        epilog=epilog(
            "timeline restore.jsonl",
            "timeline restore.jsonl --html restore.html --perfetto restore.json",
            "timeline restore.jsonl --faster ssd=2",
            "timeline engine.et --svg engine.svg",
        )
    )(timeline)


def show(
    store: StorePath,
    block: Annotated[
        str,
        typer.Argument(metavar="HASH", help="The block's first hex digits, or NAMESPACE/HASH."),
    ],
    *,
    json: AsJson = False,
) -> int:
    """Show one block: identity, place, use, parts, neighbours, and whether its bytes are right."""
    from kvtier_inspect.block import run

    return run(store, block, as_json=json)


def timeline(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="JSON lines, or a Chakra execution trace.")
    ],
    *,
    svg: Annotated[str, typer.Option(metavar="FILE", help="Draw it as a picture.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="As a page of its own.")] = "",
    perfetto: Annotated[
        str, typer.Option(metavar="FILE", help="As Chrome trace JSON, for ui.perfetto.dev.")
    ] = "",
    chakra: Annotated[
        str, typer.Option(metavar="FILE", help="As an MLCommons Chakra execution trace.")
    ] = "",
    jsonl: Annotated[str, typer.Option(metavar="FILE", help="As kvtier's JSON lines.")] = "",
    faster: Annotated[
        list[str] | None,
        typer.Option(metavar="LANE=FACTOR", help="As if a lane were so many times faster."),
    ] = None,
    session: Annotated[int, typer.Option(help="Only this restore; -1: all.", min=-1)] = -1,
    json: AsJson = False,
) -> int:
    """Draw what each lane did when: one look shows how loads and recomputing overlap."""
    from kvtier_inspect.tracing import run

    files = {"svg": svg, "html": html, "perfetto": perfetto, "chakra": chakra, "jsonl": jsonl}
    return run(trace, files, faster or (), session=session, as_json=json)


def du(
    store: StorePath, *, namespace: Namespace = "", tenant: Tenant = None, json: AsJson = False
) -> int:
    """Say where the bytes on disk are: by namespace and tenant, free slots, index."""
    from kvtier_inspect.usage import run

    return run(store, namespace=namespace, tenant=tenant, as_json=json)


def stats(
    store: StorePath, *, namespace: Namespace = "", tenant: Tenant = None, json: AsJson = False
) -> int:
    """Sum up reuse: sharing, holes, hits, ages, bytes written in a day, learned costs."""
    from kvtier_inspect.stats import run

    return run(store, namespace=namespace, tenant=tenant, as_json=json)


def check(store: StorePath, *, json: AsJson = False) -> int:
    """Read every record and verify it: checksums, and what the index says. Repairs nothing."""
    from kvtier_inspect.check import run

    return run(store, as_json=json)


def ls(
    store: StorePath,
    *,
    namespace: Namespace = "",
    tenant: Tenant = None,
    sort: Annotated[str, typer.Option(help="used, age, hits, size, position or hash.")] = "used",
    offset: Offset = 0,
    limit: Limit = 50,
    json: AsJson = False,
) -> int:
    """List blocks: position, size, age, use, and how each hangs together with the others."""
    from kvtier_inspect import listing

    return listing.ls(
        store, namespace=namespace, tenant=tenant, sort=sort, offset=offset, limit=limit,
        as_json=json,
    )  # fmt: skip


def tree(
    store: StorePath,
    *,
    namespace: Namespace = "",
    tenant: Tenant = None,
    sort: Annotated[str, typer.Option(help="size, used, hits or age.")] = "size",
    offset: Offset = 0,
    limit: Limit = 50,
    json: AsJson = False,
) -> int:
    """Show the prefix forest: shared heads, their branches, tails after holes; a run a line."""
    from kvtier_inspect import listing

    return listing.tree(
        store, namespace=namespace, tenant=tenant, sort=sort, offset=offset, limit=limit,
        as_json=json,
    )  # fmt: skip


def info(store: StorePath, *, json: AsJson = False) -> int:
    """Show what a store holds: namespaces, specs, blocks, bytes, writer, health."""
    from kvtier_inspect.info import run

    return run(store, as_json=json)
