"""The tokenizer of a model: loading, and a check against the model's embedding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from math import prod
from typing import Any

from transformers import AutoTokenizer

from trainer.base.errors import UsageError
from trainer.models.hub_files import CANNOT_READ, not_found, require_small_files
from trainer.recipe.schema import Model

_MOST_GROWTH = 1000  # times the characters of a text; usual rules replace one by one
_FEWEST_TOKENS = 3  # without special tokens
_LEAST_SHARE = 0.1  # of the embedding; a smaller tokenizer is incomplete or belongs to another model


def load_tokenizer(recipe: Model) -> Any:
    """Load the tokenizer of the recipe's model, and add the new tokens; its end token pads rows if no other does.

    Raises:
        UsageError: the tokenizer does not exist, cannot be loaded, or has no vocabulary.
    """
    key, name, revision = "model.name_or_path", str(recipe.name_or_path), recipe.revision
    if recipe.tokenizer is not None:  # another repository; `model.revision` does not apply
        key, name, revision = "model.tokenizer", recipe.tokenizer, None
    require_small_files(key, name, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    except CANNOT_READ as error:
        raise not_found(key, name, error) from error
    except BaseException as error:
        # Of the package tokenizers, which raises errors of these two types only.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise not_found(key, name, Exception(str(error))) from error
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UsageError(
            f"`{key}` is {name!r}, where `model_max_length` must be a number, but is"
            f" {tokenizer.model_max_length!r:.40}; correct its tokenizer_config.json"
        )
    if tokenizer.is_fast:
        _require_small_texts(key, name, tokenizer)
    # For a folder without a tokenizer, transformers makes one of special tokens (and T5's space) from `config.json`.
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if tokenizer.is_fast and len(tokenizer.get_vocab().keys() - special) < _FEWEST_TOKENS:
        raise UsageError(
            f"`{key}` is {name!r}, which has no vocabulary of a tokenizer, so that every word would be unknown; copy"
            " the tokenizer's files into it (`tokenizer.json`), or name the model's own tokenizer in `model.tokenizer`"
        )
    if recipe.new_tokens is not None:
        tokenizer.add_tokens(recipe.new_tokens)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_small_texts(key: str, name: str, tokenizer: Any) -> None:
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    # Rules apply one after the other, so their growths multiply.
    growth = prod(max(1, len(str(rule["content"]))) for rule in _rules(normalizer) if rule.get("type") == "Replace")
    if growth > _MOST_GROWTH:
        raise UsageError(
            f"`{key}` is {name!r}, with a normaliser that replaces one character by up to {growth:,}, but at most"
            f" {_MOST_GROWTH:,} are allowed; copy the model's own tokenizer.json"
        )


def _rules(normalizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield normalizer
    for inner in normalizer.get("normalizers", ()):
        yield from _rules(inner)


def _has_languages(tokenizer: Any) -> bool:
    """Return whether a tokenizer marks the language of a text, as those of mBART, M2M100 and NLLB do."""
    return hasattr(tokenizer, "src_lang")


def set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Set the languages of sources and targets, which `save_pretrained` keeps.

    Raises:
        UsageError: the tokenizer does not know a language, needs one, or has none.
    """
    given = {"task.source_language": source, "task.target_language": target}
    name = tokenizer.name_or_path
    if not _has_languages(tokenizer):
        for key, language in given.items():
            if language is not None:
                raise UsageError(f"`{key}` is {language!r}, but the tokenizer `{name}` marks no language; remove it")
        return
    known = _languages(tokenizer)
    for key, language in given.items():
        if language not in known:
            near = get_close_matches(str(language), known, n=1) or sorted(known)[:3]
            raise UsageError(
                f"`{key}` must be a language of the tokenizer `{name}`, which marks that of each text, but is"
                f" {'null' if language is None else repr(language)}; write one such as {', '.join(near)}"
            )
    tokenizer.tgt_lang, tokenizer.src_lang = target, source
    # `save_pretrained` writes the keys of `init_kwargs`, and no other attributes.
    tokenizer.init_kwargs.update(src_lang=source, tgt_lang=target)


def _languages(tokenizer: Any) -> set[str]:
    """Return the codes of languages: those of the tokenizer's class that have a token, or else added special tokens."""
    codes: dict[str, int] | None = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None:
        return set(tokenizer.all_special_tokens) - set(tokenizer.special_tokens_map.values())
    return {code for code, token in codes.items() if token != tokenizer.unk_token_id}


def name_target_language(config: Any, tokenizer: Any) -> None:
    """Set the decoder's first tokens in a configuration, so that it generates the target language.

    mBART and PLBart shift targets in a circle: the decoder starts with their last token.

    Raises:
        UsageError: targets have no single token for their language.
    """
    if not _has_languages(tokenizer):
        return
    # An empty target has no tokens but those that mark it.
    frame = tokenizer(text_target="")["input_ids"]
    languages = set(frame) - {tokenizer.eos_token_id}
    if len(languages) != 1:
        raise UsageError(
            f"a target must have one token for its language, but the tokenizer `{tokenizer.name_or_path}` marks it by"
            f" {tokenizer.convert_ids_to_tokens(frame)}; name another one in `model.tokenizer`"
        )
    if config.model_type in ("mbart", "plbart"):
        config.decoder_start_token_id = frame[-1]
    (language,) = languages
    # A decoder that starts with the token of the language must not write it again.
    config.forced_bos_token_id = language if language != config.decoder_start_token_id else None


def tokenizer_notes(recipe: Model, tokenizer: Any, vocab_size: int | None) -> list[str]:
    """Compare a tokenizer with the model's embedding.

    Args:
        vocab_size: the number of tokens with an embedding, or None if it is unknown.

    Returns:
        Notes for the user.

    Raises:
        UsageError: a checkpoint's own tokenizer has less than a tenth of the tokens with an embedding.
    """
    notes = []
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        notes.append(f"the end token {tokenizer.eos_token!r} fills short rows, hidden from attention")
    size = len(tokenizer)
    if vocab_size is None or size >= _LEAST_SHARE * vocab_size:
        return notes
    if not recipe.is_random and recipe.tokenizer is None:
        raise UsageError(
            f"`model.name_or_path` is {str(recipe.name_or_path)!r}, with a tokenizer of {size:,} tokens for an"
            f" embedding of {vocab_size:,}; name the model's own tokenizer in `model.tokenizer`"
        )
    return [*notes, f"the tokenizer has {size:,} tokens, the model's embedding {vocab_size:,}"]
