"""The engine's end of the index's process: start it, ask it, end it, and survive its death."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers import keeper
from kvtier.tiers.entries import ENTRY, Entries

__all__ = ["REQUEST_BYTES_MAX", "Answer", "Link"]

REQUEST_BYTES_MAX: Final = 256 << 20
"""The body of one request, over a million entries; the keeper holds it in memory."""
END_S_MAX: Final = 5.0
"""How long a keeper that was told to end, or was killed, may take to be gone."""
_PIECE_BYTES: Final = 1 << 20
_live: weakref.WeakSet[Link] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request brought: a body, and the descriptor of a file of rows, or -1."""

    body: bytes
    rows_fd: int

    def rows(self, count: int) -> Entries:
        """Return the rows as a table over the file itself, gone from memory with the table."""
        if not count:
            os.close(self.rows_fd)
            return np.zeros(0, dtype=ENTRY)
        try:
            mapped = mmap.mmap(self.rows_fd, count * ENTRY.itemsize, access=mmap.ACCESS_READ)
        except ValueError as error:  # the file is shorter: reading it would be a SIGBUS
            raise OSError(errno.EIO, f"{count} rows were promised: {error}") from error
        finally:
            os.close(self.rows_fd)
        return np.frombuffer(mapped, dtype=ENTRY)


class Link:
    """A keeper, from its start to its end, over the index in ``path``; thread-safe.

    ``bytes_max`` 0 starts a reader's, ``keeper.ONLOOKER`` one that no writer knows of. ``lock_fd``
    stays open in the keeper until that is gone. ``fault`` says why there is no keeper any more.
    Every ``OSError`` names ``path``.
    """

    def __init__(
        self, path: str, bytes_max: int, *, lock_fd: int | None, reply_s_max: float
    ) -> None:
        self.path = os.path.abspath(path)
        self.fault: OSError | None = None
        self.disk_bytes = keeper.disk_bytes(self.path)
        self.write_bytes = 0
        self._reply_s_max = reply_s_max
        self._owner = os.getpid()
        self._lock = threading.Lock()
        # Both ends are known to the fork handler before anything can fork.
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(True)  # noqa: FBT003 - whatever the engine's default timeout is
        _live.add(self)
        try:
            self._process = _started(self.path, bytes_max, self._theirs, lock_fd)
        except OSError:
            self._ours.close()
            raise
        finally:
            self._theirs.close()

    def ask(self, request: int, body: bytes) -> Answer:
        """Return the keeper's answer.

        ``FormatError`` if the index is unreadable, ``OSError`` if the request failed; where that
        means that the keeper is gone, ``fault`` is set and nobody knows what it still did.
        """
        self.check_owner()
        if len(body) > REQUEST_BYTES_MAX:
            raise OSError(
                errno.EMSGSIZE, f"{self.path}: at most {REQUEST_BYTES_MAX} bytes a request"
            )
        with self._lock:
            if self.fault is not None:
                raise OSError(self.fault.errno, str(self.fault.strerror))
            try:
                head, answer = self._converse(request, body)
            except TimeoutError:
                self._end(
                    errno.ETIMEDOUT, f"did not answer within {self._reply_s_max} s", kill=True
                )
            except OSError:
                self._end(errno.EIO, "", kill=False)
            except BaseException:
                self._end(errno.EINTR, "was interrupted", kill=True)
                raise
            if self.fault is not None:
                raise OSError(self.fault.errno, str(self.fault.strerror))
            status, code, self.disk_bytes, self.write_bytes, _ = head
            if status == keeper.OK:
                return answer
            words = answer.body.decode(errors="replace")
            if status == keeper.FAILED:
                raise OSError(code, f"{self.path}: {words}")
            self._end(errno.EIO, f"found the index unreadable: {words}", kill=True)
            raise FormatError(f"{self.path}: the index cannot be read: {words}")

    def check_owner(self) -> None:
        """Raise ``OSError`` in a forked child: the keeper serves the process that started it."""
        if os.getpid() != self._owner:
            raise OSError(errno.EPERM, f"{self.path}: the index belongs to this process's parent")

    def close(self, *, kill: bool = False) -> None:
        """End the keeper, after the request that it may be at work on; idempotent."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self.fault is None:
                self._end(errno.EBADF, "was closed", kill=kill)

    def leave(self) -> None:
        """Let go of the keeper in a forked child, which must neither hold nor reap it."""
        self._ours.close()
        self._theirs.close()
        if hasattr(self, "_process"):
            self._process.returncode = 0

    def _converse(self, request: int, body: bytes) -> tuple[tuple[int, int, int, int, int], Answer]:
        deadline = time.monotonic() + self._reply_s_max
        self._ours.settimeout(self._reply_s_max)
        # Whatever the engine does about SIGPIPE, a dead keeper is an error here.
        head = keeper.REQUEST.pack(request, len(body))
        self._ours.sendall(head + body, socket.MSG_NOSIGNAL)
        fds: list[int] = []
        try:
            answer = self._receive(keeper.ANSWER.size, deadline, fds)
            fields = keeper.ANSWER.unpack(answer)
            reply = self._receive(fields[-1], deadline, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fields, Answer(reply, fds[0] if fds else -1)

    def _receive(self, nbytes: int, deadline: float, fds: list[int]) -> bytes:
        pieces: list[bytes] = []
        while nbytes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._ours.settimeout(left)
            piece, more, _flags, _address = socket.recv_fds(
                self._ours, min(nbytes, _PIECE_BYTES), 1, socket.MSG_CMSG_CLOEXEC
            )
            fds += more
            if not piece:
                raise ConnectionResetError
            pieces.append(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def _end(self, code: int, why: str, *, kill: bool) -> None:
        """End the process within ``END_S_MAX`` per step and say why; without ``why``, it died."""
        self._ours.close()
        process = self._process
        if kill:
            process.kill()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # in the kernel: gone when that lets it go
                process.wait(END_S_MAX)
        if not why:
            why = f"ended: {_ending(process.returncode)}"
        self.fault = OSError(code, f"{self.path}: the index's process {why}")


def _started(
    path: str, bytes_max: int, end: socket.socket, lock_fd: int | None
) -> subprocess.Popen[bytes]:
    package = importlib.util.find_spec("lmdb")  # found, not imported
    if package is None or package.origin is None or not sys.executable:
        raise OSError(errno.ENOENT, f"{path}: the index needs an interpreter and the package lmdb")
    packages = os.path.dirname(os.path.dirname(os.path.abspath(package.origin)))
    arguments = [packages, path, str(bytes_max)]
    return subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-I", "-S", os.path.abspath(keeper.__file__), *arguments],
        stdin=end.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the engine, which then closes the store
        pass_fds=() if lock_fd is None else (lock_fd,),
    )


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "it does not answer a kill"
    if returncode >= 0:
        return f"exit status {returncode}"
    with suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


def _after_fork_in_child() -> None:
    for link in list(_live):
        link.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)
