"""Adapters and quantised weights in the keys of programs around the Trainer."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.recipe.paths import shown_value
from trainer.tools.convert.draft import Draft
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.sources import Item

_PEFTS = 'PEFT chooses layers by the family; write their names, such as [q_proj, v_proj], or "all-linear"'


def adapter(draft: Draft, on: Item, items: Mapping[str, Item | None], dora: Item | None = None) -> None:
    """Propose a LoRA adapter.

    Args:
        on: the key that asks for it.
        items: the keys of its values, by keys of `model.adapter`.
        dora: the key that asks for DoRA.
    """
    kind = "dora" if draft.flag(dora) else "lora"
    draft.take("model.adapter.type", kind, on, *([dora] if dora is not None and dora.origin else []))
    for key, item in items.items():
        if item is None or (item.value is None and item.origin is None and key != "rank"):
            continue
        if item.value is None and key in ("rank", "alpha"):
            draft.refuse(f"model.adapter.{key}", f"`{item.name}` has no default there", item)
        elif item.value is not None:
            draft.take(f"model.adapter.{key}", item.value, item)


def no_adapter(draft: Draft, why: str, *items: Item | None) -> None:
    draft.unread(why, *items)


def targets(draft: Draft, item: Item | None, *all_linear: Item | None) -> None:
    """Propose the layers of an adapter: names, all linear ones, or those that PEFT would choose.

    Args:
        item: the key with names.
        all_linear: keys that ask for all linear layers.
    """
    path = "model.adapter.targets"
    for switch in all_linear:
        if draft.flag(switch) and switch is not None:
            draft.take(path, "all-linear", switch)
            draft.unread(f"{switch.name} has precedence", item)
            return
    if item is None or not item.value:
        draft.take(path, Todo(_PEFTS), *([item] if item else []))
        return
    names = item.value
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        draft.problem(item, f"must be a list of names of layers, but is {shown_value(names)}")
    elif names in (["all"], ["all-linear"]):
        draft.take(path, "all-linear", item, note="all but the head")
    elif any(set(name) & set("^$()[]\\|+") for name in names):
        draft.refuse(path, f"{item.value} is a regular expression; write names or patterns with *", item)
    else:
        draft.take(path, names, item)


def quantization(draft: Draft, bits: Mapping[int, Item], double: Item | None, kind: Item | None, on: bool) -> None:
    """Propose the storage of the frozen weights.

    Args:
        bits: the keys that ask for 4 or 8 bits.
        double: the key for scales that are quantised too; None: they are.
        kind: the key for the type of 4 bits.
        on: whether there is an adapter.
    """
    path = "model.quantization"
    if len(bits) > 1:
        draft.refuse(path, "4 bits or 8 bits", *bits.values())
        return
    for number, item in bits.items():
        if not on:
            draft.refuse_file(item, "quantised weights cannot be trained without an adapter")
        elif number == 8:
            draft.take(path, "int8", item)
            draft.unread("8 bits have no such type", double, kind)
        elif number != 4:
            draft.refuse(path, f"{number} bits; write 4 or 8", item)
        elif kind is not None and kind.value != "nf4":
            draft.refuse(path, f"{kind.name} {kind.value}; 4 bits are nf4", kind, item)
        else:
            others = [key for key in (double, kind) if key is not None]
            draft.take(path, "nf4" if double is None or draft.flag(double) else "nf4_single", item, *others)
    if not bits:
        draft.unread("no weight is quantised", double, kind)
