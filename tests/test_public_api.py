from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

import kvtier

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = sorted(
    ["kvtier", *(info.name for info in pkgutil.walk_packages(kvtier.__path__, "kvtier."))]
)
PUBLIC = {
    "PENDING", "BlockKeys", "BlockLayout", "CatalogChanges", "CostModel", "FormatError",
    "KVSlots", "KVSpec", "KVTierError", "LinkThrottle", "Loads", "Prefetch", "PurgeResult",
    "PutResult", "Residency", "RestorePlan", "RestoreReport", "RestoreSession", "Retention",
    "SpecMismatch", "Step", "Store",
    "StoreClosed", "StoreConfig", "StoreFailed", "StoreLocked", "StoreReader", "TensorSlots",
    "Tier", "Trace", "TraceEvent", "Transfer", "TransferFailed", "UnsupportedModel", "open",
    "open_reader", "plan", "plan_batch",
}  # fmt: skip


def constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    """Return the sort key of an ``__all__``: PENDING, then Classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def documented(module_name: str) -> Iterator[tuple[str, Any]]:
    """Yield every public class, function, method and property defined in a module."""
    module = importlib.import_module(module_name)
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module_name:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield name, value
            for member_name, member in vars(value).items():
                plain = getattr(member, "__func__", member)
                is_method = inspect.isfunction(plain) and plain.__name__ != "<lambda>"
                if not member_name.startswith("_") and (is_method or isinstance(plain, property)):
                    yield f"{name}.{member_name}", plain


def test_public_names() -> None:
    """The public names are those of the contract: a new one is added on purpose."""
    assert set(kvtier.__all__) == PUBLIC


def test_public_names_are_sorted_and_exist() -> None:
    """``kvtier.__all__`` is sorted, has no name twice, and each name is there."""
    assert sorted(kvtier.__all__, key=constants_then_classes_then_functions) == kvtier.__all__
    assert len(kvtier.__all__) == len(set(kvtier.__all__))
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None


def test_star_import_gives_the_public_names() -> None:
    """`from kvtier import *` works and brings what is public, nothing else."""
    scope: dict[str, Any] = {}
    exec("from kvtier import *", scope)  # noqa: S102 - a star import is only allowed there
    assert scope.keys() - {"__builtins__"} == PUBLIC


def test_nothing_else_is_public() -> None:
    """What ``import kvtier`` binds besides its public names is a module or private."""
    others = {
        name
        for name, value in vars(kvtier).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert others == PUBLIC


@pytest.mark.parametrize("module_name", MODULES)
def test_every_module_says_what_it_exports(module_name: str) -> None:
    """Every module has a docstring and a sorted ``__all__`` whose names exist."""
    module = importlib.import_module(module_name)
    assert (module.__doc__ or "").strip()
    if module_name.count(".") == 1 and hasattr(module, "__path__"):
        return  # a package that only holds modules
    names = module.__all__
    assert len(names) == len(set(names))
    assert sorted(names, key=constants_then_classes_then_functions) == list(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("module_name", MODULES)
def test_every_public_thing_has_a_docstring(module_name: str) -> None:
    """Public classes, functions, methods and properties say what they do."""
    missing = [name for name, value in documented(module_name) if not (value.__doc__ or "").strip()]
    assert missing == []


def test_docstrings_are_looked_for() -> None:
    """The search finds classes, methods, class methods, properties and functions."""
    found = {name for name, _ in documented("kvtier.identity")}
    assert {
        "BlockKeys", "BlockKeys.extend", "BlockKeys.from_bytes", "BlockKeys.num_tokens", "KVSpec",
        "spec_differences",
    } <= found  # fmt: skip


def test_errors_share_one_root() -> None:
    """Every public error is a KVTierError, and a closed store is a failed one."""
    errors = [
        value
        for name in kvtier.__all__
        if inspect.isclass(value := getattr(kvtier, name)) and issubclass(value, Exception)
    ]
    assert len(errors) == 8
    assert all(issubclass(error, kvtier.KVTierError) for error in errors)
    assert issubclass(kvtier.StoreClosed, kvtier.StoreFailed)
    assert not issubclass(kvtier.TransferFailed, kvtier.StoreFailed)
