"""Is it negligible here? Three conditions that would refute "it depends", and one sentence.

A condition is met by a case that was *measured* (both sides of it in this run), *measured +
simulated* (a link of this machine, a device from a profile), or *simulated*.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from _breakdown_evidence import PAIRS, PCIE5, SLOW_LINKS, preset
from _breakdown_shares import LENGTHS, Row, Setup, at_once_s, recompute_s

from kvtier.plan import Tier
from kvtier.profiles import LINKS, Link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEGLIGIBLE: Final = 0.01
SMALL: Final = 0.10
DOMINATES: Final = 0.5
"""Parts of a TTFT."""
TENS_OF_GB: Final = 10e9
NETWORKS: Final = tuple(link for link in SLOW_LINKS if link.name.startswith("NIC"))
BY_KIND: Final = ("measured here", "measured + simulated", "simulated")
"""What convinces more comes first."""


@dataclass(frozen=True, slots=True)
class Case:
    """What was looked at for a condition: the number, where, and what kind of number it is."""

    where: str
    value: float
    kind: str
    met: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition with the cases that were looked at, the most telling one first."""

    what: str
    cases: tuple[Case, ...] = field(default=())

    @property
    def met(self) -> list[Case]:
        """The cases that meet it, what was measured first."""
        return sorted(
            (case for case in self.cases if case.met), key=lambda c: BY_KIND.index(c.kind)
        )

    @property
    def verdict(self) -> str:
        """Say whether it was met, by which kind of case."""
        return f"met ({self.met[0].kind})" if self.met else "not met"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        cases = [asdict(case) for case in (self.met or self.cases)[:8]]
        looked_at = {"looked_at": len(self.cases), "met": len(self.met)}
        return {"case": "condition", "what": self.what, "verdict": self.verdict, **looked_at,
                "cases": cases}  # fmt: skip


def scale_out() -> Condition:
    """Look for a network that carries tens of GB in less than 1 % of the TTFT.

    Prefill on one machine, then the KV moves to the one that decodes: TTFT is the sum.
    """
    cases = []
    for model, device in PAIRS:
        for link in NETWORKS:
            for tokens in LENGTHS:
                setup = preset(model, device, link)
                nbytes = tokens * setup.model.kv_token_bytes
                if nbytes >= TENS_OF_GB:
                    move_s = at_once_s(setup, tokens, Tier.SSD)
                    share = move_s / (move_s + recompute_s(setup, tokens))
                    where = (
                        f"{model}, {device}, {link.name}, {tokens >> 10}K: {nbytes / 1e9:.0f} GB"
                    )
                    cases.append(Case(where, share, "simulated", share < NEGLIGIBLE))
    cases.sort(key=lambda case: case.value)
    what = "a network carries tens of GB in < 1 % of TTFT (prefill there, decode here)"
    return Condition(what, tuple(cases))


def dominated(
    setup: Setup, here: Link | None, restored: Mapping[tuple[str, int], float]
) -> Condition:
    """Look for a path within a machine on which moving KV is most of the TTFT.

    ``restored``: seconds of whole restores in this run, by where and tokens; the step that follows
    is the device's.
    """
    cases = []
    for (where, tokens), seconds in restored.items():
        share = seconds / (seconds + setup.new_s(tokens))
        cases.append(Case(where, share, "measured + simulated", share > DOMINATES))
    links = [(here, "measured + simulated")] if here is not None else []
    links += [(LINKS[name], "simulated") for name in ("SSD 7 GB/s", "SSD 14 GB/s")]
    for link, kind in links:
        cases += [_share(replace(setup, source=link), t, Tier.SSD, link, kind) for t in LENGTHS]
    for link in (LINKS["PCIe 4 x16"], PCIE5):
        cases += [
            _share(replace(setup, copy=link), t, Tier.HOST, link, "simulated") for t in LENGTHS
        ]
    cases.sort(key=lambda case: -case.value)
    return Condition("moving KV is most of the TTFT on a path within a machine", tuple(cases))


def _share(setup: Setup, tokens: int, tier: Tier, link: Link, kind: str) -> Case:
    move_s = at_once_s(setup, tokens, tier)
    share = move_s / (move_s + setup.new_s(tokens))
    where = f"{setup.model.name}, {setup.device.name}, {link.name}, {tokens >> 10}K"
    return Case(where, share, kind, share > DOMINATES)


def dearer(
    setup: Setup, here: Link | None, spread: float, measured: Mapping[str, tuple[float, float]]
) -> Condition:
    """Look for a case in which moving KV takes longer than recomputing it.

    ``measured``: load / recompute of a model in this run and its A/A spread, by where; ``spread``
    is the measured link's. A case within its spread of 1 is not one.
    """
    cases = [
        Case(where, ratio, "measured here", ratio > 1 + spread)
        for where, (ratio, spread) in measured.items()
    ]
    pairs = [setup, *(preset(model, device, setup.source, setup.copy) for model, device in PAIRS)]
    links = [(here, "measured + simulated", spread)] if here is not None else []
    links += [(link, "simulated", 0.0) for link in SLOW_LINKS]
    for each in pairs:
        for link, kind, within in links:
            for tokens in LENGTHS:
                over = replace(each, source=link)
                ratio = at_once_s(over, tokens, Tier.SSD) / recompute_s(over, tokens)
                where = f"{each.model.name}, {each.device.name}, {link.name}, {tokens >> 10}K"
                cases.append(Case(where, ratio, kind, ratio > 1 + within))
    cases.sort(key=lambda case: -case.value)
    return Condition("moving KV takes longer than recomputing it", tuple(cases))


def sentence(setup: Setup, rows: Sequence[Row], source: str) -> str:
    """Return the verdict on loading over the setup's source; ``source`` says where that is from.

    Rows are all ways for several lengths, from the SSD.
    """
    load = [row for row in rows if row.way == "load"]
    low, high = min(row.transfer for row in load), max(row.transfer for row in load)
    word = (
        "Negligible" if high < NEGLIGIBLE else "Small" if high < SMALL
        else "Not negligible"
    )  # fmt: skip
    tokens = min((row.tokens for row in load), key=lambda tokens: abs(tokens - 32768))
    ways = {row.way: row.ttft_s for row in rows if row.tokens == tokens}
    single = min(ways["load"], ways["recompute"])
    share = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return (
        f"{word}: moving the KV of {setup.model.name} over {setup.source.name} ({source}) is "
        f"{share} of the TTFT of a prompt that is loaded on {setup.device.name} (simulated); at "
        f"{tokens >> 10}K tokens loading takes {ways['load'] / ways['recompute']:.2f} times as "
        f"long as recomputing, and the plan is {single / ways['best']:.2f} times faster than the "
        "better of both."
    )
