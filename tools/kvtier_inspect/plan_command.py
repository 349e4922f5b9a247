"""`plan`: what kvtier would do for a prompt, how long each way takes, and where that changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtier.calibration import CostBook, cost_records
from kvtier.cost import CostModel
from kvtier.identity import BLOCK_TOKENS, BlockKeys
from kvtier.plan import Residency, Tier, runs
from kvtier.planner import plan
from kvtier.profiles import DEVICES, LINKS, MODELS, block_bytes, cost_model
from kvtier.tiers.base import BlockId
from kvtier_inspect.modelconfig import read_model
from kvtier_inspect.opened import opened
from kvtier_inspect.planning import (
    TOKEN_FILE_BYTES_MAX,
    blocks_at,
    by_name,
    link_cost,
    made_up,
    plain_name,
    prefill_at,
    rates,
    read_ranges,
    token_ids,
    with_link,
)
from kvtier_inspect.render import ExitCode, columns, console, emit, safe, size, span
from kvtier_inspect.selecting import namespace_of
from kvtier_inspect.table import rows_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from kvtier.identity import KVSpec
    from kvtier.plan import RestorePlan
    from kvtier_inspect.opened import Opened
    from kvtier_inspect.planning import Rates

__all__ = ["Asked", "Planned", "planned", "run"]


_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SOURCES: Final = (Tier.HOST, Tier.SSD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says, as text; empty or None where it says nothing."""

    tokens: int | None = None
    token_file: str = ""
    tenant: str = ""
    adapter: str = ""
    store: str = ""
    namespace: str = ""
    device_blocks: str = ""
    host_blocks: str = ""
    ssd_blocks: str = ""
    missing_blocks: str = ""
    model: str = ""
    device: str = ""
    ssd_link: str = ""
    host_link: str = ""
    prefill_rate: float | None = None
    token_bytes: int | None = None
    step_blocks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan with what it was made from; ``rates`` as ``planning.rates``, ``source`` in words."""

    residency: Residency
    costs: CostModel
    source: str
    plan: RestorePlan
    rates: Rates | None


def planned(asked: Asked) -> Planned:
    """Return the plan for what was asked; ``ValueError`` names the option that is wrong."""
    ids = _ids(asked)
    if asked.store:
        with opened(asked.store) as store:
            return _in_store(asked, ids, store)
    if asked.namespace:
        raise ValueError("--namespace: says which of a store's; name that with --store")
    keys = made_up(len(ids) if asked.tokens is None else asked.tokens)
    costs, source = _costs(asked, CostModel(), "")
    return _made(asked, keys, _block_bytes(asked), costs, source)


def _in_store(asked: Asked, ids: Sequence[int], store: Opened) -> Planned:
    spec = store.specs[namespace_of(asked.namespace, store.specs, store.specs)]
    device = asked.device
    if not (asked.model or device):
        device = _only_device(store.directory.read_costs(), spec)
    learned = CostBook(store.directory, spec.namespace, device or "cpu", {}).read().costs
    costs, source = _costs(asked, learned, f"the store's costs of {device or 'cpu'} on this host")
    layout = spec.block_layout
    if asked.tokens is not None:
        keys = made_up(asked.tokens, spec.block_tokens)
        return _made(asked, keys, layout.block_bytes, costs, source)
    keys = BlockKeys.of(spec, ids, asked.tenant, asked.adapter)
    rows = rows_at(store.entries, [BlockId(spec.namespace, each) for each in keys])
    tiers = tuple(Tier.SSD if row >= 0 else None for row in rows)
    return _made(asked, keys, layout.block_bytes, costs, source, stored=tiers)


def _made(
    asked: Asked,
    keys: BlockKeys,
    nbytes: int,
    costs: CostModel,
    source: str,
    stored: tuple[Tier | None, ...] | None = None,
) -> Planned:
    named: Mapping[Tier | None, str] = {
        Tier.DEVICE: asked.device_blocks,
        Tier.HOST: asked.host_blocks,
        Tier.SSD: asked.ssd_blocks,
        None: asked.missing_blocks,
    }
    where = {
        tier: read_ranges(f"--{tier or 'missing'}", text, len(keys)) for tier, text in named.items()
    }
    tiers, resident = blocks_at(len(keys), where, stored)
    residency = Residency(keys, tiers, nbytes)
    options = {"resident": resident, "step_blocks_max": asked.step_blocks}
    made = plan(residency, costs, **options)  # type: ignore[arg-type]
    return Planned(residency, costs, source, made, rates(residency, costs, **options))


def _ids(asked: Asked) -> list[int]:
    if (asked.tokens is None) == (not asked.token_file):
        raise ValueError("give either --tokens or --token-file")
    if not asked.token_file:
        return []
    with open(asked.token_file, "rb") as file:
        data = file.read(TOKEN_FILE_BYTES_MAX + 1)
    if len(data) > TOKEN_FILE_BYTES_MAX:
        raise ValueError(f"{asked.token_file}: over {TOKEN_FILE_BYTES_MAX} bytes")
    try:
        return token_ids(data)
    except ValueError as error:
        raise ValueError(f"{asked.token_file}: {error}") from None


def _only_device(data: bytes, spec: KVSpec) -> str:
    """Return the device whose costs a store has learned for a spec, if there is one alone."""
    mine = f"{spec.namespace.hex()}|"
    keys = [key for key in cost_records(data)["compute"] if str(key).startswith(mine)]
    names = {key.removeprefix(mine).rpartition("|")[0] for key in keys}  # the host's name is last
    return names.pop() if len(names) == 1 else ""


def _block_bytes(asked: Asked) -> int:
    if asked.token_bytes is not None:
        if asked.token_bytes < 1:
            raise ValueError(f"--token-bytes: {asked.token_bytes} is not positive")
        return asked.token_bytes * BLOCK_TOKENS
    if not asked.model:
        raise ValueError("name a --model or its config.json, a --store, or --token-bytes")
    known = _known_model(asked.model)
    if known is not None:
        return block_bytes(MODELS[known])
    return read_model(asked.model).block_bytes(BLOCK_TOKENS)


def _known_model(name: str) -> str | None:
    wanted = plain_name(name)
    return next((each for each in MODELS if plain_name(each) == wanted), None)


def _costs(asked: Asked, costs: CostModel, source: str) -> tuple[CostModel, str]:
    """Return the costs to plan with, and where they are from, in words."""
    known = _known_model(asked.model) if asked.model else None
    if known and asked.device:
        device = by_name("--device", asked.device, DEVICES)
        ssd, host = LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]
        costs = cost_model(MODELS[known], device, ssd=ssd, host=host, step_blocks=asked.step_blocks)
        source = f"the profile of {known} on {device.name}, {ssd.name}, {host.name}"
    elif asked.model and asked.device:
        names = ", ".join(MODELS)
        raise ValueError(f"--model: there is no profile of {asked.model}; there are {names}")
    given = []
    if asked.prefill_rate is not None:
        costs = replace(costs, compute=prefill_at(asked.prefill_rate))
        given.append(f"{asked.prefill_rate:g} tokens/s")
    for tier, text in ((Tier.SSD, asked.ssd_link), (Tier.HOST, asked.host_link)):
        if text:
            costs = with_link(costs, tier, link_cost(f"--{tier}-link", text))
            given.append(f"{tier} link {text}")
    if not source and asked.prefill_rate is None:
        raise ValueError(
            "nothing says what recomputing costs: give --prefill-rate, --model with --device, "
            "or a --store that has learned it"
        )
    return costs, ", ".join(filter(None, [source, *given]))


# -- what is printed


def run(asked: Asked, *, as_json: bool) -> int:
    """Print the plan."""
    made = planned(asked)
    if as_json:
        emit(_plain(made))
        return ExitCode.FINE
    out = console()
    keys, costs = made.residency.keys, made.costs
    out.print(
        f"{keys.num_tokens} tokens: {len(keys)} full blocks of {size(made.residency.block_bytes)}, "
        f"and {keys.num_tokens - len(keys) * keys.block_tokens} tokens that are always computed"
    )
    out.print(safe(f"costs     {made.source}: {_words(costs)}", 1000))
    for line in made.plan.explain().splitlines():
        out.print(safe(line, 2000))
    out.print(_times(made))
    for line in _break_evens(made):
        out.print(line)
    return ExitCode.FINE


def _words(costs: CostModel) -> str:
    compute = costs.compute
    computed = (
        f"{span(compute.fixed_s)} a step and {span(compute.token_s)} a token at the start"
        if compute.known
        else "recomputing not measured"
    )
    links = (f"{tier} {costs.link(tier).bytes_per_s / 1e9:.2f} GB/s" for tier in _SOURCES)
    return ", ".join([computed, *links])


def _times(made: Planned) -> Table:
    times = made.plan.predicted
    ways = [("planned", times.planned), ("load only", times.load)]
    ways.append(("recompute only", times.recompute if made.costs.compute.known else None))
    rows = [(way, "-" if seconds is None else span(seconds)) for way, seconds in ways]
    return columns(["way", "predicted"], rows, left=["way"])


def _break_evens(made: Planned) -> Iterator[str]:
    if not made.costs.compute.known:
        yield "no break-even: nobody has measured what recomputing costs"
    elif made.rates is None:
        yield "no break-even: nothing is stored"
    else:
        found = made.rates
        yield f"{found.tier} link, break-even of load only and recompute only: {_rate(found.even)}"
        yield f"  below this rate nothing is loaded over it:      {_rate(found.recompute)}"
        yield f"  from this rate on everything it has is loaded:  {_rate(found.load)}"


def _rate(bytes_per_s: float | None) -> str:
    if not bytes_per_s:
        return "none" if bytes_per_s is None else "0, at every rate"
    return f"{_scaled(bytes_per_s)}B/s ({_scaled(8 * bytes_per_s)}bit/s)"


def _scaled(value: float) -> str:
    worth, prefix = next((each for each in _PREFIXES if value >= each[0]), (1.0, ""))
    return f"{value / worth:.3g} {prefix}"


def _plain(made: Planned) -> dict[str, Any]:
    keys, costs = made.residency.keys, made.costs
    return {
        "tokens": keys.num_tokens,
        "block_tokens": keys.block_tokens,
        "block_bytes": made.residency.block_bytes,
        "blocks": len(keys),
        "runs": [[tier, start, stop] for tier, start, stop in runs(made.residency.tiers)],
        "costs": {
            "source": made.source,
            "compute": asdict(costs.compute),
            **{str(tier): asdict(costs.link(tier)) for tier in _SOURCES},
            "interference": costs.interference,
        },
        "resident": made.plan.resident,
        "recompute": list(made.plan.recompute),
        "load": list(made.plan.load),
        "predicted_s": asdict(made.plan.predicted),
        "reason": made.plan.reason,
        "break_even": None if made.rates is None else asdict(made.rates),
    }
