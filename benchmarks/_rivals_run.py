"""Rounds of kvtier and one rival by turns, on fresh stores and in fresh processes each."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from _blocks import SHAPES
from _disk import work_folder
from _harness import Bar, Ratio, Trial, interleave
from _rivals_kvtier import Ours, ours
from _rivals_process import Rival, environment
from _rivals_table import Row, Series, quickest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from _blocks import Subject
    from _harness import Bench
    from _rivals_process import Facts, Source

KINDS: Final = ("write", "cold", "warm")
MINE: Final = ("kvtier", "again")
MEMORY: Final = "_memory"
"""How kvtier's names end for a store without an SSD."""
STAGES: Final = 2 + len(KINDS)
"""Ticks of one round: opened, used once, each kind."""

Way = dict[str, "Callable[[], Trial]"]


@dataclass(slots=True)
class Met:
    """What all rounds against one rival brought: trials by kind and way, and what was said."""

    backends: Mapping[str, Facts] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    trials: dict[str, dict[str, list[Trial]]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    damage: dict[str, str] = field(default_factory=dict)
    io: str = ""

    def rows(self, label: str) -> list[Row]:
        """Return a row per backend, by the way that was quickest in each kind."""
        return [self._row(label, name, facts) for name, facts in self.backends.items()]

    def ways(self, kind: str, backend: str = "") -> dict[str, list[Trial]]:
        """Return a rival's trials of one kind by way, of one backend or of all."""
        return {
            name: trials
            for name, trials in self.trials[kind].items()
            if not name.startswith(MINE) and (not backend or name.partition(":")[0] == backend)
        }

    def _row(self, label: str, name: str, facts: Facts) -> Row:
        suffix = MEMORY if facts.durability == "memory" else ""
        theirs: Series = {}
        for kind in KINDS:
            ways = self.ways(kind, name)
            if ways:
                theirs[kind] = quickest(ways)[1]
        mine, again = ({kind: self.trials[kind][who + suffix] for kind in theirs} for who in MINE)
        outcome = self.damage.get(name, "")
        checks = f"{facts.checks}: {outcome}" if outcome else facts.checks
        shown = f"{label} {name}".strip()
        return Row(shown, facts.durability, checks, facts.durable, theirs, mine, again)


def meet(bench: Bench, folder: Path, source: Source, subject: Subject, above: str) -> Met:
    """Measure kvtier and one rival by turns, with as many rounds as a ratio needs."""
    met = Met()
    with bench.progress(f"{source.name}: environment", source.ticks) as tick:
        python = environment(source, source.folder(above), tick)
    rounds = bench.options.pairs
    with bench.progress(f"kvtier and {source.name} by turns", STAGES * rounds) as tick:
        for number in range(rounds):
            last = number == rounds - 1
            with work_folder(str(folder / f"{source.name}-{number}"), bench.console) as inside:
                _round(
                    met, inside, source, python, subject, tick, backwards=number % 2 == 1, last=last
                )
    return met


def _round(
    met: Met,
    folder: Path,
    source: Source,
    python: Path,
    subject: Subject,
    tick: Callable[[], None],
    *,
    backwards: bool,
    last: bool,
) -> None:
    layers, kv_heads, head_dim = SHAPES[subject.mib]
    settings = {
        "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim,
        "blocks": subject.blocks, "seed": subject.mib,
    }  # fmt: skip
    with ExitStack() as stack:
        mine = stack.enter_context(ours(subject, folder))
        rival = stack.enter_context(Rival(source, python, folder, settings))
        tick()
        met.backends, met.skipped, met.io = rival.backends, rival.skipped, mine.io
        for name, facts in rival.backends.items():  # all was used once before it counts
            rival.write(name)
            for way in facts.ways:
                rival.read(name, way, cold=facts.cold)
        tick()
        for kind in KINDS:
            ways = _ways(kind, mine, rival)
            order = reversed(ways) if backwards else iter(ways)
            for way, trials in interleave({name: ways[name] for name in order}, 1).items():
                met.trials[kind].setdefault(way, []).extend(trials)
            tick()
        if last:
            met.damage = {name: rival.damage(name) for name in rival.backends}


def _ways(kind: str, mine: Ours, rival: Rival) -> Way:
    """Return one kind of trial of everybody: kvtier first and last, each backend in its ways."""
    own = {"write": mine.write, "cold": mine.cold, "warm": mine.warm}
    in_memory = {"write": mine.memory_write, "warm": mine.memory_read}
    durabilities = {facts.durability for facts in rival.backends.values()}
    first: Way = {}
    theirs: Way = {}
    if durabilities - {"memory"}:
        first[""] = own[kind]
    if "memory" in durabilities and kind in in_memory:
        first[MEMORY] = in_memory[kind]
    for name, facts in rival.backends.items():
        if kind == "write":
            theirs[name] = partial(rival.write, name)
        elif kind == "warm" or facts.cold:
            for way in facts.ways:
                theirs[f"{name}:{way}"] = partial(rival.read, name, way, cold=kind == "cold")
    return {
        **{f"kvtier{suffix}": run for suffix, run in first.items()},
        **theirs,
        **{f"again{suffix}": run for suffix, run in first.items()},
    }


def lmcache_ratios(met: Met, bars: Mapping[str, Bar]) -> tuple[list[Ratio], dict[str, str]]:
    """Return its cold reads over kvtier's: of the disk backend with O_DIRECT, and of all ways."""
    ways = met.ways("cold")
    direct = {way: trials for way, trials in ways.items() if way.startswith("disk_direct:")}
    mine, again = (met.trials["cold"][who] for who in MINE)
    ratios, chosen = [], {}
    for name, among in (("odirect", direct), ("best", ways)):
        way, trials = quickest(among)
        full = f"ssd_read_vs_lmcache_{name}"
        ratios.append(Ratio.of_pairs(full, trials, mine, (mine, again), bars[full]))
        chosen[name] = way
    return ratios, chosen
