"""A LoRA by content: two engines that load the same files share what was computed with them."""

from __future__ import annotations

import hashlib
import os
from typing import Final

__all__ = ["AdapterDigests"]

KNOWN_MAX: Final = 1024
"""Files whose digests are remembered; the oldest go."""
PIECE_BYTES: Final = 1 << 20
FILE_SUFFIXES: Final = (".json", ".safetensors", ".bin", ".pt", ".pth")

_Identity = tuple[int, int, int, int]


class AdapterDigests:
    """Digests of LoRA directories. A file is read once, as long as it stays the same file."""

    def __init__(self) -> None:
        self._known: dict[_Identity, bytes] = {}

    def of(self, path: str) -> str | None:
        """Return "sha256:..." over a directory's config and weights; None if it cannot be read.

        The adapter is told by what is in its files and by their names, never by where they are.
        """
        digest = hashlib.sha256(b"kvtier.vllm.lora.1")
        try:
            names = sorted(name for name in os.listdir(path) if name.endswith(FILE_SUFFIXES))
            for name in names:
                digest.update(len(name.encode()).to_bytes(8, "little") + name.encode())
                digest.update(self._content(f"{path}/{name}"))
        except OSError:
            return None
        return f"sha256:{digest.hexdigest()}" if names else None

    def _content(self, path: str) -> bytes:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)
            if identity not in self._known:
                digest = hashlib.sha256()
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                while len(self._known) >= KNOWN_MAX:
                    del self._known[next(iter(self._known))]
                self._known[identity] = digest.digest()
            return self._known[identity]
