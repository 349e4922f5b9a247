"""The commands that ask or move: their arguments and help; each imports its work when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_inspect.looking import AsJson, StorePath, epilog

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


def declare(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(
        epilog=epilog(
            "size Llama-2-7B --tokens 4096",
            "size ./config.json --tokens 8192 --concurrency 100 --ssd 2TB",
            "size OPT-66B --tokens 512 --rate 10",
        )
    )(size)
    app.command(
        epilog=epilog(
            "plan --tokens 32768 --model llama-3-8b --device h100 --ssd-link 7GB/s",
            "plan --tokens 16384 --host 0:16 --ssd 16:60 --missing 60: --model llama-3-8b "
            "--device h100",
            "plan --token-file prompt.json --store /nvme/kvtier",
            "plan --tokens 8192 --token-bytes 131072 --prefill-rate 9000 --ssd-link 25Gbit/s",
        )
    )(plan)
    app.command(
        "export",
        epilog=epilog(
            "export /nvme/kvtier all.kvtb",
            "export /nvme/kvtier one.kvtb --prefix-of 3f9a01 --tenant alice",
        ),
    )(export_)
    app.command(
        "import",
        epilog=epilog(
            "import /nvme/other all.kvtb --dry-run",
            "import /nvme/other all.kvtb --ssd-bytes 200GiB",
        ),
    )(import_)
    app.command(
        epilog=epilog(
            "purge /nvme/kvtier --tenant alice",
            "purge /nvme/kvtier --older-than 30d --yes",
            "purge /nvme/kvtier --namespace 3f9a",
        )
    )(purge)
    app.command(
        epilog=epilog(
            "diff /nvme/a /nvme/b",
            "diff /nvme/kvtier@3f9a /nvme/kvtier@07c1",
            "diff a.json /nvme/b",
        )
    )(diff)
    app.command(epilog=epilog("repair /nvme/kvtier --dry-run", "repair /nvme/kvtier --yes"))(repair)


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


def plan(  # noqa: PLR0913 - one for each option
    *,
    tokens: Annotated[int | None, typer.Option(help="Length of the prompt.", min=1)] = None,
    token_file: Annotated[
        str, typer.Option(help="The prompt's token ids, as JSON or numbers; never shown.")
    ] = "",
    store: Annotated[str, typer.Option(help="Where blocks are looked up, and its costs.")] = "",
    namespace: Namespace = "",
    tenant: Annotated[str, typer.Option(help="The prompt's tenant.")] = "",
    adapter: Annotated[str, typer.Option(help="The prompt's adapter, by content digest.")] = "",
    resident: Annotated[
        str, typer.Option("--device-blocks", help="Blocks that the engine holds, such as 0:4.")
    ] = "",
    host: Annotated[str, typer.Option(help="Blocks in host memory, such as 0:16,20:24.")] = "",
    ssd: Annotated[
        str, typer.Option(help="Blocks on the SSD, such as 16:64; all, if nothing is said.")
    ] = "",
    missing: Annotated[str, typer.Option(help="Blocks that are nowhere.")] = "",
    model: Annotated[str, typer.Option(help="A model by name, or its config.json.")] = "",
    device: Annotated[
        str, typer.Option(help="What recomputes: a profile's name, or with --store the store's.")
    ] = "",
    ssd_link: Annotated[str, typer.Option(help="A link's name or rate, such as 7GB/s.")] = "",
    host_link: Annotated[str, typer.Option(help="As --ssd-link, for host memory.")] = "",
    prefill_rate: Annotated[
        float | None, typer.Option(help="Tokens/s that recomputing gives, in place of a profile.")
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="Bytes of KV per token, in place of a model.", min=1)
    ] = None,
    step_blocks: Annotated[
        int, typer.Option(help="Blocks that one step recomputes at most.", min=1)
    ] = 1,
    json: AsJson = False,
) -> int:
    """Say what kvtier would do for a prompt, how long each way takes, and where they break even.

    Costs are those that a store has learned (--store), a profile's (--model with --device), or
    given ones (--prefill-rate, --ssd-link), which come first.
    """
    from kvtier_inspect.plan_command import Asked, run

    asked = Asked(
        tokens=tokens,
        token_file=token_file,
        tenant=tenant,
        adapter=adapter,
        store=store,
        namespace=namespace,
        device_blocks=resident,
        host_blocks=host,
        ssd_blocks=ssd,
        missing_blocks=missing,
        model=model,
        device=device,
        ssd_link=ssd_link,
        host_link=host_link,
        prefill_rate=prefill_rate,
        token_bytes=token_bytes,
        step_blocks=step_blocks,
    )
    return run(asked, as_json=json)


def export_(
    store: StorePath,
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The file to make.")],
    *,
    namespace: Namespace = "",
    tenant: Tenant = None,
    hashes: Annotated[
        list[str] | None,
        typer.Option("--hash", help="Only blocks whose hash begins so; repeat for more."),
    ] = None,
    prefix_of: Annotated[
        str, typer.Option(help="Only this block and the blocks before it in its prompt.")
    ] = "",
    json: AsJson = False,
) -> int:
    """Copy blocks of a store, closed or live, to one portable compressed file.

    Every block is verified as it is read. The file holds KV, which is as private as the prompts
    it was made from.
    """
    from kvtier_inspect.exporting import Selection, run

    chosen = Selection(namespace, tenant, tuple(hashes or ()), prefix_of)
    return run(store, bundle, chosen, as_json=json)


def import_(
    store: StorePath,
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The file to read.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify, write nothing.")] = False,
    ssd_bytes: Annotated[
        str,
        typer.Option(
            help="What the store may occupy on disk, such as 200GiB; no limit if not given."
        ),
    ] = "",
    key_file: KeyFile = "",
    json: AsJson = False,
) -> int:
    """Write a bundle's blocks into a store that no engine has open, making it if it is new.

    CHANGES THE STORE. All of the bundle is verified before anything is written; blocks that are
    there are left as they are, and nothing is evicted. An engine gives up what is over its own
    budget when it opens the store. The bundle's checksums find damage, not forgery: import what
    you trust, or give --key-file, and only blocks with that key's tag are taken.
    """
    from kvtier_inspect.importing import run

    return run(store, bundle, key_file=key_file, ssd_bytes=ssd_bytes, dry_run=dry_run, as_json=json)


def purge(
    store: StorePath,
    *,
    namespace: Namespace = "",
    tenant: Tenant = None,
    older_than: Annotated[
        str, typer.Option(help="Only what was not used for so long, such as 12h or 30d.")
    ] = "",
    yes: Yes = False,
    json: AsJson = False,
) -> int:
    """Remove blocks for good, and destroy their bytes on disk.

    CHANGES THE STORE, which no engine may have open (an engine has store.purge). Shows what would
    go and asks. Bytes that blocks evicted earlier left on disk are destroyed too, whosever they
    were.
    """
    from kvtier_inspect.purge_command import run

    return run(
        store, namespace=namespace, tenant=tenant, older_than=older_than, yes=yes, as_json=json
    )


def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="STORE, STORE@NAMESPACE or a spec's file.")
    ],
    second: Annotated[
        str, typer.Argument(metavar="[B]", help="As A; without it, the two specs of store A.")
    ] = "",
    *,
    json: AsJson = False,
) -> int:
    """Say why one spec does not hit what another one stored, field by field.

    A spec's file is the one in a store's specs folder, or a JSON object with KVSpec's fields.
    """
    from kvtier_inspect.diff import run

    return run(first, second, as_json=json)


def repair(
    store: StorePath,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> int:
    """Make the index anew from the records' headers, and drop what is damaged.

    CHANGES THE STORE, which no engine may have open. Reads every record, shows what it found and
    asks. Damaged records are destroyed; sound ones that the index did not name any more, such as
    those of evicted blocks, are found again. An engine repairs its index by itself when it cannot
    be read; this also finds damaged records before a restore does.
    """
    from kvtier_inspect.repair import run

    return run(store, dry_run=dry_run, yes=yes, as_json=json)
