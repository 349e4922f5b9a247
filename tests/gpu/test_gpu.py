"""The cases of tools/gpu-check, small: what only a GPU can show."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from kvtier_gpu_check import model_cases, store_cases, vllm_cases
from kvtier_gpu_check.case import Case, Place, check

if TYPE_CHECKING:
    from pathlib import Path

CASES = (*store_cases.CASES, *model_cases.CASES, *vllm_cases.CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case: Case, tmp_path: Path) -> None:
    """What the case's docstring says holds on this GPU."""
    place = Place(tmp_path, small=True, python=sys.executable)
    (outcome,) = check([case], place, clock=time.monotonic)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.verdict == "passed", outcome.reason
