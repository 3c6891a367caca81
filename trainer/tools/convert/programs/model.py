"""Templates of chats and stored weights, which programs around the Trainer share."""

from __future__ import annotations

import os

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import folder_or_name
from trainer.tools.convert.sources import Item, Tool

_NO_MODELS = (  # templates that no tokenizer has by itself
    "alpaca", "custom", "default", "empty", "fewshot", "jinja", "tokenizer_default_fallback_alpaca", "vicuna",
)  # fmt: skip


def chat_template(draft: Draft, item: Item | None, program: str, folder: os.PathLike[str]) -> None:
    """Report the template of chats: that of the tokenizer applies, or a folder with one."""
    if item is None:
        return
    name = draft.text(item)
    own = "the chat template of the tokenizer writes the chats"
    if name == "tokenizer_default":
        draft.say(item, Outcome.SAME, own)
    elif name in _NO_MODELS:
        text = f"a folder of the tokenizer with {program}'s template {name}, which no model has by itself"
        draft.refuse("model.tokenizer", text, item)
    elif os.path.isdir(name):
        draft.take("model.tokenizer", folder_or_name(name, folder), item)
    else:
        text = f"{own}, not {program}'s template {name}; compare a row by `trainer preview`, and name another"
        draft.say(item, Outcome.DIFFERS, f"{text} tokenizer in `model.tokenizer` if they differ")


def bf16_weights(draft: Draft, has_adapter: bool) -> None:
    """Report the type of the weights in programs that load the model in the type of the products."""
    item = draft.sources.get(Tool.TRAINING_ARGUMENTS, "bf16")
    if item is None or draft.value("precision") != "bf16" or draft.value("model.quantization") is not None:
        return
    which = "frozen weights" if has_adapter else "weights"
    text = f"`precision` bf16: {which} stay in fp32; {item.title} loads them in bf16"
    draft.say(item, Outcome.DIFFERS, text + ("" if has_adapter else "; see the key `weights`"))


def no_dropout(draft: Draft, item: Item, note: str) -> None:
    """Turn dropout off in the model and in its adapter, as trainers of preferences do."""
    draft.take("model.dropout", 0, item, note=note)
    if draft.value("model.adapter.type") is not None and draft.value("model.adapter.dropout", 0) != 0:
        draft.override("model.adapter.dropout", 0.0, item, note=note)
