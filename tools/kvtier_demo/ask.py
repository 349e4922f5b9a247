"""The second process: answer questions about the stored document in three ways, and compare."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import LogitsProcessor, LogitsProcessorList

import kvtier
import kvtier_hf
from kvtier_demo.layouts import Layout, measure_layouts
from kvtier_demo.prompt import Reader
from kvtier_demo.show import commit, machine, print_answers, print_layouts, print_table

if TYPE_CHECKING:
    from kvtier import RestorePlan, RestoreReport

WAYS: Final = ("recompute", "load", "planned")
LINKS: Final = (("equal", 1.0), ("fast", 3.0), ("slow", 0.5))
"""Name and rate of each link, in multiples of the rate at which loading takes as long as
recomputing."""
WARM_UP_TOKENS: Final = 300


class _FirstToken(LogitsProcessor):
    """Notes when the first token's logits exist."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return scores


@dataclass(slots=True)
class Answer:
    """One question answered in one way over one link."""

    way: str
    ttft_s: float
    ids: torch.Tensor
    report: RestoreReport | None = None
    plan: RestorePlan | None = None


@dataclass(slots=True)
class Setting:
    """All answers over one link."""

    name: str
    bytes_per_s: float
    answers: list[Answer] = field(default_factory=list)

    def of(self, way: str) -> list[Answer]:
        """Return the answers of one way, one a question."""
        return [answer for answer in self.answers if answer.way == way]

    def ttft_s(self, way: str) -> float:
        """Return the median TTFT over the questions."""
        return statistics.median(answer.ttft_s for answer in self.of(way))

    @property
    def speed_up(self) -> float:
        """How much faster planned is than the better single way."""
        return min(self.ttft_s("recompute"), self.ttft_s("load")) / self.ttft_s("planned")

    @property
    def identical(self) -> bool:
        """Whether all ways gave the same tokens to every question."""
        each = zip(*(self.of(way) for way in WAYS), strict=True)
        return all(
            torch.equal(a.ids, b.ids) for first, *rest in each for a in (first,) for b in rest
        )

    def to_json(self) -> dict[str, Any]:
        """Return the setting as the demo's file has it; times are medians over the questions."""
        planned = self.of("planned")
        plans = [answer.plan.predicted for answer in planned if answer.plan]
        reports = [answer.report for answer in planned if answer.report]
        return {
            "link": self.name,
            "link_bytes_per_s": self.bytes_per_s,
            "ttft_s": {way: self.ttft_s(way) for way in WAYS},
            "ttft_s_each": {way: [answer.ttft_s for answer in self.of(way)] for way in WAYS},
            "blocks": {
                "loaded": statistics.median(report.loaded for report in reports),
                "recomputed": statistics.median(report.recomputed for report in reports),
            },
            "predicted_s": {
                "planned": statistics.median(times.planned for times in plans),
                "load": statistics.median(times.load or 0.0 for times in plans),
                "recompute": statistics.median(times.recompute for times in plans),
            },
            "measured_s": {
                "planned": statistics.median(report.measured_s or 0.0 for report in reports)
            },
            "tokens_identical": self.identical,
        }


def answer(
    reader: Reader,
    kv: kvtier_hf.Adapter | None,
    way: str,
    ids: torch.Tensor,
    new_tokens: int,
    plan: RestorePlan | None = None,
) -> Answer:
    """Answer one prompt; TTFT runs from the prompt's ids to the first token's logits."""
    first = _FirstToken()
    settings: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([first]),
        "attention_mask": torch.ones_like(ids),
    }
    begun = time.perf_counter()
    report = None
    if kv is not None:
        if plan is None:
            residency = kv.store.lookup(kv.store.keys(ids))
            plan = kv.store.plan(residency, way="load" if way == "load" else "best")
        cache = kv.prefill(ids, plan=plan)
        report = cache.report
        settings["cache"] = cache
    output: torch.Tensor = reader.model.generate(ids, **settings)  # type: ignore[operator]
    ttft = (first.at or time.perf_counter()) - begun
    return Answer(way, ttft, output[0, ids.shape[1] :], report, plan)


def measure(
    reader: Reader, folder: Path, questions: int, new_tokens: int, progress: Progress
) -> tuple[list[Setting], list[Layout], list[tuple[str, torch.Tensor]]]:
    """Answer every question in every way over every link, and one in two other layouts."""
    prompts = reader.prompts(questions)
    task = progress.add_task("warming up", total=len(LINKS) * len(WAYS) * len(prompts))
    answer(reader, None, "recompute", prompts[0][1][:, :WARM_UP_TOKENS], 2)
    with kvtier_hf.open(reader.model, folder, host_bytes=0, calibrate=False) as kv:
        plan = kv.plan(prompts[0][1])
        found = len(plan.load) + sum(plan.tiers[block] is not None for block in plan.recompute)
        progress.console.print(
            f"process B, fresh: its first lookup found {found} of {len(plan.hashes)} blocks."
        )
    # The rate at which loading the blocks takes as long as recomputing them does here and now.
    blocks = plan.block_tokens * len(plan.hashes)
    spent = answer(reader, None, "recompute", prompts[0][1][:, :blocks], 1).ttft_s
    rate = plan.block_bytes * len(plan.hashes) / spent
    settings = []
    for name, factor in LINKS:
        setting = Setting(name, rate * factor)
        settings.append(setting)
        link = {"ssd": kvtier.LinkThrottle(bytes_per_s=rate * factor)}
        with kvtier_hf.open(reader.model, folder, host_bytes=0, links=link) as kv:
            for _, ids in prompts:
                for way in WAYS:
                    progress.update(task, description=f"{name} link, {way}")
                    mine = None if way == "recompute" else kv
                    setting.answers.append(answer(reader, mine, way, ids, new_tokens))
                    progress.advance(task)
    progress.update(task, description="other layouts")
    _, ids = prompts[0]
    layouts = measure_layouts(
        reader, folder, ids, rate,
        lambda kv, made: answer(reader, kv, "planned", ids, new_tokens, made),
    )  # fmt: skip
    return settings, layouts, prompts


def main(
    folder: Path,
    tokens: Annotated[int, typer.Option()],
    threads: Annotated[int, typer.Option()],
    questions: Annotated[int, typer.Option()],
    answer_tokens: Annotated[int, typer.Option()],
    json_file: Annotated[str, typer.Option()] = "",
) -> None:
    """Ask about the document stored in ``folder`` and print what each way took."""
    console = Console()
    with console.status("process B: loading the model") as status:
        reader = Reader.load(tokens, threads, status.update)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        settings, layouts, prompts = measure(reader, folder, questions, answer_tokens, progress)
    same = [setting.identical for setting in settings] + [layout.identical for layout in layouts]
    identical = all(same)
    print_table(console, settings)
    print_layouts(console, layouts)
    print_answers(
        console,
        [(question, reader.text(settings[0].of("planned")[i].ids))
         for i, (question, _) in enumerate(prompts)],
        identical=identical,
    )  # fmt: skip
    if json_file:
        value = {
            "name": "demo",
            "commit": commit(),
            "machine": machine(threads),
            "settings": [setting.to_json() for setting in settings],
            "layouts": [layout.to_json() for layout in layouts],
            "ratios": {f"planned_vs_better_{s.name}": s.speed_up for s in settings},
            "results": [
                {"link": s.name, "way": a.way, "ttft_s": a.ttft_s}
                for s in settings
                for a in s.answers
            ],
        }
        text = json.dumps(value, indent=1)
        if json_file == "-":
            print(text)
        else:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    if not identical:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
