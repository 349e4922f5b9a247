from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import kvtier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Examples are bounded by number, never by time. The usual profile draws the same ones every time,
# so that a red build is about the change; --hypothesis-profile=explore looks for new ones.
COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,  # a contract's tests run in every class that inherits it
    ],
}
settings.register_profile("usual", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("explore", max_examples=300, **COMMON)
settings.load_profile("usual")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Keep torch on one thread, if a test has it at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_is_left_as_found() -> Iterator[None]:
    """Fail the test that silences kvtier, not the later ones that wait for a message."""
    before = logging.getLogger("kvtier").level, logging.root.manager.disable
    yield
    assert (logging.getLogger("kvtier").level, logging.root.manager.disable) == before


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Any:
    """Import modules as the benchmarks do: from their own folder."""
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    """Name a directory for a store that does not exist yet."""
    return str(tmp_path / "store")


@pytest.fixture
def open_store(store_path: str) -> Iterator[Callable[..., kvtier.Store]]:
    """Open stores of the tiny spec; those still open at the end must be sound, then are closed."""
    from support import SPEC, assert_sound

    opened: list[kvtier.Store] = []
    with contextlib.ExitStack() as scope:

        def open_one(path: str = store_path, spec: kvtier.KVSpec = SPEC, **own: Any) -> Any:
            usual = {"host_bytes": "1MiB", "ssd_bytes": "8MiB", "slot_wait_s_max": 5.0}
            store = kvtier.open(path, spec, **{**usual, **own})
            scope.callback(store.close)
            opened.append(store)
            return store

        yield open_one
        for store in opened:
            if not store._closed and store._failure is None:
                assert_sound(store)
