"""Models, templates of chats, losses and stored weights, which programs around the Trainer share."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import folder_or_name
from trainer.tools.convert.sources import Item, Tool

_NO_MODELS = (  # templates that no tokenizer has by itself
    "alpaca", "custom", "default", "empty", "fewshot", "jinja", "tokenizer_default_fallback_alpaca", "vicuna",
)  # fmt: skip


_OF_LOSSES = {"gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto", "label_smoothing": "dpo"}
"""Keys of `task.loss`, with the one loss that has each."""


def model_name(draft: Draft, key: str, folder: os.PathLike[str], missing: str = "") -> None:
    """Propose the model, a name on the hub or a folder.

    Args:
        missing: the TODO without the key.
    """
    name = draft.sources.given(draft.sources.program or Tool.TRAINING_ARGUMENTS, key)
    if name is not None:
        draft.take("model.name_or_path", folder_or_name(draft.text(name), folder), name)
    else:
        draft.refuse("model.name_or_path", missing or f"`{key}` is missing")


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


def one_loss(draft: Draft, item: Item, losses: Mapping[str, str]) -> str | None:
    """Return the loss of a key with a name or a list of names; None after a problem, or for several."""
    names = item.value if isinstance(item.value, list) else [item.value]
    loss = losses.get(str(names[0])) if len(names) == 1 else None
    if loss is None:
        draft.refuse_file(item, f"losses are {', '.join(losses)}, and one is trained")
    return loss


def loss_arguments(draft: Draft, loss: str | None, items: Mapping[str, Item | None]) -> None:
    """Propose arguments of the loss, by keys of `task.loss`; other losses do not have them."""
    for key, item in items.items():
        if item is not None and _OF_LOSSES[key] == loss:
            draft.take(f"task.loss.{key}", draft.number(item), item)
        else:
            draft.unread(f"the loss is {loss}", item)


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
