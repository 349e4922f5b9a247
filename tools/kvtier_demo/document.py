"""A long English text for the model to read, and questions about how it begins."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Answered within the first 2,000 tokens, which are about assert and assignment statements, and
# chosen among those that a model of 135 M parameters gets right after reading them.
QUESTIONS = (
    "What are assignment statements used for?",
    "What exception does the assert statement raise?",
    "What does the program print?",
)


def document(tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Return the start of the Python language reference, about `tokens` tokens of it."""
    text = "\n".join(topics[name] for name in sorted(topics))
    # Not verbose: the whole text is longer than the model's context, and only its start is used.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    if not 0 < tokens <= len(ends):
        raise ValueError(f"a document has 1 to {len(ends)} tokens, not {tokens}")
    return text[: ends[tokens - 1]]
