"""What the demo prints: one table, the answers, and which machine and commit they come from."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvtier_demo.ask import Setting
    from kvtier_demo.layouts import Layout

__all__ = ["commit", "machine", "print_answers", "print_layouts", "print_table"]

BAR_WIDTH: Final = 24
COLOURS: Final = {"recompute": "yellow", "load": "blue", "planned": "green"}


def print_table(console: Console, settings: Sequence[Setting]) -> None:
    """Print time to first token per link and way, what the plan did, and bars to look at."""
    table = Table(title="Time to first token, median over the questions", box=SIMPLE)
    table.add_column("link", no_wrap=True)
    table.add_column("way", no_wrap=True)
    table.add_column("TTFT", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("planned is", justify="right", no_wrap=True)
    longest = max(setting.ttft_s(way) for setting in settings for way in COLOURS)
    for setting in settings:
        for way, colour in COLOURS.items():
            seconds = setting.ttft_s(way)
            bar = Text("█" * max(1, round(BAR_WIDTH * seconds / longest)), style=colour)
            link = f"{setting.bytes_per_s / 1e6:.1f} MB/s" if way == "recompute" else ""
            faster = (
                "" if way == "planned" else f"{seconds / setting.ttft_s('planned'):.2f}x faster"
            )
            table.add_row(link, way, f"{seconds:.2f} s", bar, faster)
        table.add_section()
    console.print(table)
    for setting in settings:
        value = setting.to_json()
        counts, predicted = value["blocks"], value["predicted_s"]["planned"]
        console.print(
            f"  {setting.bytes_per_s / 1e6:5.1f} MB/s: {counts['loaded']:.0f} blocks loaded, "
            f"{counts['recomputed']:.0f} recomputed; predicted {predicted:.2f} s, took "
            f"{value['measured_s']['planned']:.2f} s"
        )


def print_layouts(console: Console, layouts: Sequence[Layout]) -> None:
    """Print TTFT where no single split of the prefix fits: least recompute, head, plan."""
    table = Table(title="The same question where blocks lie otherwise (first link)", box=SIMPLE)
    table.add_column("layout")
    for name in ("load", "head of prefix", "planned"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("recomputed", no_wrap=True)
    for layout in layouts:
        plan = layout.planned.plan
        blocks = ", ".join(map(str, plan.recompute)) if plan else ""
        times = [f"{answer.ttft_s:.2f} s" for answer in layout.answers]
        table.add_row(layout.where, *times, blocks)
    console.print(table)


def print_answers(console: Console, answers: Sequence[tuple[str, str]], *, identical: bool) -> None:
    """Print each question with its answer, and whether all ways agreed to the token."""
    for question, text in answers:
        console.print(f"Q: {question}", style="bold", markup=False)
        console.print(f"A: {text}", markup=False)
    if identical:
        console.print("All three ways gave the same tokens.", style="green")
    else:
        console.print("The ways gave DIFFERENT tokens: this is a bug.", style="bold red")


def machine(threads: int) -> str:
    """Name the processor, its cores and the threads used."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    lines = text.splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {len(names) or '?'} cores, {threads} compute thread(s), {platform.system()}"


def commit() -> str:
    """Return the checkout's commit, "+" if it has changes, or "unknown" outside of one."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)  # noqa: S603 - git
    return done.stdout.strip()
