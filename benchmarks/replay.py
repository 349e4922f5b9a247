"""Replay public traces against placement policies: what each saves, moves and writes.

TTFT is what the planner predicts on an idle device and idle links; requests come one after the
other, and writes cost nothing but their bytes. The catalog and the policies are the real ones.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from _harness import NO_BAR, Bar, Bench, Ratio, Trial, parse
from _replay_admission import PricedWrites, SecondUse, TailsOnly
from _replay_caches import Stored
from _replay_run import REFERENCES, Case, Row, infinite, make, prices, replay, ttft
from _replay_traces import TRACES, trace
from _replay_ttft import CONTIGUOUS, HOLES, TODAY, Hardware, Outcome, Way
from rich.box import SIMPLE
from rich.table import Table

from kvtier.history import History
from kvtier.plan import Tier
from kvtier.policies import POLICY
from kvtier.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PARTS: Final = ("policies", "host", "prices", "history", "hardware", "writes", "tails", "speed")
SIZES: Final = ("small", "mid", "large")
MOONCAKE: Final = ("conversation", "synthetic")
BUDGETS: Final = {
    "conversation": (4352, 8704, 17408),
    "synthetic": (4352, 8704, 17408),
    "agentic": (500, 650, 800),
    "agentic-users": (2500, 5000, 10000),
}
"""Blocks on the SSD, by trace; those of Mooncake's are 272, 544 and 1,088 GiB of an 8B model."""
HOST_SHARE: Final = 4
"""Of so many blocks on the SSD one may be in host memory, where host memory is counted too."""
CONTENDERS: Final = (
    ("lru", TODAY),
    ("lru", CONTIGUOUS),
    ("sieve", CONTIGUOUS),
    ("prefix-closed", CONTIGUOUS),
    ("priced", CONTIGUOUS),
    ("priced", HOLES),
    ("belady", HOLES),
    ("infinite", HOLES),
)
QUICK: Final = (
    ("lru", TODAY),
    ("lru", CONTIGUOUS),
    ("prefix-closed", CONTIGUOUS),
    ("priced", HOLES),
)
BARS: Final = {
    "conversation": (2.2, 1.4, 1.25),
    "synthetic": (1.4, 1.25, 1.2),
}
OTHERS: Final = (
    Hardware(ssd="SSD 3 GB/s"),
    Hardware(ssd="SSD 14 GB/s"),
    Hardware(device="A100"),
    Hardware(model="Llama-3-70B", device="H100 x8"),
)
HISTORY_PLACES: Final = (1 << 12, 1 << 14, 1 << 16, 1 << 20)
WRITE_SHARES: Final = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
WRITE_HALF: Final = 0.5
COMPUTE_PRICES: Final = (0.0, 0.5)
SMOKE_REQUESTS: Final = 120
VALUES: Final = {
    "trace": f"replay only this one: {', '.join(TRACES)}",
    "policies": f"comma-separated: {', '.join((*POLICY, *REFERENCES))}",
    "ssd-blocks": "comma-separated budgets of the SSD, in blocks of the trace",
    "host-blocks": "budget of host memory, in blocks (default: 0)",
    "model": "name in kvtier.profiles.MODELS",
    "device": "name in kvtier.profiles.DEVICES",
    "ssd": "name in kvtier.profiles.LINKS",
}


class Replays:
    """Runs cases once each, shows them as tables, and keeps them for the ratios."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._requests = SMOKE_REQUESTS if bench.options.smoke else None
        self._rows: dict[Case, Row] = {}

    def run(self, part: str, cases: Sequence[Case]) -> list[Row]:
        """Replay cases as they are; returns their rows."""
        with self._bench.progress(part, len(cases)) as tick:
            for case in cases:
                if case not in self._rows:
                    self._rows[case] = replay(case, requests=self._requests)
                    self.record(part, self._rows[case])
                tick()
        return [self._rows[case] for case in cases]

    def vary(self, part: str, case: Case, label: str, **changes: Any) -> Row:
        """Replay a case whose cache differs from what its name says."""
        found = self.trace(case)
        row = replay(case, make(case, found, **changes), self._requests)
        self.record(part, row, variant=label)
        return row

    def trace(self, case: Case) -> Any:
        """Return the trace of a case, as long as it is replayed."""
        found = trace(case.trace)
        return found if self._requests is None else found.first(self._requests)

    def record(self, part: str, row: Row, **values: Any) -> None:
        """Keep a row among the results."""
        self._bench.results.append({"case": part, **values, **row.to_json()})

    def table(self, title: str, lines: Iterable[tuple[str, Row]], whole: Row | None = None) -> None:
        """Print rows, one a line; ``whole`` is what everything else is a share of."""
        table = Table(title=title, box=SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
        table.add_column("policy", no_wrap=True)
        for name in ("blocks", "hits", "saved s", "of all", "read GiB", "wrote GiB", "GPU s"):
            table.add_column(name, justify="right", no_wrap=True)
        for label, row in lines:
            gib = row.block_bytes / 2**30
            table.add_row(
                label,
                f"{row.case.ssd_blocks:,}" if row.case.ssd_blocks else "-",
                f"{row.hit_rate:.1%}",
                f"{row.saved_s:.1f}",
                f"{row.saved_s / whole.saved_s:.0%}" if whole else "",
                f"{sum(row.loaded.values()) * gib:,.0f}",
                f"{row.written['ssd'] * gib:,.0f}",
                f"{row.compute_s:.0f}",
            )
        self._bench.console.print(table, highlight=False)


def exact(bench: Bench, name: str, value: float, bar: Bar = NO_BAR) -> None:
    """Add a number that is the same in every run."""
    bench.add(Ratio(name, value, bar, 0.0, bench.options.pairs))


def label(policy: str, way: Way) -> str:
    """Say what a row is of."""
    return policy if policy in REFERENCES else f"{policy}, {way}"


# -- the parts


def policies(bench: Bench, replays: Replays) -> None:
    """Compare policies and ways over traces and budgets."""
    quick = bench.options.quick or bench.options.smoke
    names = MOONCAKE if quick else tuple(TRACES)
    wanted = (*QUICK, ("infinite", HOLES)) if quick else CONTENDERS
    for name in names:
        cases = [
            Case(name, policy, way, 0 if policy == "infinite" else blocks)
            for blocks in BUDGETS[name]
            for policy, way in wanted
        ]
        cases = list(dict.fromkeys(cases))
        rows = dict(zip(cases, replays.run(f"policies, {name}", cases), strict=True))
        whole = rows[Case(name, "infinite", HOLES, 0)]
        title = f"{name}: {whole.recompute_s:,.0f} s to recompute, {whole.asked:,} blocks"
        ordered = sorted(rows.values(), key=lambda row: row.case.ssd_blocks or 1 << 62)
        lines = [(label(row.case.policy, row.case.way), row) for row in ordered]
        replays.table(title, lines, whole)
        compare(bench, name, rows, whole)


def compare(bench: Bench, name: str, rows: dict[Case, Row], whole: Row) -> None:
    """Add the ratios of one trace."""
    for at, (size, blocks) in enumerate(zip(SIZES, BUDGETS[name], strict=True)):
        saved = {
            (policy, way): rows[Case(name, policy, way, blocks)].saved_s for policy, way in QUICK
        }
        bar = Bar(low=BARS[name][at]) if name in BARS else NO_BAR
        suffix = f"{name}_{size}".replace("-", "_")
        over = saved["priced", HOLES] / saved["lru", TODAY]
        exact(bench, f"saved_vs_lru_{suffix}", over, bar)
        closed = saved["prefix-closed", CONTIGUOUS] / saved["lru", CONTIGUOUS]
        exact(bench, f"prefix_closed_vs_lru_{suffix}", closed, Bar(low=1.0))
    if name == "conversation":
        large = rows[Case(name, "priced", HOLES, BUDGETS[name][-1])]
        exact(bench, "saved_vs_infinite_large", large.saved_s / whole.saved_s, Bar(low=0.8))


def host(bench: Bench, replays: Replays) -> None:
    """Give a quarter of the budget to host memory as well."""
    del bench
    for name in MOONCAKE:
        cases = [
            Case(name, policy, way, blocks, blocks // HOST_SHARE)
            for blocks in BUDGETS[name][:2]
            for policy, way in QUICK
        ]
        lines = [
            (label(row.case.policy, row.case.way), row)
            for row in replays.run(f"host, {name}", cases)
        ]
        replays.table(f"{name}, and a quarter as many blocks in host memory", lines)


def worths(case: Case) -> dict[str, Prices]:
    """Return other ideas of what a block is worth, by name."""
    tokens = trace(case.trace).block_tokens
    costs = case.hardware.costs(tokens)
    seconds = costs.block_seconds(tokens, 0, 4096)
    load_s = costs.load_seconds(Tier.SSD, case.hardware.block_bytes(tokens))
    net = (seconds - load_s).clip(seconds[0] / 16)
    ideas = {
        "1": seconds / seconds,
        "recompute": seconds,
        "sqrt(recompute)": (seconds / seconds[0]) ** 0.5,
        "recompute^2": (seconds / seconds[0]) ** 2,
        "recompute - load / 2": (seconds - load_s / 2).clip(seconds[0] / 16),
        "recompute - load": net,
        "(recompute - load)^2": (net / seconds[0]) ** 2,
    }
    return {name: Prices(tuple((each / seconds[0]).tolist())) for name, each in ideas.items()}


def ideas(bench: Bench, replays: Replays) -> None:
    """Try other prices; what is known of the past and of the hardware stays the same."""
    names = MOONCAKE if bench.options.quick else (*MOONCAKE, "agentic-users")
    for name in names:
        case = Case(name, "priced", HOLES, BUDGETS[name][0])
        with bench.progress(f"prices, {name}", len(worths(case))) as tick:
            lines = []
            for idea, priced in worths(case).items():
                lines.append((idea, replays.vary("prices", case, idea, priced=priced)))
                tick()
        replays.table(f"{name}: a block is worth uses x ...", lines)


def history(bench: Bench, replays: Replays) -> None:
    """Bound how many blocks are remembered that have no copy."""
    for name in MOONCAKE:
        case = Case(name, "priced", HOLES, BUDGETS[name][0])
        lines = []
        with bench.progress(f"history, {name}", len(HISTORY_PLACES)) as tick:
            for places in HISTORY_PLACES:
                remembered = History(places)
                lines.append(
                    (f"{places:,}", replays.vary("history", case, f"{places}", history=remembered))
                )
                tick()
        replays.table(f"{name}: places for blocks that have no copy", lines)


def hardware(bench: Bench, replays: Replays) -> None:
    """Compare on other models, devices and disks."""
    saved: dict[Case, float] = {}
    for name in MOONCAKE:
        cases = [
            Case(name, policy, way, blocks, hardware=each)
            for each in OTHERS
            for blocks in BUDGETS[name]
            for policy, way in QUICK
        ]
        rows = replays.run(f"hardware, {name}", cases)
        for each in OTHERS:
            lines = [
                (label(row.case.policy, row.case.way), row)
                for row in rows
                if row.case.hardware == each
            ]
            replays.table(f"{name}: {each}", lines)
        saved |= {row.case: row.saved_s for row in rows}
    for ratio, policy, way, base in (
        ("saved_vs_lru", "priced", HOLES, TODAY),
        ("prefix_closed_vs_lru", "prefix-closed", CONTIGUOUS, CONTIGUOUS),
    ):
        pairs = [
            (each, saved[replace(case, policy="lru", way=base)])
            for case, each in saved.items()
            if (case.policy, case.way) == (policy, way)
        ]
        assert all(each >= base_s for each, base_s in pairs if base_s <= 0), "a loss is no base"
        # Over a slow link, loading alone may lose time: of a loss there is no multiple.
        least = min(each / base_s for each, base_s in pairs if base_s > 0)
        exact(bench, f"{ratio}_hardware_min", least, Bar(low=1.0))


def writes(bench: Bench, replays: Replays) -> None:
    """Draw savings over bytes written, by what decides about a write."""
    sizes = range(1, 2) if bench.options.quick else range(len(SIZES))
    for name in MOONCAKE:
        for size in sizes:
            case = Case(name, "priced", HOLES, BUDGETS[name][size])
            found, priced = replays.trace(case), prices(case.hardware, trace(name).block_tokens)
            rules = {"second use": SecondUse(found)} | {
                f"priced, {share:.0%}": PricedWrites(found, priced, share) for share in WRITE_SHARES
            }
            lines = [("write-through", replays.vary("writes", case, "write-through"))]
            with bench.progress(f"writes, {name}, {SIZES[size]}", len(rules)) as tick:
                for rule, admission in rules.items():
                    lines.append((rule, replays.vary("writes", case, rule, admission=admission)))
                    tick()
            through = lines[0][1]
            replays.table(f"{name}: what decides about a write to the SSD", lines, through)
            half = dict(lines)[f"priced, {WRITE_HALF:.0%}"]
            suffix = f"{name}_{SIZES[size]}"
            saved = half.saved_s / through.saved_s
            exact(bench, f"half_writes_saved_{suffix}", saved, Bar(low=0.85))


def splits(case: Case) -> list[int]:
    """Return for a prompt of each length, all on the SSD, how many blocks are recomputed."""
    found = trace(case.trace)
    plans = ttft(case.hardware, case.way, found.block_tokens, found.longest)
    return [0] + [
        len(plans.of((Tier.SSD,) * blocks).recomputed) for blocks in range(1, found.longest + 1)
    ]


def tails(bench: Bench, replays: Replays) -> None:
    """Leave out what the plan would recompute anyway, at two prices of compute."""
    for name in MOONCAKE:
        lines: list[tuple[str, Row]] = []
        with bench.progress(f"tails, {name}", 2 * len(COMPUTE_PRICES)) as tick:
            for price in COMPUTE_PRICES:
                case = Case(name, "priced", replace(HOLES, price=price), BUDGETS[name][1])
                for rule, admission in (
                    ("everything", None),
                    ("tails only", TailsOnly(replays.trace(case), splits(case))),
                ):
                    row = replays.vary("tails", case, rule, admission=admission)
                    lines.append((f"{rule}, compute at {price:g}", row))
                    tick()
        replays.table(f"{name}: without what the plan would recompute anyway", lines)


def speed(bench: Bench, replays: Replays) -> None:
    """Time the catalog and its policy alone: blocks asked for per second of one core.

    An event is a block of a prompt: looked up and touched, and where it was missing begun, put in
    order, made room for and committed. Here that is five blocks of six, each for another's room.
    """
    case = Case("conversation", "priced", HOLES, BUDGETS["conversation"][1])
    found = replays.trace(case)
    nothing = Outcome(0.0, 0.0, 0.0, frozenset(), 0, 0)

    def once() -> float:
        cached = make(case, found)
        assert isinstance(cached, Stored)
        begun = time.thread_time()
        for number in range(len(found.requests)):
            cached.use(number, cached.tiers(number), nothing)
        return found.asked / (time.thread_time() - begun)

    with bench.progress("speed", bench.options.pairs + 1) as tick:
        rates = []
        for _ in range(bench.options.pairs + 1):
            rates.append(once())
            tick()
    bench.add(Ratio.of_series("replay_events_per_s", rates, Bar(low=200_000)))
    bench.record("speed", {"priced": [Trial(found.asked / rate) for rate in rates]})


def asked_for(bench: Bench, replays: Replays) -> None:
    """Replay what the command line names."""
    values = bench.options.values
    chosen = Hardware(**{name: values[name] for name in ("model", "device", "ssd") if values[name]})
    for name in [values["trace"]] if values["trace"] else list(MOONCAKE):
        budgets = [int(each) for each in values["ssd-blocks"].split(",") if each]
        contenders: Sequence[tuple[str, Way]] = QUICK
        if values["policies"]:
            named = values["policies"].split(",")
            contenders = [each for each in CONTENDERS if each[0] in named]
        cases = [
            Case(
                name, policy, way, blocks,
                0 if policy in REFERENCES else int(values["host-blocks"] or 0), chosen,
            )
            for blocks in budgets or BUDGETS[name]
            for policy, way in contenders
        ]  # fmt: skip
        whole = infinite(cases[0])
        *rows, everything = replays.run(name, [*cases, whole])
        lines = [(label(row.case.policy, row.case.way), row) for row in rows]
        replays.table(f"{name}, {chosen}", lines, everything)


RUNS: Final[dict[str, Callable[[Bench, Replays], None]]] = {
    "policies": policies,
    "host": host,
    "prices": ideas,
    "history": history,
    "hardware": hardware,
    "writes": writes,
    "tails": tails,
    "speed": speed,
}
IN_QUICK: Final = ("policies", "writes", "speed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    options = parse(__doc__.partition("\n")[0], PARTS, argv, values=VALUES)
    bench = Bench("replay", options, hardware=str(Hardware()), budgets=BUDGETS)
    replays = Replays(bench)
    if any(options.values.values()):
        asked_for(bench, replays)
        return bench.finish()
    for part, run in RUNS.items():
        if options.wants(part) and (options.only or not options.quick or part in IN_QUICK):
            run(bench, replays)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
