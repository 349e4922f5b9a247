"""The entry point: one typer app, and how everything that goes wrong becomes a line and a code.

Commands are declared in ``looking`` and ``asking``, where only arguments and help are; what a
command needs is imported when it runs, so that ``--help`` costs no numpy.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

import typer

from kvtier_inspect import asking, looking
from kvtier_inspect.render import CODES, ExitCode, safe

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app", "main", "run"]


app: Final = typer.Typer(
    name="kvtier-inspect",
    help="Look into a kvtier store. It stays as it is unless the command's name says otherwise.",
    epilog=CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
NICENESS: Final = 19
"""How far a command steps back where cores are scarce: the engine beside it goes first."""
looking.declare(app)
asking.declare(app)
_WRONG_USAGE: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""The root of typer's own errors; releases differ in where its name is."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` is no error
    os.nice(NICENESS)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code. No error that has a name becomes a traceback."""
    try:
        code = app(list(arguments), standalone_mode=False)
    except typer.Exit as leaving:
        return int(leaving.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _say("aborted", ExitCode.REFUSED)
    except _WRONG_USAGE as error:
        return _say(_words(error), ExitCode.USAGE)
    except Exception as error:
        known = _code_of(error)
        if known is None:
            raise
        return _say(str(error) or type(error).__name__, known)
    return int(code) if isinstance(code, int) else ExitCode.FINE


def _words(error: Exception) -> str:
    """Return a usage error with what to do about it."""
    context = getattr(error, "ctx", None)
    words: str = getattr(error, "format_message", error.__str__)()
    return f"{words}\ntry: {context.command_path} --help" if context is not None else words


def _code_of(error: Exception) -> ExitCode | None:
    """Return the code of an error that is the user's or the store's; None for a bug of ours."""
    from kvtier.errors import FormatError, KVTierError, StoreFailed, StoreLocked

    if isinstance(error, (FormatError, StoreFailed)) and not isinstance(error, StoreLocked):
        return ExitCode.CANNOT_OPEN
    if isinstance(error, KVTierError):
        return ExitCode.REFUSED
    if isinstance(error, OSError):
        return ExitCode.CANNOT_OPEN
    return ExitCode.USAGE if isinstance(error, ValueError) else None


def _say(words: str, code: ExitCode) -> ExitCode:
    for line in words.splitlines() or [""]:
        os.write(2, f"kvtier-inspect: {safe(line, 2000)}\n".encode())
    return code


if __name__ == "__main__":
    main()
