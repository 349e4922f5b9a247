"""The same bytes in one piece or in many: from the disk, in memory, and both directions at once.

One file, one buffer that it is read into and one that it was written from. Every read is cold
(direct I/O, or the page cache dropped before it) and lands where its bytes lie in the buffer, which
is compared with what was written after the clock has stopped.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from _disk import arena, drop_cache
from _harness import NO_BAR, Bench, Ratio, Stopwatch, Trial, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 32 * MIB)
"""Bytes of one read or copy."""
DEPTHS: Final = (1, 4)
"""Reads under way at once."""
CHAKRA_COPIES: Final = (387, 5958)
"""Copies of one offload before and after, as the Chakra paper counts them."""


def layer_first(blocks: int, pieces: int, piece_bytes: int) -> list[int]:
    """Return the offsets of every block's pieces, block after block, where layers lie together.

    Piece p of block b is the b-th of the p-th layer's run, so that a block's pieces are far apart.
    """
    return [
        (piece * blocks + block) * piece_bytes for block in range(blocks) for piece in range(pieces)
    ]


class Pieces:
    """``nbytes`` random bytes in a file under ``folder``, and buffers for them."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._folder = folder
        self._source, self._target = arena(nbytes), arena(nbytes)
        words = self._source.view(np.uint64)
        words[:] = np.random.default_rng(5).integers(0, 1 << 64, words.size, dtype=np.uint64)
        self._files: dict[str, int] = {}
        self.direct = True
        for name in ("read", "written"):
            self._files[name] = self._open(folder / name)
            self._write(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, fd in self._files.items():
            os.close(fd)
            (self._folder / name).unlink()

    def _open(self, path: Path) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError:  # a file system without direct I/O; some make the file before they say
                path.unlink(missing_ok=True)
                self.direct = False
        return os.open(path, flags, 0o600)

    def sequence(self, size: int) -> list[int]:
        """Return the offsets of whole pieces of ``size`` bytes, one behind the other."""
        return list(range(0, self.nbytes - size + 1, size))

    def read(self, size: int, offsets: Sequence[int], depth: int) -> Trial:
        """Read pieces in this order, ``depth`` at once, and compare them."""
        self._target[:] = 0
        drop_cache(self._folder)
        with ThreadPoolExecutor(depth) as threads:
            begun = time.perf_counter()
            list(threads.map(partial(self._read, size), [offsets[n::depth] for n in range(depth)]))
            seconds = time.perf_counter() - begun
        for offset in offsets:
            where = slice(offset, offset + size)
            assert np.array_equal(self._target[where], self._source[where]), f"wrong at {offset}"
        return Trial(seconds, detail={"pieces": len(offsets)})

    def _read(self, size: int, offsets: Sequence[int]) -> None:
        fd = self._files["read"]
        for offset in offsets:
            count = os.preadv(fd, [self._target[offset : offset + size].data], offset)
            assert count == size, f"{count} of {size} bytes read at {offset}"

    def _write(self, name: str) -> None:
        step = 8 * MIB
        for offset in range(0, self.nbytes, step):
            data = self._source[offset : offset + step]
            assert os.pwritev(self._files[name], [data.data], offset) == data.nbytes
        os.fdatasync(self._files[name])

    def copy(self, size: int, offsets: Sequence[int]) -> Trial:
        """Copy pieces from memory to memory by one thread, one call each."""
        watch = Stopwatch()
        with watch:
            for offset in offsets:
                np.copyto(
                    self._target[offset : offset + size], self._source[offset : offset + size]
                )
        return Trial(watch.wall_s, watch.held, {"pieces": len(offsets)})

    def write(self) -> Trial:
        """Overwrite the other file and sync it."""
        begun = time.perf_counter()
        self._write("written")
        return Trial(time.perf_counter() - begun)

    def both(self, size: int) -> Trial:
        """Read the one file while the other one is overwritten; until both are done."""
        failures: list[BaseException] = []

        def write() -> None:
            try:
                self._write("written")
            except BaseException as error:  # noqa: BLE001 - raised again on the measuring thread
                failures.append(error)

        self._target[:] = 0
        writer = threading.Thread(target=write, name="writer")
        begun = time.perf_counter()
        writer.start()
        with ThreadPoolExecutor(DEPTHS[-1]) as threads:
            offsets = self.sequence(size)
            shares = [offsets[n :: DEPTHS[-1]] for n in range(DEPTHS[-1])]
            list(threads.map(partial(self._read, size), shares))
        writer.join()
        seconds = time.perf_counter() - begun
        if failures:
            raise failures[0]
        assert np.array_equal(self._target, self._source), "wrong bytes beside writes"
        return Trial(seconds)


def series(
    bench: Bench, case: str, ways: Mapping[str, Callable[[], Trial]], **values: Any
) -> dict[str, list[Trial]]:
    """Run every way once, then by turns, and record it."""
    for run in ways.values():
        run()
    with bench.progress(case, len(ways) * bench.options.pairs) as tick:
        trials = interleave(ways, bench.options.pairs, tick)
    bench.record(case, trials, kind="measured here", **values)
    return trials


def sizes(bench: Bench, pieces: Pieces) -> None:
    """Measure reads and copies of pieces of every size: bandwidth against piece size."""
    chosen = [size for size in SIZES if size <= pieces.nbytes // 4]
    for depth in DEPTHS:
        ways: dict[str, Callable[[], Trial]] = {
            str(size): partial(pieces.read, size, pieces.sequence(size), depth) for size in chosen
        }
        ways["again"] = partial(pieces.read, chosen[-1], pieces.sequence(chosen[-1]), depth)
        trials = series(
            bench, f"read_by_size_{depth}", ways,
            depth=depth, piece_bytes=chosen, nbytes=pieces.nbytes, direct=pieces.direct,
        )  # fmt: skip
    ways = {str(size): partial(pieces.copy, size, pieces.sequence(size)) for size in chosen}
    ways["again"] = partial(pieces.copy, chosen[-1], pieces.sequence(chosen[-1]))
    trials |= {f"copy_{name}": each for name, each in series(
        bench, "copy_by_size", ways, piece_bytes=chosen, nbytes=pieces.nbytes
    ).items()}  # fmt: skip
    large, small = str(chosen[-1]), str(chosen[min(1, len(chosen) - 1)])
    bench.add(
        Ratio.of_pairs(
            "read_large_vs_small", trials[small], trials[large],
            (trials[large], trials["again"]), NO_BAR,
        ),
        Ratio.of_pairs(
            "copy_large_vs_small", trials[f"copy_{small}"], trials[f"copy_{large}"],
            (trials[f"copy_{large}"], trials["copy_again"]), NO_BAR,
        ),
    )  # fmt: skip


def layout(bench: Bench, pieces: Pieces, block_bytes: int, parts: int) -> None:
    """Measure blocks in one piece each against blocks whose layers lie apart."""
    block_bytes = min(block_bytes, pieces.nbytes // 2)
    page = 4 * KIB
    piece = max(page, block_bytes // parts // page * page)
    parts = block_bytes // piece
    blocks = pieces.nbytes // (piece * parts)
    whole = [block * parts * piece for block in range(blocks)]
    apart = layer_first(blocks, parts, piece)
    depth = DEPTHS[-1]
    for what, run in (("read", partial(pieces.read, depth=depth)), ("copy", pieces.copy)):
        ways: dict[str, Callable[[], Trial]] = {
            "block-first": partial(run, piece * parts, whole),
            "layer-first": partial(run, piece, apart),
            "again": partial(run, piece * parts, whole),
        }
        values = {"block_bytes": piece * parts, "piece_bytes": piece, "blocks": blocks}
        trials = series(bench, f"layout_{what}", ways, **values)
        same = trials["block-first"], trials["again"]
        bench.add(
            Ratio.of_pairs(
                f"{what}_block_first_vs_layer_first",
                trials["layer-first"], trials["block-first"], same, NO_BAR,
            )
        )  # fmt: skip


def chakra(bench: Bench, pieces: Pieces) -> None:
    """Copy the same bytes by as many calls as the Chakra paper counts before and after."""
    ways: dict[str, Callable[[], Trial]] = {}
    for count in CHAKRA_COPIES:
        size = pieces.nbytes // count // 64 * 64
        ways[str(count)] = partial(pieces.copy, size, [n * size for n in range(count)])
    few, many = map(str, CHAKRA_COPIES)
    ways["again"] = ways[few]
    trials = series(bench, "copies_by_count", ways, nbytes=pieces.nbytes)
    same = trials[few], trials["again"]
    bench.add(Ratio.of_pairs("copies_5958_vs_387", trials[many], trials[few], same, NO_BAR))


def duplex(bench: Bench, pieces: Pieces) -> None:
    """Measure reads and writes of the disk alone and at once."""
    size = min(8 * MIB, pieces.nbytes // 4)
    read = partial(pieces.read, size, pieces.sequence(size), DEPTHS[-1])
    ways: dict[str, Callable[[], Trial]]
    ways = {"read": read, "write": pieces.write, "both": partial(pieces.both, size), "again": read}
    trials = series(bench, "duplex", ways, nbytes=pieces.nbytes, direct=pieces.direct)
    one_by_one = [
        Trial(read.seconds + write.seconds)
        for read, write in zip(trials["read"], trials["write"], strict=True)
    ]
    same = trials["read"], trials["again"]
    bench.add(Ratio.of_pairs("duplex_one_by_one_vs_both", one_by_one, trials["both"], same, NO_BAR))
