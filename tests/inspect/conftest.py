from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier

pytest.importorskip("rich")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENANT = "acme"


def fill(store: kvtier.Store) -> None:
    """Store three prompts with a shared head, one of a tenant, and the tail of a fifth."""
    from support import prompt, put

    head = prompt(6, 1)
    for seed in (2, 3, 4):
        put(store, store.keys(head + prompt(3, seed)))
    put(store, store.keys(prompt(5, 9), tenant=TENANT))
    put(store, store.keys(prompt(8, 10)), blocks=range(4, 8))
    store.flush()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the store that ``small`` copies: 24 blocks."""
    from support import SPEC

    path = tmp_path_factory.mktemp("inspect") / "store"
    with kvtier.open(path, SPEC, host_bytes="1MiB", ssd_bytes="8MiB") as store:
        fill(store)
    return path


@pytest.fixture
def small(made_once: Path, tmp_path: Path) -> Path:
    """Return a closed store of 24 blocks that the test may damage."""
    return Path(shutil.copytree(made_once, tmp_path / "small"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[kvtier.Store]:
    """Return an open store of 24 blocks."""
    from support import SPEC

    path = tmp_path / "live"
    with kvtier.open(path, SPEC, host_bytes="1MiB", ssd_bytes="8MiB") as store:
        fill(store)
        yield store


@pytest.fixture
def inspect(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs one command: its exit code, standard output and error."""
    from kvtier_inspect import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def inspect_json(
    inspect: Callable[..., tuple[int, str, str]],
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs one command with ``--json``: its exit code and the object."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        code, out, err = inspect(*arguments, "--json")
        with contextlib.suppress(json.JSONDecodeError):
            return code, json.loads(out)
        raise AssertionError(f"no JSON object but {out!r}, {err!r}")

    return run
