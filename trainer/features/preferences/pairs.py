"""Pairs of a better and a worse text: whole texts that start alike, and texts that are equal."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import DataError
from trainer.tasks.text.answers import Tokens, end_token
from trainer.tasks.text.columns import framed
from trainer.tasks.text.tied_texts import MOST_COMPARED, texts_of
from trainer.tasks.types import EncodedRows, Tokenizer


def tokens_of_whole_pair(texts: Sequence[str], tokenizer: Tokenizer, place: str) -> list[Tokens]:
    """Return the tokens of two whole texts and their ends; those of both at their start are the prompt."""
    end = end_token(tokenizer)
    one, other = framed(texts, tokenizer, end)
    number = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    # Special tokens begin all texts alike, so texts with the same start must share their first letter too.
    starts = {text.lstrip()[:1] for text in texts}
    if one == other or number == 0 or len(starts) > 1:
        problem = "continue in different ways" if one == other else "start with the same text"
        raise DataError(
            f"{place} and the rejected text must {problem}, since `task.prompt` is null; correct the row, or leave it"
            " out"
        )
    return [(ids, [at >= number for at in range(len(ids))]) for ids in (one, other)]


def require_apart(answers: Sequence[Sequence[int]], is_cut: bool, max_length: int, place: str) -> None:
    """Refuse answers that differ behind the cut only.

    Args:
        answers: the tokens of the better and of the worse answer with their prompt, cut to `max_length`.
        is_cut: whether one of them was longer.
    """
    if is_cut and answers[0] == answers[-1]:
        raise DataError(
            f"{place} is the rejected answer within `data.max_length` ({max_length}); increase it, or leave the row out"
        )


def equal_pairs_notes(train: EncodedRows) -> list[str]:
    """Return a note on training rows with two equal texts; none for very many rows."""
    if len(train) > MOST_COMPARED:
        return []
    texts = texts_of(train)
    equal = sum(chosen == rejected for chosen, rejected in zip(texts, texts, strict=True))
    return [f"{equal:,} of {len(train):,} training pairs have equal answers, which teach nothing"] if equal else []
