"""Adapters and quantised weights in the keys of programs around the Trainer."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.tools.convert.draft import Draft
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
    draft.take("model.adapter.type", kind, on, dora if dora is not None and dora.origin else None)
    for key, item in items.items():
        if item is None or (item.value is None and item.origin is None and key != "rank"):
            continue
        if item.value is None and key in ("rank", "alpha"):
            draft.refuse(f"model.adapter.{key}", f"`{item.name}` has no default there", item)
        elif key == "target_parameters":
            _parameters(draft, item)
        elif item.value is not None:
            draft.take(f"model.adapter.{key}", item.value, item)


def _parameters(draft: Draft, item: Item) -> None:
    """Propose the matrices of experts of an adapter; PEFT can also adapt the weights of layers by their names."""
    path, names = "model.adapter.target_parameters", draft.names(item)
    if others := [name for name in names if name.endswith("weight")]:
        draft.refuse(path, f"{others[0]} is no matrix of experts; write it without .weight in `targets`", item)
    elif names:
        draft.take(path, names, item)


def targets(draft: Draft, item: Item | None, all_linear: Item | None = None) -> None:
    """Propose the layers of an adapter: names, all linear ones, or those that PEFT would choose.

    Args:
        item: the key with names.
        all_linear: the key that asks for all linear layers.
    """
    path = "model.adapter.targets"
    if all_linear is not None and draft.flag(all_linear):
        draft.take(path, "all-linear", all_linear)
        draft.unread(f"{all_linear.name} has precedence", item)
        return
    names = draft.names(item)
    if item is None or not names:
        draft.refuse(path, _PEFTS, item)
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
            draft.take(path, "nf4" if double is None or draft.flag(double) else "nf4_single", item, double, kind)
    if not bits:
        draft.unread("no weight is quantised", double, kind)
