"""Results of benchmarks as values: what a JSON file must hold, and one sentence if it does not."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FILE_BYTES_MAX: Final = 64 << 20
"""A result is at most so large; the largest so far has 0.3 MiB."""
VERDICTS: Final = ("met", "missed", "not decided", "no bar")
UNKNOWN: Final = "unknown"
"""The verdict of a number that has no row of its own, and what is said of a missing commit."""


class Unreadable(Exception):
    """A file that holds no result; says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One ratio as a benchmark wrote it; ``spread`` and the ends of its bar are in its own unit."""

    name: str
    value: float
    bar: str = ""
    spread: float | None = None
    pairs: int | None = None
    starved: float = 0.0
    verdict: str = UNKNOWN

    @property
    def ends(self) -> tuple[float, float]:
        """Where the number has to be; infinite where nothing bounds it."""
        return ends_of(self.bar)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one benchmark."""

    source: str
    """The name of the file."""
    name: str
    commit: str
    machine: str
    settings: Mapping[str, Any]
    ratios: Sequence[Measured]
    results: Sequence[Mapping[str, Any]]
    """What was measured case by case, without the ratios."""

    def rows(self, *cases: str) -> list[Mapping[str, Any]]:
        """Return the results of these cases, in the order in which they were written."""
        return [row for row in self.results if row.get("case") in cases]

    @property
    def changed(self) -> bool:
        """Whether the checkout differed from its commit."""
        return self.commit.endswith("+")

    @property
    def quick(self) -> bool:
        """Whether this was a first look."""
        return bool(self.settings.get("quick"))


def ends_of(bar: str) -> tuple[float, float]:
    """Return what a bar's text means; both ends belong to it."""
    low, high = -math.inf, math.inf
    try:
        if bar.startswith(">="):
            low = float(bar[2:])
        elif bar.startswith("<="):
            high = float(bar[2:])
        elif ".." in bar:
            low, high = (float(end) for end in bar.split("..", 1))
    except ValueError:
        return -math.inf, math.inf
    return low, high


def read(path: Path) -> Run:
    """Read one file; raises Unreadable."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise Unreadable(f"{path}: {size} bytes are more than a result's {FILE_BYTES_MAX}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path}: is no text in UTF-8") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "is empty: the benchmark did not end" if not text.strip() else f"is no JSON: {error}"
        raise Unreadable(f"{path}: {hint}") from error
    return run_of(value, path.name)


def run_of(value: Any, source: str) -> Run:
    """Return the run that a parsed file tells of; raises Unreadable."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable(f"{source}: is no benchmark's result: give what --json FILE wrote")
    settings, results = value.get("settings", {}), value.get("results", [])
    if isinstance(settings, list):  # the demo's: one setting for each link
        results = [{"case": "setting", **each} for each in settings if isinstance(each, dict)]
        settings = {}
    ratios = value.get("ratios", {})
    for key, found in (("settings", settings), ("ratios", ratios)):
        if not isinstance(found, dict):
            raise Unreadable(f"{source}: {key!r} is no object")
    if not isinstance(results, list):
        raise Unreadable(f"{source}: 'results' is no list")
    rows = [row for row in results if isinstance(row, dict)]
    judged = [row for row in rows if judges(row)]
    return Run(
        source,
        value["name"],
        str(value.get("commit", UNKNOWN)),
        str(value.get("machine", UNKNOWN)),
        settings,
        tuple(_ratios(ratios, judged)),
        tuple(row for row in rows if not judges(row)),
    )


def judges(row: Mapping[str, Any]) -> bool:
    """Whether a result is a ratio with its bar, not a measured case."""
    return "verdict" in row and "bar" in row and "name" in row


def _ratios(values: Mapping[str, Any], judged: Iterable[Mapping[str, Any]]) -> Iterable[Measured]:
    """Yield every ratio once; one without a row of its own is a number that nobody judged."""
    found = {str(row["name"]): row for row in judged}
    for name, value in values.items():
        row = found.get(name, {})
        pairs, verdict = row.get("pairs"), row.get("verdict")
        measured = number(value)
        yield Measured(
            name,
            math.nan if measured is None else measured,
            str(row.get("bar", "")),
            number(row.get("spread")),
            pairs if isinstance(pairs, int) else None,
            number(row.get("starved")) or 0.0,
            verdict if verdict in VERDICTS else UNKNOWN,
        )


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def seconds_of(row: Mapping[str, Any], way: str) -> list[float]:
    """Return what the trials of one way took; raises KeyError if the row has none."""
    return [float(trial["seconds"]) for trial in row["trials"][way]]


# -- as text


def shown(value: Any) -> str:
    """Return a value as short text: four digits of a number, all of an integer."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _shown_float(value)
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _shown_float(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == round(value, 6) and abs(value) < 1e6 and value == int(value):
        return f"{value:,.0f}"
    if 1e3 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"
