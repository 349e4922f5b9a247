"""A rival in an environment of its own, and a process there that does what it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from _harness import Trial
from _rivals_worker import Facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MARK: Final = "made-by-kvtier-bench"
"""A file in an environment that is complete; it holds what was installed."""
INSTALL_S_MAX: Final = 1800.0
"""How long one step of making the environment may take."""
END_S_MAX: Final = 5.0
"""How long a process may take to be gone once it closed its output."""
LOG_CHARS: Final = 500
"""How much of a process's last words is shown."""


class RivalMissing(Exception):
    """The rival cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A rival by name: what it is, its worker, and how its environment is made.

    ``steps`` are pip's arguments, one list per call; without any it runs in this environment.
    ``probe`` must be importable at the end.
    """

    name: str
    package: str
    worker: str
    steps: tuple[tuple[str, ...], ...] = ()
    probe: str = ""
    quiet: Mapping[str, str] | None = None
    """What its processes' environment says besides: that no usage reports are to be sent, say."""

    @property
    def ticks(self) -> int:
        """How many steps making the environment takes."""
        return len(self.steps) + 2

    def folder(self, above: str) -> Path:
        """Return where the environment is kept between runs."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kept = Path(above) if above else cache / "kvtier-bench"
        return (kept / self.package.replace("==", "-")).absolute()


def environment(
    source: Source,
    folder: Path,
    tick: Callable[[], None],
    run: Callable[[Sequence[str], Mapping[str, str]], None] | None = None,
) -> Path:
    """Return the Python of a rival's environment in ``folder``, making it if it is not there.

    ``run`` runs a command with an environment, or raises ``RivalMissing``.
    """
    if not source.steps:
        return Path(sys.executable)
    python, mark = folder / "bin" / "python", folder / MARK
    wanted = json.dumps(source.steps)
    try:
        if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
            return python
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RivalMissing(f"no environment can be made in {folder}: {error}") from error
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands += [[*pip, *step] for step in source.steps]
    commands += [[str(python), "-c", f"import {source.probe}"]]
    for command in commands:
        (run or _run)(command, _clean(source))
        tick()
    mark.write_text(wanted, encoding="utf-8")
    return python


def _clean(source: Source) -> dict[str, str]:
    """Return this process's environment without what it says to Python."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**env, **(source.quiet or {})}


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - pip and the environment's own Python
            command, env=dict(env), capture_output=True, text=True, timeout=INSTALL_S_MAX,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RivalMissing(f"{' '.join(command[:4])} ...: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-3:]
        raise RivalMissing(f"{' '.join(command[:4])} ... failed: {' / '.join(last)}")


class Rival:
    """A process with a rival in it, which stores and reads the blocks of ``settings`` on demand."""

    def __init__(
        self, source: Source, python: Path, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        self._name = source.name
        self._log = folder / f"{source.name}.log"
        worker = Path(__file__).with_name(source.worker)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own script, its own Python
                [python, "-I", worker], env=_clean(source), text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            answer = self._ask({"op": "open", "folder": str(folder / source.name), **settings})
        except BaseException:
            self.close()
            raise
        self.backends = {
            name: Facts(**{**facts, "ways": tuple(facts["ways"])})
            for name, facts in answer["backends"].items()
        }
        self.skipped: dict[str, str] = answer["skipped"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, backend: str) -> Trial:
        """Store all blocks."""
        return self._trial({"op": "write", "backend": backend})

    def read(self, backend: str, way: str, *, cold: bool) -> Trial:
        """Read all blocks; every byte was compared when it returns."""
        return self._trial({"op": "read", "backend": backend, "way": way, "cold": cold})

    def damage(self, backend: str) -> str:
        """Spoil a backend's files; returns what a read made of it, "" if it has no files."""
        try:
            outcome: str = self._ask({"op": "damage", "backend": backend})["outcome"]
        except RivalMissing:  # the last that it is asked
            return "died" if self._process.poll() is not None else "an error"
        return outcome

    def close(self) -> None:
        """End the process and what it started."""
        with suppress(ProcessLookupError):  # it holds nothing that is wanted any more
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it never read
                    pipe.close()

    def _trial(self, request: Mapping[str, Any]) -> Trial:
        answer = self._ask(request)
        return Trial(answer["seconds"], detail={"cpu_s": answer["cpu_s"]})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; the worker bounds every wait of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            raise RivalMissing(f"{self._name}'s process ended: {text[-LOG_CHARS:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalMissing(f"{self._name} could not {request['op']}: {answer['error']}")
        return answer
