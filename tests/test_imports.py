"""The import rules of kvtier, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1] / "kvtier"

# Lowest first. A module imports from below, or from its own layer as long as no cycle comes of it.
LAYERS = (
    {"errors", "lane", "metrics", "tokens", "trace"},
    {"config", "fields", "fingerprint", "identity", "layout", "plan", "trace_files"},
    {
        "chakra",
        "changes",
        "cost",
        "events",
        "executor",
        "hints",
        "history",
        "lifecycle",
        "outlook",
        "planner",
        "policies",
        "policy",
        "priced",
        "prices",
        "profiles",
        "read_queue",
        "rings",
        "schedule",
        "simulator",
        "state",
    },
    {"tiers"},
    {
        "calibration",
        "catalog",
        "columns",
        "copies",
        "deliveries",
        "demoter",
        "follower",
        "layerwise",
        "live",
        "loads",
        "loop",
        "mover",
        "orders",
        "parts",
        "prefetcher",
        "promoter",
        "promotions",
        "purge",
        "restore",
        "restore_notes",
        "retention",
        "rows",
        "ssd_room",
        "ssd_writer",
        "ticket",
        "transfer",
        "uses",
        "write_rule",
        "writeback",
    },
    {"prometheus", "reader", "store", "view"},
    {"__init__"},
)

# What is used, and the only modules that may use it.
ONLY_IN = {
    "asyncio": {"loop", "transfer"},
    "lmdb": {"tiers.keeper"},
    "os.environ": {"config"},
    "os.getenv": {"config"},
    "pickle": set(),
    "time.sleep": {"tiers.directory"},  # waits for another process's lock, up to a bound
    "torch": {"mover", "tiers.arena", "tiers.device", "tiers.device_pool"},
}


def module_name(path: Path) -> str:
    """Return the dotted name below kvtier: "plan", "tiers.host", "tiers", "__init__"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


TREES = {module_name(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def layer(module: str) -> int:
    """Return the number of a module's layer; a module must have one."""
    found = [n for n, names in enumerate(LAYERS) if module.partition(".")[0] in names]
    assert found, f"kvtier.{module} is in no layer: place it in LAYERS"
    return found[0]


def names(nodes: Iterator[ast.AST]) -> set[str]:
    """Return the dotted names that are imported or read; relative imports are a lint error."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when the module is imported: no function bodies, nothing for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from run_at_import(child)


def imported(module: str) -> set[str]:
    """Return the kvtier modules that a module imports anywhere."""
    found = set()
    for name in names(n for n in ast.walk(TREES[module]) if not isinstance(n, ast.Attribute)):
        top, _, below = name.partition(".")
        if top == "kvtier":
            parent = below.rpartition(".")[0]
            found.add(below if below in TREES else parent or "__init__")
    return found


def uses(used: set[str], what: str) -> bool:
    """Return whether a name or anything inside it is among those used."""
    return any(name == what or name.startswith(f"{what}.") for name in used)


@pytest.mark.parametrize("module", sorted(TREES))
def test_imports_point_down(module: str) -> None:
    """A module imports only from its own layer and from those below it."""
    own = layer(module)
    up = sorted(other for other in imported(module) if layer(other) > own)
    assert not up, f"kvtier.{module} (layer {own}) imports from above: {up}"


def test_no_import_cycle() -> None:
    """No module imports itself by way of others, for types neither."""
    TopologicalSorter({module: imported(module) for module in TREES}).prepare()


@pytest.mark.parametrize("what", sorted(ONLY_IN))
def test_used_only_where_it_belongs(what: str) -> None:
    """Each guarded name is used only by the modules that exist to hide it."""
    users = {module for module, tree in TREES.items() if uses(names(ast.walk(tree)), what)}
    assert users <= ONLY_IN[what]


@pytest.mark.parametrize("module", sorted(TREES))
def test_torch_is_imported_late(module: str) -> None:
    """Importing any module of kvtier does not import torch."""
    assert not uses(names(run_at_import(TREES[module])), "torch")


def test_import_leaves_torch_out() -> None:
    """`import kvtier` leaves torch unloaded, so that tools which need no tensor start at once."""
    code = "import sys, kvtier; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
