"""The prompts of the demo: one long document, then one of several questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtier_demo.document import QUESTIONS, document
from kvtier_demo.model import smollm2

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # its own


@dataclass(frozen=True, slots=True)
class Reader:
    """The real model, its tokenizer, and the ids of the document that it reads."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    document: torch.Tensor

    @classmethod
    def load(cls, tokens: int, threads: int, progress: Callable[[str], None]) -> Reader:
        """Load SmolLM2 in float32 and tokenise a document of ``tokens`` tokens, [1, n]."""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        torch.set_num_threads(threads)
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        path = smollm2(progress)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.eval()  # type: ignore[no-untyped-call]
        text = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            f"<|im_start|>user\n{document(tokenizer, tokens)}"
        )
        return cls(model, tokenizer, _ids(tokenizer, text))

    def prompts(self, count: int) -> list[tuple[str, torch.Tensor]]:
        """Return the first ``count`` questions with their whole prompts, [1, n] each.

        The question is tokenised by itself, so that every prompt begins with the document's ids.
        """
        found = []
        for question in QUESTIONS[:count]:
            tail = f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
            found.append((question, torch.cat([self.document, _ids(self.tokenizer, tail)], dim=1)))
        return found

    def text(self, ids: torch.Tensor) -> str:
        """Return generated ids as text, on one line."""
        return " ".join(str(self.tokenizer.decode(ids, skip_special_tokens=True)).split())


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids
