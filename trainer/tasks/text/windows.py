"""Windows of texts with more tokens than the model takes: neighbours share `stride` tokens."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.base.errors import UsageError
from trainer.tasks.types import Tokenizer


def shared_tokens(stride: int | None, max_length: int) -> int:
    """Return the number of tokens that two windows share: a third of `max_length` if `stride` is None."""
    return max_length // 3 if stride is None else stride


def windows(num_tokens: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return start and end of windows of at most `size` tokens that cover all tokens; none without tokens.

    Args:
        size: the maximum number of tokens of a window.
        stride: the number of tokens that two windows share, less than `size` if there are several.
    """
    if num_tokens <= size:
        return [(0, num_tokens)] if num_tokens else []
    # A later start would give a window of shared tokens only.
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens - stride, size - stride)]


def cut_columns(
    columns: Mapping[str, list[int]], content: tuple[int, int], window: tuple[int, int]
) -> dict[str, list[int]]:
    """Return the columns of a window: its part of the content, between the tokens before and after the content.

    Args:
        columns: the columns of the whole text, one value for each token.
        content: the first token of the content, and the one after its last.
        window: the first token of the window, counted from the content's first, and the one after its last.
    """
    (first, after), (start, end) = content, window
    return {
        name: values[:first] + values[first + start : first + end] + values[after:] for name, values in columns.items()
    }


def require_fast(tokenizer: Tokenizer, feature: str) -> None:
    """Require a tokenizer that knows the characters of each token.

    Args:
        feature: the key with its value that needs it, for the message.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{feature} needs a fast tokenizer, which knows the characters of each token, but"
            f" `{tokenizer.name_or_path}` is a slow one ({type(tokenizer).__name__}); name a model or a"
            " `model.tokenizer` with a `tokenizer.json`"
        )
