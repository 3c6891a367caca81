"""The tokenizer of a model: loaded, and checked against the model's embedding."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from trainer.base.errors import UsageError
from trainer.models.building import not_found
from trainer.recipe.schema import Model

_FEWEST_TOKENS = 3  # that are not special
_LEAST_SHARE = 0.1  # of the embedding; less is another model's tokenizer, or a part of one


def load_tokenizer(recipe: Model) -> Any:
    """Load the tokenizer of the recipe's model; without a padding token, its end token fills short rows.

    Raises:
        UsageError: There is none, it has no vocabulary, or it cannot be reached.
    """
    key, name, revision = "model.name_or_path", str(recipe.name_or_path), recipe.revision
    if recipe.tokenizer is not None:  # a place of its own, with revisions of its own
        key, name, revision = "model.tokenizer", recipe.tokenizer, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise not_found(key, name, error) from error
    # Where a folder has a `config.json` and no tokenizer, transformers makes one of special tokens (and T5's space).
    if tokenizer.is_fast and len(set(tokenizer.get_vocab()) - _special_tokens(tokenizer)) < _FEWEST_TOKENS:
        raise UsageError(
            f"`{key}` is {name!r}, which has no vocabulary of a tokenizer, so that every word would be unknown; copy"
            " the tokenizer's files into it (`tokenizer.json`), or name the model's own tokenizer in `model.tokenizer`"
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _special_tokens(tokenizer: Any) -> set[str]:
    return {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


def tokenizer_notes(recipe: Model, tokenizer: Any, vocab_size: int | None) -> list[str]:
    """Compare a tokenizer with the model's embedding.

    Args:
        recipe: The recipe's `model`.
        tokenizer: The loaded tokenizer.
        vocab_size: Number of tokens with an embedding; None: the configuration does not say.

    Raises:
        UsageError: A checkpoint's own tokenizer knows less than a tenth of the tokens with an embedding.
    """
    notes = []
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        notes.append(f"the end token {tokenizer.eos_token!r} fills short rows, hidden from attention")
    size = len(tokenizer)
    if vocab_size is None or size >= _LEAST_SHARE * vocab_size:
        return notes
    if recipe.config is None and recipe.tokenizer is None:
        raise UsageError(
            f"`model.name_or_path` is {str(recipe.name_or_path)!r}, with a tokenizer of {size:,} tokens for an"
            f" embedding of {vocab_size:,}; name the model's own tokenizer in `model.tokenizer`"
        )
    return [*notes, f"the tokenizer has {size:,} tokens, the model's embedding {vocab_size:,}"]
