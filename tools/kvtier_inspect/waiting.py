"""While something takes long, or must be asked first: a progress bar, and a question."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier_inspect.render import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["confirm", "progress"]


@contextmanager
def progress(title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Yield what to tell about bytes that are done; shown on standard error, if that is a terminal.

    Standard output stays clean for results.
    """
    err = console(stderr=True)
    if not err.is_terminal or not nbytes:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)]
    with Progress(*columns, SpeedColumn(), TimeRemainingColumn(), console=err) as bar:
        task = bar.add_task(title, total=nbytes)
        yield lambda done: bar.advance(task, done)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on standard error, unless ``yes``; "no", and no answer, abort."""
    import typer

    if not yes:
        typer.confirm(question, abort=True, err=True)
