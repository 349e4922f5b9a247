"""The commands that ask or move: their arguments and help; each imports its work when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_inspect.looking import AsJson, epilog

__all__ = ["declare"]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
KeyFile = Annotated[
    str,
    typer.Option("--key-file", help="File with the store's integrity_key, its bytes as they are."),
]
Namespace = Annotated[
    str, typer.Option("--namespace", help="Only this namespace: its first hex digits.")
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help='Only this tenant\'s blocks ("": those of none).')
]
Bundle = Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's file.")]


def declare(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(
        epilog=epilog(
            "size Llama-2-7B --tokens 4096",
            "size ./config.json --tokens 8192 --concurrency 100 --ssd 2TB",
            "size OPT-66B --tokens 512 --rate 10",
        )
    )(size)


def size(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_CONFIG", help="A config.json, or a model by name.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of one request.", min=1)],
    *,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="Of the KV; the config's if not given.")] = "",
    host: Annotated[str, typer.Option(help="A host memory budget, such as 64GiB.")] = "",
    ssd: Annotated[str, typer.Option(help="An SSD budget, such as 2TB.")] = "",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s that load their tokens: which link fills first."),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="Only this link, a name or a rate such as 25Gbit/s; repeat for more."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Say how large a model's KV is, from its config alone, and how far budgets and links go."""
    from kvtier_inspect.size import run

    return run(
        model,
        tokens,
        concurrency=concurrency,
        dtype=dtype,
        budgets={"host": host, "ssd": ssd},
        rate=rate,
        links=link or (),
        as_json=json,
    )
