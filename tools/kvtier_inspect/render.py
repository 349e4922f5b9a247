"""What people and programs get to see: sizes, times, tables, JSON, exit codes, and names made safe.

A store's names are somebody else's bytes. Every one of them goes through ``safe`` on its way to a
terminal; a console of ``console()`` takes nothing for markup; JSON is ASCII without ``<>&``.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

__all__ = [
    "CODES",
    "ExitCode",
    "ago",
    "columns",
    "console",
    "count",
    "emit",
    "facts",
    "safe",
    "size",
    "span",
]

SAFE_CHARS_MAX: Final = 200
"""Characters of one name that are shown."""
PIPE_COLUMNS: Final = 200
"""How wide lines are where nobody says how wide the terminal is."""


class ExitCode(IntEnum):
    """What the exit status of every command means."""

    FINE = 0
    PROBLEMS = 1
    USAGE = 2
    CANNOT_OPEN = 3
    REFUSED = 4


CODES: Final = (
    "Exit codes: 0 fine; 1 problems found (damage, differences, nothing that matches); 2 wrong "
    "usage; 3 cannot open (no store, newer format, no permission); 4 refused or aborted."
)
"""In the help of every command."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SPANS: Final = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_SMALL_SPANS: Final = (("ms", 1e-3), ("µs", 1e-6))
_UNSEEN: Final = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories that a terminal acts upon, or that show nothing: controls, bidi marks, surrogates."""


def safe(name: object, chars_max: int = SAFE_CHARS_MAX) -> str:
    """Return a name with everything that is not plainly visible written as an escape, cut short."""
    text = str(name)
    cut = len(text) > chars_max
    shown = "".join(_visible(each) for each in text[:chars_max])
    return f"{shown}…" if cut else shown


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def size(nbytes: float) -> str:
    """Return bytes for people: "1.5 GiB"; exact below 1 KiB."""
    value = float(nbytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.{1 if abs(value) < 100 else 0}f} {unit}"


def count(number: int) -> str:
    """Return a number for people: "1,000,000"."""
    return f"{number:,}"


def span(seconds: float) -> str:
    """Return a time for people: "3.2 d", "4.0 s", "1.5 ms"."""
    for unit, worth in (*_SPANS, *_SMALL_SPANS):
        if abs(seconds) >= worth:
            return f"{seconds / worth:.1f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def ago(then_ns: int, now_ns: int) -> str:
    """Return how long ago something was, for people; "never" for 0, "now" for the future."""
    if not then_ns:
        return "never"
    return span((now_ns - then_ns) / 1e9) if now_ns - then_ns >= 10**6 else "now"


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes no text for markup and guesses no colours from it.

    Colours only on a terminal, and not where NO_COLOR is set.
    """
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPE_COLUMNS
    return Console(file=file, markup=False, emoji=False, highlight=False, width=width)


def emit(value: Any) -> None:
    """Write one JSON object to standard output: ASCII, and harmless within HTML."""
    text = json.dumps(value, indent=1, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    sys.stdout.write(text + "\n")


def columns(
    names: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[str] = ()
) -> Table:
    """Return a table of plain text; columns in ``left`` are aligned left, the others right."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else safe(cell) for cell in row))
    return table


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Return names with their values, one a line."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value if isinstance(value, Text) else safe(value, 2000))
    return table
