"""LMCache in an environment of its own, and a process there that does what it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LMCACHE: Final = "lmcache==0.5.6"
NEEDED: Final = (
    "numpy<=2.2.6", "numba", "aiofile", "aiofiles", "aiohttp", "blake3", "cachetools",
    "cryptography", "fastapi", "httpx", "msgspec", "nvtx", "opentelemetry-api<=1.40.0",
    "opentelemetry-sdk<=1.40.0", "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml",
    "pyzmq>=25.0.0", "requests", "safetensors", "sortedcontainers", "transformers>=5.4,<6",
    "uvicorn",
)  # fmt: skip
"""What its storage backends import. Its own list needs CUDA packages, so pip must not follow it."""
MARK: Final = "made-by-kvtier-bench"
INSTALL_S_MAX: Final = 1800.0
"""How long one step of making the environment may take."""
WORKER: Final = Path(__file__).with_name("_lmcache_worker.py")
QUIET: Final = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
"""It sends usage reports unless told not to."""


class RivalMissing(Exception):
    """The rival cannot be run here; the message says why."""


def default_folder() -> Path:
    """Return where the environment is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvtier-bench" / LMCACHE.replace("==", "-")


def environment(folder: Path, tick: Callable[[], None]) -> Path:
    """Return the Python of LMCache's environment in ``folder``, making it if it is not there."""
    python = folder / "bin" / "python"
    if (folder / MARK).exists():
        return python
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RivalMissing(f"no environment can be made in {folder}: {error}") from error
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    steps: Sequence[list[str]] = (
        [sys.executable, "-m", "venv", str(folder)],
        # Exactly the build that is in use here: any other may be gigabytes of CUDA.
        [*pip, f"torch=={version('torch')}"],
        [*pip, "--no-deps", LMCACHE],
        [*pip, f"torch=={version('torch')}", *NEEDED],
        [str(python), "-c", "import lmcache.v1.storage_backend.local_disk_backend"],
    )
    for step in steps:
        _run(step)
        tick()
    (folder / MARK).touch()
    return python


STEPS: Final = 5
"""Steps that ``environment`` takes, and ticks."""


def _run(command: Sequence[str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(  # noqa: S603 - pip and the environment's own Python
            command, env=env | QUIET, capture_output=True, text=True, timeout=INSTALL_S_MAX,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RivalMissing(f"{' '.join(command[:4])} ...: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-3:]
        raise RivalMissing(f"{' '.join(command[:4])} ... failed: {' / '.join(last)}")


class Rival:
    """A process with LMCache in it, which stores the blocks once and loads them on demand."""

    def __init__(self, python: Path, folder: Path, settings: dict[str, Any]) -> None:
        self._log = folder / "lmcache.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own script, its own Python
                [python, "-I", WORKER], env=env | QUIET, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            answer = self._ask({"op": "open", "folder": str(folder / "lmcache"), **settings})
            self.paths: list[str] = answer["paths"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, path: str) -> float:
        """Load all blocks over one path, cold and verified; returns the seconds of the load."""
        seconds: float = self._ask({"op": "load", "path": path})["seconds"]
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # it holds nothing that is wanted any more
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it never read
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
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
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            raise RivalMissing(f"LMCache's process ended: {text[-500:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalMissing(f"LMCache could not {request['op']}: {answer['error']}")
        return answer
