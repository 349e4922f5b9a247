"""`purge`: what goes, what stays, and that it is gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import (
    SLOT_BYTES,
    SPEC,
    assert_sound,
    bring_back,
    expected,
    prompt,
    prompt_keys,
    put,
    segment_files,
    variant,
)

import kvtier
from kvtier.tiers.entries import id_at, location_at
from kvtier_inspect import cli
from kvtier_inspect.locked import locked
from kvtier_inspect.opened import opened

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER = variant(model="test/other")


@pytest.fixture
def full(tmp_path: Path) -> str:
    """Make a store with two tenants' blocks of one spec, and three of another."""
    path = str(tmp_path / "full")
    with contextlib.closing(kvtier.open(path, SPEC, ssd_bytes="8MiB")) as store:
        put(store, store.keys(prompt(4, 1), tenant="me"))
        put(store, store.keys(prompt(4, 2), tenant="you"))
    with contextlib.closing(kvtier.open(path, OTHER, ssd_bytes="8MiB")) as store:
        put(store, prompt_keys(3, 3, OTHER))
    return path


def tenant_keys(tenant: str, seed: int) -> kvtier.BlockKeys:
    """Return the keys of one of the tenants' prompts."""
    return kvtier.BlockKeys.of(SPEC, prompt(4, seed), tenant=tenant)


def on_disk(path: str, needle: bytes) -> bool:
    """Whether some segment holds these bytes."""
    return any(needle in Path(name).read_bytes() for name in segment_files(path))


def test_a_tenants_blocks_go_and_the_others_stay(
    full: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their bytes are not on the disk any more, a rebuild finds none, and an engine is content."""
    assert cli.run(["purge", full, "--tenant", "me", "--yes", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value == {"blocks": 4, "destroyed_bytes": 4 * SLOT_BYTES}
    mine, theirs = tenant_keys("me", 1), tenant_keys("you", 2)
    assert not any(on_disk(full, expected(mine, block)[:64]) for block in range(4))
    for name in ("data.mdb", "lock.mdb"):
        os.unlink(f"{full}/index/{name}")
    with contextlib.closing(kvtier.open(full, SPEC, ssd_bytes="8MiB")) as store:
        assert store.lookup(mine).stored == 0
        assert bring_back(store, theirs).loaded == 4
        assert_sound(store)


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["--namespace", OTHER.namespace.hex()[:9]], 8),
        (["--tenant", ""], 8),
        (["--tenant", "you", "--namespace", SPEC.namespace.hex()], 7),
        (["--older-than", "0s"], 0),
    ],
)
def test_filters(full: str, filters: list[str], left: int) -> None:
    """By namespace, tenant and age; what matches all that is given goes."""
    assert cli.run(["purge", full, *filters, "--yes"]) == 0
    with opened(full) as store:
        assert len(store.entries) == left


@pytest.mark.parametrize(
    "filters",
    [
        ["--tenant", "you", "--namespace", OTHER.namespace.hex()],
        ["--older-than", "1h"],
        ["--tenant", "nobody"],
    ],
)
def test_nothing_that_matches(full: str, filters: list[str]) -> None:
    """No block goes, and the code says that there was none."""
    assert cli.run(["purge", full, *filters, "--yes"]) == 1
    with opened(full) as store:
        assert len(store.entries) == 11


def test_what_evicted_blocks_left_goes_too(full: str) -> None:
    """Also where no block matches any more: those of the tenant may have been evicted."""
    mine = tenant_keys("me", 1)
    with locked(full) as held, held.open_tier() as tier:
        entries = tier.take_entries()
        rows = [n for n in range(len(entries)) if id_at(entries, n).hash in mine.hashes]
        tier.drop([id_at(entries, n) for n in rows], [location_at(entries, n) for n in rows])
    assert all(on_disk(full, expected(mine, block)[:64]) for block in range(4))
    assert cli.run(["purge", full, "--tenant", "me", "--yes"]) == 1
    assert not any(on_disk(full, expected(mine, block)[:64]) for block in range(4))
    with opened(full) as store:
        assert len(store.entries) == 7


def test_it_asks_first(
    full: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It shows what would go; without a yes nothing changes, and the code is 4."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli.run(["purge", full, "--tenant", "me"]) == 4
    said = capfd.readouterr()
    assert "4 of 11 blocks" in said.out
    assert "test/tiny" in said.out
    assert "aborted" in said.err
    with opened(full) as store:
        assert len(store.entries) == 11


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "--tenant"),
        (["--older-than", "soon"], 2, "--older-than"),
        (["--namespace", "f" * 64], 2, "test/other"),
    ],
)
def test_wrong_usage(
    full: str, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """At least one filter, and each must make sense."""
    assert cli.run(["purge", full, *arguments, "--yes"]) == code
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("command", [["purge", "--tenant", "me"], ["repair"]])
def test_an_engine_keeps_its_store(
    open_store: Callable[..., Any], capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """A store that has a writer is refused, and the writer does not notice."""
    store = open_store()
    put(store, prompt_keys(4))
    assert cli.run([command[0], store.path, *command[1:], "--yes"]) == 4
    assert "another writer" in capfd.readouterr().err
    assert bring_back(store, prompt_keys(4)).loaded == 4


@pytest.mark.parametrize("command", [["purge", "--tenant", "me"], ["repair"]])
@pytest.mark.parametrize("kind", ["missing", "empty", "other", "file", "newer"])
def test_what_is_no_store(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str], kind: str
) -> None:
    """A mistyped path is a message and code 3; nothing is made there."""
    path = tmp_path / "store"
    match kind:
        case "empty":
            path.mkdir()
        case "other":
            path.mkdir()
            (path / "mine").write_text("x")
        case "file":
            path.write_text("x")
        case "newer":
            path.mkdir()
            (path / "FORMAT").write_text("kvtier store, format 2\n")
    before = sorted(tmp_path.rglob("*"))
    assert cli.run([command[0], str(path), *command[1:], "--yes"]) == 3
    assert str(path) in capfd.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_whose_index_is_damaged(full: str) -> None:
    """It is rebuilt on the way, as whenever a store is opened, and purged."""
    Path(f"{full}/index/data.mdb").write_bytes(b"x" * 8192)
    assert cli.run(["purge", full, "--tenant", "me", "--yes"]) == 0
    with opened(full) as store:
        assert len(store.entries) == 7
