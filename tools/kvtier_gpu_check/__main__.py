"""Prove on a machine with a GPU what no other machine can; see ``--help``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier_gpu_check.case import BUDGET_S, Case, Outcome, Place, check, missing, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_CUDA: Final = 3
PARTS: Final = {"torch": ("store_cases", "model_cases"), "vllm": ("vllm_cases",)}
DEPENDENCIES: Final = ("numpy", "torch", "lmdb", "msgpack", "xxhash", "aiofiles", "zstandard")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; 0 if none failed, 1 if one did, 3 without a GPU."""
    asked = _parse(argv)
    gone = missing(DEPENDENCIES)
    if gone:
        print(
            f"{sys.executable} lacks {', '.join(gone)}: pip install them, or choose another Python"
        )
        return 2
    import torch

    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees no CUDA device, so there is nothing to check"
        )
        return NO_CUDA
    parts = [asked.part] if asked.part else list(PARTS)
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-", dir=asked.dir or None) as folder:
        place = Place(Path(folder), f"cuda:{asked.device}", asked.small, asked.python)
        for part in parts:
            cases = [each for each in _cases(part) if not asked.only or each.name in asked.only]
            outcomes[part] = check(
                cases, place, clock=time.monotonic, budget_s=asked.seconds, say=_say
            )
    flat = [outcome for each in outcomes.values() for outcome in each]
    print(table(flat))
    if asked.json:
        write(asked.json, outcomes, machine=_machine(asked.device), small=asked.small)
    return int(any(outcome.verdict == "failed" for outcome in flat))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/gpu-check", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS], help="one part instead of both")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="one case")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for each part (330)")
    parser.add_argument("--device", type=int, default=0, help="the GPU's number")
    parser.add_argument("--dir", default="", help="scratch, on the disk whose rates matter")
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results; - is stdout")
    return parser.parse_args(argv)


def _cases(part: str) -> list[Case]:
    return [
        case
        for name in PARTS[part]
        for case in importlib.import_module(f"kvtier_gpu_check.{name}").CASES
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write(
    where: str,
    outcomes: Mapping[str, Sequence[Outcome]],
    *,
    machine: Mapping[str, Any],
    small: bool,
) -> None:
    """Write all outcomes as one JSON object."""
    value = {
        "name": "gpu-check",
        "machine": machine,
        "small": small,
        "parts": {part: [each.to_json() for each in found] for part, found in outcomes.items()},
    }
    text = json.dumps(value, indent=1, default=str)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")


def _machine(device: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
