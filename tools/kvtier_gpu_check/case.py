"""A case, what came of it, and the run over all of them within a time."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["BUDGET_S", "CannotRun", "Case", "Outcome", "Place", "check", "missing", "table"]

BUDGET_S: Final = 330.0
"""What a part may take: machines with a GPU are lent by the minute."""

Verdict = Literal["passed", "failed", "skipped"]


class CannotRun(Exception):
    """The case proves nothing here; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases run."""

    folder: Path
    """Scratch; on the disk whose rates are of interest."""
    device: str = "cuda:0"
    small: bool = False
    """The same cases in seconds, for the tests."""
    python: str = ""
    """The interpreter that has vLLM."""

    def fresh(self, name: str) -> Path:
        """Return an empty folder of that name."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)  # what is stored is as private as its prompts
        return folder

    def need_cuda(self) -> None:
        """Raise ``CannotRun`` unless the device is a GPU."""
        if not self.device.startswith("cuda"):
            raise CannotRun(f"{self.device} has no streams and no link")


@dataclass(frozen=True, slots=True)
class Case:
    """Something to prove; ``run`` returns what it measured and raises if it does not hold."""

    name: str
    run: Callable[[Place], Mapping[str, Any]]
    seconds: float
    """About how long it takes in full; it is not begun with less time left."""
    needs: tuple[str, ...] = ("torch", "kvtier")
    """Modules; without one of them the case is skipped."""
    low: Mapping[str, float] = field(default_factory=dict)
    """The least that measured values may be, by name. Not held against a small run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case."""

    name: str
    verdict: Verdict
    seconds: float = 0.0
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def missing(modules: Iterable[str]) -> list[str]:
    """Return which modules are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def check(
    cases: Sequence[Case],
    place: Place,
    *,
    clock: Callable[[], float],
    budget_s: float = BUDGET_S,
    absent: Callable[[Iterable[str]], list[str]] = missing,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run cases one after the other while there is time; no failure ends the run."""
    begun = clock()
    outcomes: list[Outcome] = []
    for case in cases:
        left = budget_s - (clock() - begun)
        if gone := absent(case.needs):
            outcome = Outcome(case.name, "skipped", reason=f"not installed: {', '.join(gone)}")
        elif not place.small and left < case.seconds:
            reason = f"takes about {case.seconds:.0f} s, {left:.0f} s are left: run it with --only"
            outcome = Outcome(case.name, "skipped", reason=reason)
        else:
            outcome = _run(case, place, clock)
        say(_line(outcome))
        outcomes.append(outcome)
    return outcomes


def _run(case: Case, place: Place, clock: Callable[[], float]) -> Outcome:
    begun = clock()
    values: Mapping[str, Any] = {}
    verdict: Verdict = "passed"
    reason = ""
    try:
        values = case.run(place)
    except CannotRun as why:
        verdict, reason = "skipped", str(why)
    except Exception as error:  # noqa: BLE001 - the other cases still prove something
        verdict, reason = "failed", f"{type(error).__name__}: {error}"
    else:
        short = [
            f"{name} is {values[name]:.2f}, at least {low:g} is wanted"
            for name, low in case.low.items()
            if not place.small and not values[name] >= low
        ]
        if short:
            verdict, reason = "failed", "; ".join(short)
    return Outcome(case.name, verdict, clock() - begun, reason, values)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return one line for each case, and one for each value below it."""
    lines = []
    for outcome in outcomes:
        lines.append(_line(outcome))
        lines += [f"    {name:<34} {_show(value)}" for name, value in outcome.values.items()]
    counts = [
        f"{sum(outcome.verdict == verdict for outcome in outcomes)} {verdict}"
        for verdict in ("passed", "failed", "skipped")
    ]
    return "\n".join([*lines, ", ".join(counts)])


def _line(outcome: Outcome) -> str:
    reason = f"  {outcome.reason}" if outcome.reason else ""
    return f"{outcome.verdict:<8}{outcome.name:<24}{outcome.seconds:6.1f} s{reason}"


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
