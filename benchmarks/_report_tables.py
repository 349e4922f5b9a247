"""Results case by case as tables, whatever a benchmark recorded: one table for each kind of case.

A number is a cell, a ratio its number and verdict, a dictionary a column for each key (one cell
where each row has keys of its own), a long list its median and ends, and trials the median seconds
of each way with the quickest and the slowest. What is the same in all rows is said once, above.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from _report_read import judges, number, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

LIST_SHOWN_MAX: Final = 4
"""Lists of numbers up to so long are shown as they are."""
ROWS_MAX: Final = 2000
COLUMNS_MAX: Final = 40
NESTED_MAX: Final = 3
"""Dictionaries within each other up to so deep have a column for each key."""
SAME_ROWS_MIN: Final = 2
SAME_CHARS_MAX: Final = 60
UNTITLED: Final = "results"


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of case; a cell is its text, and whether that is a number."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, bool]]]
    note: str = ""
    """What is the same in all rows, and what was left out."""


def cases(results: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Return one table for each kind of case, in the order of the results."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in results:
        kinds.setdefault(str(row.get("case", UNTITLED)), []).append(row)
    return [_table(name, rows) for name, rows in kinds.items()]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    apart = _alike(rows)
    flat = [dict(_cells(row, apart)) for row in rows[:ROWS_MAX]]
    heads = list(dict.fromkeys(head for row in flat for head in row))
    notes = []
    same = _same(flat, heads)
    if same:
        notes.append("In all rows: " + ", ".join(f"{k} {v}" for k, v in same.items()) + ".")
        heads = [head for head in heads if head not in same]
    if len(rows) > ROWS_MAX:
        notes.append(f"{len(rows) - ROWS_MAX} more rows are in the file.")
    if len(heads) > COLUMNS_MAX:
        notes.append(f"{len(heads) - COLUMNS_MAX} more columns are in the file.")
        heads = heads[:COLUMNS_MAX]
    body = [[row.get(head, ("", False)) for head in heads] for row in flat]
    return Table(name, heads, body, " ".join(notes))


def _same(flat: Sequence[Mapping[str, tuple[str, bool]]], heads: Sequence[str]) -> dict[str, str]:
    """Return the columns, but not all of them, that say the same short thing in every row."""
    if len(flat) < SAME_ROWS_MIN:
        return {}
    found = {}
    for head in heads:
        texts = {row.get(head, ("", False))[0] for row in flat}
        if len(texts) == 1 and 0 < len(next(iter(texts))) <= SAME_CHARS_MAX:
            found[head] = texts.pop()
    return found if len(found) < len(heads) else {}


def _alike(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return which dictionaries are columns: those of which each row has half of all keys."""
    kinds: dict[str, list[set[str]]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, dict) and value:
                kinds.setdefault(key, []).append(set(value))
    return {
        key for key, each in kinds.items() if 2 * min(map(len, each)) >= len(set().union(*each))
    }


def _cells(row: Mapping[str, Any], apart: set[str]) -> Iterator[tuple[str, tuple[str, bool]]]:
    for key, value in row.items():
        if key == "trials" and isinstance(value, dict):
            yield from _trials(value)
        elif isinstance(value, dict) and key not in apart:
            yield str(key), (shown(value), False)
        elif key != "case":
            yield from _flat(str(key), value, NESTED_MAX)


def _flat(key: str, value: Any, depth: int) -> Iterator[tuple[str, tuple[str, bool]]]:
    if isinstance(value, dict) and judges(value):
        yield key, (f"{shown(value.get('value'))} ({value['verdict']})", False)
    elif isinstance(value, dict) and depth > 0:
        for name, each in value.items():
            yield from _flat(f"{key}.{name}", each, depth - 1)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        yield key, ("; ".join(shown(each) for each in value), False)
    elif isinstance(value, list) and len(value) > LIST_SHOWN_MAX:
        yield key, (_summary(value), True)
    else:
        yield key, (shown(value), isinstance(value, int | float) and not isinstance(value, bool))


def _trials(trials: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, bool]]]:
    for way, series in trials.items():
        seconds = [
            number(trial.get("seconds")) for trial in series if isinstance(trial, dict)
        ] if isinstance(series, list) else []  # fmt: skip
        yield f"{way}, s", (_summary(seconds), True)


def _summary(values: Sequence[Any]) -> str:
    """Return the median and the ends of numbers; of anything else how many there are."""
    numbers = [each for value in values if (each := number(value)) is not None]
    if not numbers or len(numbers) < len(values):
        return f"{len(values)} values"
    median = shown(statistics.median(numbers))
    if len(numbers) == 1:
        return median
    return f"{median} ({shown(min(numbers))} to {shown(max(numbers))})"
