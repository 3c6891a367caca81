"""The columns of preferences, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_ANSWERS = ("text", "chat")
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_COMPLETIONS = ("completion", "response", "output", "answer")


def of_preferences(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield sections `task` and the reasons for them."""
    pair = columns.every(_ANSWERS, "chosen", "rejected")
    prompt = columns.get(_ANSWERS, *_PROMPTS)
    if pair:
        names = {"prompt": prompt and prompt.name, "chosen": pair[0], "rejected": pair[1]}
        yield {"type": "preference", **names}, "a better and a worse answer in each row (DPO)"
        yield {"type": "reward_model", **names}, "a better and a worse answer in each row"
    completion, label = columns.get(_ANSWERS, *_COMPLETIONS), columns.get(("boolean",), "label", "desirable")
    if completion and label and (prompt or completion.kind == "chat"):
        names = {"prompt": prompt and prompt.name, "completion": completion.name, "label": label.name}
        yield {"type": "preference", "loss": {"type": "kto"}, **names}, "answers that are good or bad (KTO)"
