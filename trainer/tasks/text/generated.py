"""Generated tokens in predictions and answers, and their texts."""

from __future__ import annotations

from torch import Tensor

from trainer.tasks.types import Tokenizer

GENERATED = "generated"
"""The generated tokens in predictions and answers, `[batch, tokens]`, padded with `IGNORED_LABEL`."""


def generated_texts(generated: Tensor, tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each row of tokens, without special tokens."""
    assert tokenizer is not None, "the rows are texts"
    # `IGNORED_LABEL` fills short rows, and is the only negative number.
    rows = [[token for token in row if token >= 0] for row in generated.tolist()]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
