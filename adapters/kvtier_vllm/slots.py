"""An engine's paged KV as the slots of kvtier's blocks: whole pages, as opaque bytes.

::

    layer      rows [pages, values]   one row is one page of one layer, as the backend has it
    block b    its pages in token order, in every layer; a record has them layer by layer

On a GPU a block is hundreds of small pieces in hundreds of places, and launching a copy for each
takes longer than moving them: the pieces are gathered on the device, and cross the link in one run.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtier import SpecMismatch, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier import BlockLayout

__all__ = ["CARRIER", "EnginePages", "GpuLane", "PagedSlots"]

STAGE_BYTES: Final = 8 << 20
"""What each copying thread keeps on a GPU to gather pages in."""

CARRIER: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What values are copied as, by their size: bits."""


class EnginePages:
    """Every page of one worker, in all layers. ``layers`` are vLLM's, [pages, ...] each.

    Where the attention backend has smaller blocks than the engine's block table, a layer has
    several of its rows for one page.

    ``lane`` copies by gathering on a device; None where numpy can reach the pages. Raises
    ``UnsupportedModel`` where a page does not lie in one run.
    """

    def __init__(
        self,
        layout: BlockLayout,
        layers: Mapping[str, torch.Tensor],
        pages: int,
        lane: GpuLane | None = None,
    ) -> None:
        self.layout = layout
        self.pages = pages
        shapes = {part.shape for part in layout.tensors}
        if len(shapes) != 1 or len(layout.parts) != len(layers):
            raise SpecMismatch(f"{len(layers)} layers of one shape wanted, the layout has {shapes}")
        self.page_shape = shapes.pop()
        self.rows = [_rows(name, tensor, pages) for name, tensor in layers.items()]
        self.device = self.rows[0].device
        values = int(np.prod(self.page_shape))
        for name, rows in zip(layers, self.rows, strict=True):
            if rows.shape[1] != values or str(rows.dtype) != f"torch.{layout.dtype}":
                raise SpecMismatch(
                    f"{name}: pages of {rows.shape[1]} {rows.dtype}, {values} {layout.dtype} wanted"
                )
        runs = [_wide(run.view(CARRIER[layout.itemsize])) for run in _runs(self.rows)]
        self.lane = lane or (None if self.device.type == "cpu" else GpuLane())
        self.runs = [run.numpy() for run in runs] if self.lane is None else runs
        """Layers that lie at equal distances, as one [layers, pages, values]."""


class GpuLane(threading.local):
    """What one copying thread has on a GPU: a stream beside the engine's, and room to gather in."""

    def __init__(self, stage_bytes: int = STAGE_BYTES) -> None:
        self.stage_bytes = stage_bytes
        self._stream: Any = None
        self._stage: torch.Tensor | None = None

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[Any]:
        """Queue on this thread's stream; what was queued is done when the scope ends."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield self._stream
        finally:
            self._stream.synchronize()

    def stage(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return this thread's staging bytes, at least so many."""
        if self._stage is None or self._stage.numel() < nbytes:
            self._stage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._stage


class PagedSlots:
    """KVSlots over pages: which block is in which of the engine's pages. One thread places."""

    def __init__(self, pages: EnginePages) -> None:
        self._pages = pages
        self._per_block = len(pages.layout.tensors) // len(pages.layout.parts)
        self._placed: dict[int, tuple[tuple[int, ...], Any]] = {}

    def place(self, block: int, pages: Sequence[int], *, after: Any = None) -> None:
        """Say which pages, in token order, hold ``block`` from now on.

        ``after`` is a CUDA event that a copy into them waits for: what the engine had queued before
        it gave them away may still read or write there.
        """
        if len(pages) != self._per_block or not all(0 <= n < self._pages.pages for n in pages):
            raise SpecMismatch(
                f"block {block}: pages {list(pages)} given, {self._per_block} of "
                f"[0, {self._pages.pages}) wanted"
            )
        self._placed[block] = tuple(pages), after

    @property
    def layout(self) -> BlockLayout:
        """The layout of each block."""
        return self._pages.layout

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._pages.device

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return one tensor per layer and page; what it holds is the backend's affair."""
        shape = self._pages.page_shape
        return [rows[page].view(shape) for rows in self._pages.rows for page in self._at(block)]

    def gather(self, block: int, into: memoryview) -> None:
        """Copy a block out of its pages; returns when it is there."""
        pages = self._at(block)
        if self._pages.lane is not None:
            self._gather(self._pages.lane, pages, into)
            return
        for piece, flat in self._pieces(pages, into):
            for at, count, run in _steps(pages):
                np.copyto(flat[:, at : at + count], piece[:, run])

    def scatter(self, block: int, source: memoryview) -> None:
        """Copy a block into its pages; returns when it is there."""
        pages = self._at(block)
        if self._pages.lane is not None:
            self._scatter(self._pages.lane, pages, source, self._placed[block][1])
            return
        for piece, flat in self._pieces(pages, source):
            for at, count, run in _steps(pages):
                np.copyto(piece[:, run], flat[:, at : at + count])

    def _at(self, block: int) -> tuple[int, ...]:
        if block not in self._placed:
            raise SpecMismatch(f"block {block} has no pages")
        return self._placed[block][0]

    def _pieces(self, pages: Sequence[int], payload: memoryview) -> Iterator[tuple[Any, Any]]:
        """Yield each run of layers with its stretch of a payload, [layers, pages, values]."""
        whole = np.frombuffer(payload, np.uint8)
        start = 0
        for run in self._pages.runs:
            shape = (run.shape[0], len(pages), run.shape[2])
            stop = start + int(np.prod(shape)) * run.itemsize
            dtype = np.uint8 if run.itemsize == 1 else f"i{run.itemsize}"  # torch's carriers
            yield run, whole[start:stop].view(dtype).reshape(shape)
            start = stop

    # -- on a GPU: gather a few layers, move them in one run, and so on

    def _gather(self, lane: GpuLane, pages: Sequence[int], into: memoryview) -> None:
        with lane.beside(self.device):
            index = torch.tensor(pages, device=self.device)
            for layers, host, stage in self._stages(lane, pages, into):
                torch.index_select(layers, 1, index, out=stage)
                host.copy_(stage, non_blocking=True)

    def _scatter(self, lane: GpuLane, pages: Sequence[int], source: memoryview, after: Any) -> None:
        with lane.beside(self.device) as stream:
            if after is not None:
                stream.wait_event(after)
            index = torch.tensor(pages, device=self.device)
            for layers, host, stage in self._stages(lane, pages, source):
                stage.copy_(host, non_blocking=True)
                layers.index_copy_(1, index, stage)

    def _stages(
        self, lane: GpuLane, pages: Sequence[int], payload: memoryview
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield layers, their stretch of a payload, and a staging tensor of the same shape."""
        for run, flat in self._pieces(pages, payload):
            layer_bytes = len(pages) * run.shape[2] * run.element_size()
            step = max(1, lane.stage_bytes // layer_bytes)
            room = lane.stage(min(step, run.shape[0]) * layer_bytes, self.device)
            host = torch.from_numpy(flat)
            for first in range(0, run.shape[0], step):
                layers = run[first : first + step]
                shape = (layers.shape[0], len(pages), run.shape[2])
                stage = room[: shape[0] * layer_bytes].view(run.dtype).view(shape)
                yield layers, host[first : first + step], stage


def _rows(name: str, tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a layer as [pages, values], a page as its bytes lie in memory."""
    if not pages or tensor.shape[0] % pages:
        raise UnsupportedModel(f"{name}: {tensor.shape[0]} rows for {pages} pages")
    whole: torch.Tensor = tensor.unflatten(0, (pages, -1))  # type: ignore[no-untyped-call]
    inner = sorted(zip(whole.stride()[1:], whole.shape[1:], strict=True))
    values = 1
    for stride, size in inner:
        if size != 1 and stride != values:
            raise UnsupportedModel(
                f"{name}: a page of shape {list(tensor.shape[1:])} and strides "
                f"{list(tensor.stride()[1:])} is not one run of bytes; "
                "set VLLM_KV_CACHE_LAYOUT=LBNHC (or LBHNC)"
            )
        values *= size
    return whole.as_strided((pages, values), (whole.stride(0), 1), whole.storage_offset())


def _runs(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return layers as few [layers, pages, values]: those at equal distances in one memory as one.

    Their order stays.
    """
    runs: list[tuple[int, int, int]] = []  # first layer, layers, distance
    for layer, tensor in enumerate(rows):
        if runs:
            first, count, step = runs[-1]
            last = rows[layer - 1]
            gap = int(tensor.storage_offset()) - int(last.storage_offset())
            alike = (
                tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
                and tensor.stride() == last.stride()
                and tensor.shape == last.shape
            )
            if alike and gap > 0 and (count == 1 or gap == step):
                runs[-1] = (first, count + 1, gap)
                continue
        runs.append((layer, 1, 0))
    return [
        rows[first].as_strided(
            (count, *rows[first].shape),
            (step, *rows[first].stride()),
            rows[first].storage_offset(),
        )
        for first, count, step in runs
    ]


def _wide(run: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as values of 8 bytes if they are whole ones: fewer to be moved."""
    whole = 8 // run.itemsize
    if any(size % whole for size in (run.shape[2], *run.stride()[:2], run.storage_offset())):
        return run
    return run.view(CARRIER[8])


def _steps(pages: Sequence[int]) -> Iterator[tuple[int, int, slice]]:
    """Yield stretches of pages at equal distances: where it begins, how many, which."""
    at = 0
    while at < len(pages):
        count = 1
        step = pages[at + 1] - pages[at] if at + 1 < len(pages) else 1
        while step and at + count < len(pages) and pages[at + count] - pages[at] == count * step:
            count += 1
        stop = pages[at] + count * step
        yield at, count, slice(pages[at], stop if stop >= 0 else None, step)
        at += count
