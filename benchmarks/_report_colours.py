"""Colours on light and on dark paper, as the variables by which a page and its plots share them.

Hues are those of Okabe and Ito, which colour-blind readers can tell apart, in an order in which
neighbours also differ in lightness.
"""

from __future__ import annotations

from typing import Final

INK, FAINT, PAPER = "#1b1f24", "#c9ced6", "#fffffe"
PLAIN: Final = {
    "ink": (INK, "#e6e9ed"),
    "faint": (FAINT, "#4a525c"),
    "paper": (PAPER, "#16191d"),
}
HUES: Final = {
    "blue": ("#0072b2", "#57aee6"),
    "orange": ("#e69f00", "#f2b84b"),
    "green": ("#009e73", "#35c99c"),
    "vermilion": ("#d55e00", "#ff8a4f"),
    "purple": ("#b8629a", "#e3a3cb"),
    "sky": ("#56b4e8", "#a5dcfa"),
    "grey": ("#7d848c", "#9aa3ad"),
    "brown": ("#7a5a2b", "#c9a66b"),
}
"""Each hue on light and on dark paper."""


def css(*, dark: bool) -> str:
    """Return the variables of one kind of paper."""
    return "".join(f"--{name}:{pair[dark]};" for name, pair in (PLAIN | HUES).items())
