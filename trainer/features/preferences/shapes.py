"""The columns of preferences, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns
from trainer.features.preferences.labels import are_labels, opposites

_ANSWERS = ("text", "chat")
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_COMPLETIONS = ("completion", "response", "output", "answer")
_LABELS = ("label", "desirable", "is_desirable", "feedback", "preference", "thumbs", "rating")


def of_preferences(columns: Columns) -> Iterator[tuple[Any, ...]]:
    """Yield sections `task`, the reasons for them, and perhaps `data.map.columns`."""
    pair = columns.every(_ANSWERS, "chosen", "rejected")
    prompt = columns.get(_ANSWERS, *_PROMPTS)
    if pair:
        names = {
            "prompt": None if prompt is None or _repeats(prompt, columns) else prompt.name,
            "chosen": pair[0],
            "rejected": pair[1],
        }
        yield {"type": "preference", **names}, "a better and a worse answer in each row (DPO)"
        yield {"type": "reward_model", **names}, "a better and a worse answer in each row"
    completion, label = columns.get(_ANSWERS, *_COMPLETIONS), columns.get(("boolean", "integer", "text"), *_LABELS)
    if completion and label and are_labels(label.distinct) and (prompt or completion.kind == "chat"):
        names = {"prompt": prompt and prompt.name, "completion": completion.name, "label": label.name}
        found = {"type": "preference", "loss": {"type": "kto"}, **names}, "answers that are good or bad (KTO)"
        table = opposites(label.distinct)
        made = {name: name for name in names.values() if name} | {label.name: {"column": label.name, "values": table}}
        yield found if table is None else (*found, made)


def _repeats(prompt: Any, columns: Columns) -> bool:
    """Return whether a prompt is a text, and the chats of the answers begin with it, as in UltraFeedback."""
    chosen = columns.get(_ANSWERS, "chosen")
    if prompt.kind != "text" or chosen.kind != "chat" or not chosen.values[0]:
        return False
    first = chosen.values[0][0]
    return bool(first.get("content", first.get("value")) == prompt.values[0])
