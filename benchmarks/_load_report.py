"""What a workload came to, as rows of one table and one sentence. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from _load_work import percentiles
from rich.box import SIMPLE
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _harness import Ratio
    from _load_limits import Limits
    from _load_run import Seen

GIB: Final = 1 << 30
COLUMNS: Final = ("workload", "call", "calls", "p50", "p95", "p99", "GB/s", "raw")
CAPTION: Final = (
    "p50, p95, p99 in ms; restores from when they came. host, ssd: GiB restored from there. raw: "
    "how long the disk alone takes for the same bytes / how long it took. s/GiB: CPU. others: the "
    "part of all cores that other processes had."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload: bytes and seconds as measured; only blocks found right count as restored.

    ``wall_s`` ends when the last request is served, ``written_s`` when all that was put is durable.
    ``others`` is the part of the machine's cores that other processes took meanwhile.
    """

    name: str
    what: str
    block_bytes: int
    asked_blocks: int
    right_blocks: int
    wrong_blocks: int
    failed_blocks: int
    damaged_blocks: int
    dropped_blocks: int
    wall_s: float
    written_s: float
    host_bytes: int
    ssd_bytes: int
    read_bytes: int
    written_bytes: int
    put_bytes: int
    cpu_s: float
    checked_cpu_s: float
    others: float
    lookup_s: tuple[float, ...]
    ready_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    released_s: tuple[float, ...]
    limits: Limits

    @property
    def hit_rate(self) -> float:
        """Blocks restored as they were stored / blocks asked for."""
        return self.right_blocks / self.asked_blocks

    @property
    def restored_bytes(self) -> int:
        """Payload bytes restored as they were stored."""
        return self.right_blocks * self.block_bytes

    @property
    def restore_rate(self) -> float:
        """Bytes restored a second."""
        return self.restored_bytes / self.wall_s

    @property
    def put_rate(self) -> float:
        """Bytes taken over a second."""
        return self.put_bytes / self.wall_s

    @property
    def disk_share(self) -> float:
        """How long the disk alone would have taken for what it read and wrote / how long it took.

        1: as fast as the disk; little: the disk had little to do.
        """
        return self.limits.disk_s(self.read_bytes, self.written_bytes) / self.written_s

    @property
    def core_s_per_gib(self) -> float | None:
        """CPU seconds for each GiB restored or put, comparing left out; None if nothing moved."""
        moved = self.restored_bytes + self.put_bytes
        return (self.cpu_s - self.checked_cpu_s) / (moved / GIB) if moved else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; latencies as p50, p95 and p99 in ms."""
        value = asdict(self)
        for name in ("lookup_s", "ready_s", "waited_s", "released_s"):
            series = value.pop(name)
            value[f"{name[:-2]}_ms"] = [1e3 * each for each in percentiles(series)]
        return {
            "case": "workload",
            **value,
            "calls": len(self.lookup_s),
            "hit_rate": self.hit_rate,
            "restore_bytes_per_s": self.restore_rate,
            "put_bytes_per_s": self.put_rate,
            "disk_share": self.disk_share,
            "core_s_per_gib": self.core_s_per_gib,
        }


def outcome(name: str, what: str, seen: Seen, **measured: Any) -> Outcome:
    """Return what clients saw, with what was measured beside them."""
    served = seen.served
    results = [put.result(0) for put in seen.puts]
    return Outcome(
        name=name,
        what=what,
        asked_blocks=sum(each.blocks for each in served),
        right_blocks=sum(each.right for each in served),
        wrong_blocks=seen.wrong,
        failed_blocks=sum(each.failed for each in served),
        dropped_blocks=sum(each.dropped for each in results),
        put_bytes=sum(each.stored for each in results) * measured["block_bytes"],
        checked_cpu_s=seen.checked_cpu_s,
        lookup_s=tuple(each.lookup_s for each in served),
        ready_s=tuple(each.ready_s for each in served),
        waited_s=tuple(each.waited_s for each in served),
        released_s=tuple(seen.released_s),
        **measured,
    )


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return three rows a workload: lookup, restore, put; what they have in common beside them."""
    made = Table(title="load, by workload", caption=CAPTION, box=SIMPLE, pad_edge=False)
    for column in COLUMNS:
        left = column in ("workload", "call")
        made.add_column(column, no_wrap=True, justify="left" if left else "right")
    for each in outcomes:
        cost = "no bytes" if each.core_s_per_gib is None else f"{each.core_s_per_gib:.2f} s/GiB"
        tiers = f"host {each.host_bytes / GIB:.1f} ssd {each.ssd_bytes / GIB:.1f}"
        restored, put = f"{each.restore_rate / 1e9:.2f}", f"{each.put_rate / 1e9:.2f}"
        rows = (
            (each.name, *_row("lookup", each.lookup_s), "", f"{each.disk_share:.2f}"),
            (f"hit {each.hit_rate:.0%} {tiers}", *_row("restore", each.ready_s), restored, ""),
            (f"{cost} others {each.others:.0%}", *_row("put", each.released_s), put, ""),
        )
        for row in rows:
            made.add_row(*row, end_section=row is rows[-1])
    return made


def _row(call: str, seconds: Sequence[float]) -> tuple[str, ...]:
    ms = [1e3 * each for each in percentiles(seconds)]
    shown = [f"{each:.2f}" if each < 10 else f"{each:.0f}" for each in ms]
    return call, str(len(seconds)), *(shown or ["-"] * 3)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of all workloads and passes together."""

    right: int
    wrong: int
    damaged: int


def verdict(ratios: Sequence[Ratio], outcomes: Sequence[Outcome], blocks: Blocks) -> str:
    """Say in one sentence what was found; if bytes are wrong nothing else counts."""
    if blocks.wrong:
        return (
            f"WRONG BYTES: {blocks.wrong} restored blocks differ from what was stored; "
            "nothing else that is shown here means anything."
        )
    named = {ratio.name: ratio for ratio in ratios}
    parts = []
    if (ratio := named.get("load_vs_raw")) is not None:
        parts.append(f"from a cold SSD the store restores at {ratio.value:.2f} of what the disk"
                     f" alone delivers ({ratio.verdict})")  # fmt: skip
    if (ratio := named.get("lookup_p99_ms")) is not None:
        parts.append(f"p99 of a lookup under that load is {ratio.value:.1f} ms ({ratio.verdict})")
    if outcomes and not parts:
        parts += [f"{each.name}: {each.hit_rate:.0%} of the blocks restored at"
                  f" {each.restore_rate / 1e9:.2f} GB/s" for each in outcomes]  # fmt: skip
    damaged = (
        f"; {blocks.damaged} could not be read as they were stored, were found out and are in no"
        " throughput" if blocks.damaged else ""
    )  # fmt: skip
    text = "; ".join(parts)
    return (
        f"{text[:1].upper()}{text[1:]}; all {blocks.right} blocks that count were compared, every"
        f" byte of them, and are right{damaged}."
    )
