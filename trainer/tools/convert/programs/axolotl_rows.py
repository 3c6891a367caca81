"""Data sets of axolotl: path, type and columns of each item of `datasets` and `test_datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import TABLES
from trainer.tools.convert.programs.axolotl_prompts import (
    known_columns,
    note_on_prompts,
    preference_columns,
    prompt_columns,
)
from trainer.tools.convert.programs.rows import Columns, RowSet, chat, entries, row_set, take_train_and_held
from trainer.tools.convert.sources import Item, Tool

_AX = Tool.AXOLOTL
_ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"], "tool": ["tool"]}
_PLAIN_ROLES = {name: [name] for name in _ROLES}  # of preferences
_LOADING = ("path", "split", "name", "data_files", "ds_type", "revision", "type", "trust_remote_code")
_OF_CHATS = (
    "field_messages", "message_property_mappings", "message_field_role", "message_field_content", "roles",
    "field_tools",
)  # fmt: skip
_TEXTS = re.compile(r"(path|name|split(?!_thinking)|field|format|ds_type).*|.*(_format|prompt|_role|_content)")
"""Keys with texts as values."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {  # values of further keys that change nothing
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]), "train_on_eos": ("turn",),
    "train_on_eot": ("turn",), "chat_template": ("tokenizer_default",), "split_thinking": (False,),
    "drop_system_message": (False,), "preprocess_shards": (1,), "shards": (1,), "shards_idx": (0,),
}  # fmt: skip


def rows(draft: Draft, folder: Path, kind: str) -> None:
    """Convert `datasets`, `test_datasets` and `val_set_size`.

    Args:
        kind: the rows of the task: chats, pairs, kto or rewards.
    """
    get = draft.sources.given
    item, tests, share = get(_AX, "datasets"), get(_AX, "test_datasets"), draft.sources.written(_AX, "val_set_size")
    inputs, strategy = get(_AX, "train_on_inputs"), draft.sources.get(_AX, "excess_length_strategy")
    if inputs is not None and draft.flag(inputs):
        draft.refuse_file(inputs, "prompts are not trained; for texts without a prompt, use the type completion")
    if item is None:
        draft.missing["data"] = "the rows: `datasets` is missing"
        draft.unread("datasets is missing", tests, share, strategy)
        return
    train, held = _sets(draft, item, kind), _sets(draft, tests, kind) if tests is not None else None
    if not train or held == []:
        return
    take_train_and_held(draft, folder, train, held, item, tests, share)
    _evaluation(draft, bool(held or (share is not None and share.value)))
    if kind == "chats" and strategy is not None and strategy.value != "truncate":
        text = "axolotl leaves rows with more than sequence_len tokens out; here they are cut at `data.max_length`"
        draft.note(item if strategy.origin is None else strategy, Outcome.DIFFERS, text)
    else:
        draft.say(strategy, Outcome.SAME, "longer rows are cut at `data.max_length`")
    for (_, entry), of_entry in zip(entries(draft, item), train, strict=True):
        if text := note_on_prompts(entry.get("type"), of_entry):
            draft.note(item, Outcome.DIFFERS, text)


def _evaluation(draft: Draft, has_rows: bool) -> None:
    """Turn evaluation off without validation rows, as axolotl does."""
    keys = [draft.sources.written(Tool.TRAINING_ARGUMENTS, key) for key in ("eval_strategy", "eval_steps")]
    keys.append(draft.sources.written(_AX, "evals_per_epoch"))
    if not has_rows:
        given = [key for key in keys if key]
        draft.override("evaluation.every", None, *given, note="there are no validation rows")


def _sets(draft: Draft, item: Item, kind: str) -> list[RowSet]:
    """Return the data sets of a key; an empty list after a problem."""
    found = []
    for place, entry in entries(draft, item):
        if wrong := _wrong(entry):
            draft.problem(item, f"has a wrong type in {place}: {wrong}; correct it")
            return []
        rows = row_set(draft, item, _with_files(entry), place)
        columns = _columns(draft, item, entry, kind, place, None if rows is None else known_columns(rows))
        if columns is None or rows is None:
            return []
        found.append(replace(rows, columns=columns))
    return found


def _wrong(entry: Mapping[str, Any]) -> str:
    """Return the first key with a value of a wrong type."""
    kind = entry.get("type")
    keys = dict(entry) | (kind if isinstance(kind, dict) else {})
    return next((key for key, value in keys.items() if value is not None and not _has_right_type(key, value)), "")


def _has_right_type(key: str, value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    match key:
        case "message_property_mappings":
            return isinstance(value, dict) and all(isinstance(name, str) for name in values)
        case "roles":
            return isinstance(value, dict) and all(isinstance(names, list) for names in values)
        case "data_files":
            return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in values))
    return isinstance(value, str) or not _TEXTS.fullmatch(key)


def _columns(
    draft: Draft, item: Item, entry: Mapping[str, Any], kind: str, place: str, names: Collection[str] | None
) -> Columns | None:
    """Return the columns of the task, or None after a problem.

    Args:
        names: the columns of the rows; None: they are not known.
    """
    type_, of_pairs = entry.get("type"), kind in ("pairs", "rewards")
    columns: Columns | None
    known: tuple[str, ...]
    if isinstance(type_, dict):
        columns, known = _own_prompt(draft, item, type_, kind, place), _LOADING
    elif kind == "chats" and type_ == "chat_template":
        columns, known = _chats(entry), (*_LOADING, *_OF_CHATS)
    elif kind == "chats" and type_ == "completion":
        columns, known = {"text": str(entry.get("field") or "text")}, (*_LOADING, "field")
    elif of_pairs and type_ in ("chat_template.default", "chat_template"):
        columns, known = _pairs(entry), (*_LOADING, *_OF_CHATS, "field_chosen", "field_rejected")
    elif (ready := _ready_made(draft, type_, kind, names)) is not None:
        columns, known = ready, _LOADING
    else:
        rule = f"the type {type_ or 'without a type'}, which decides what is learned; write the rows as chats, with"
        draft.problem(item, f"{place} has {rule} the type {'chat_template.default' if of_pairs else 'chat_template'}")
        return None
    if strange := _strange_key(entry, known):
        draft.problem(item, f"{place} has `{strange}`, which decides what is learned and has no counterpart; remove it")
        return None
    return columns


def _ready_made(draft: Draft, type_: Any, kind: str, names: Collection[str] | None) -> Columns | None:
    """Return the columns of a ready-made prompt of axolotl; None: there is no such type."""
    method = draft.sources.given(_AX, "rl")
    if kind == "chats":
        return prompt_columns(str(type_), names)
    if kind == "rewards" or method is None or method.value == "orpo":  # axolotl has none for them
        return None
    if kind == "pairs" and type_ in (None, "", "passthrough", "passthrough.default"):
        return {key: key for key in ("prompt", "chosen", "rejected")}
    return preference_columns(str(type_), kind, names)


def _strange_key(entry: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """Return the first key with an effect that is not known."""
    further = ((key, value) for key, value in entry.items() if key not in known)
    return next((key for key, value in further if value not in (None, "", [], {}, *_DEFAULTS.get(key, ()))), None)


def _with_files(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry with the files of its folder, all of which axolotl reads."""
    path = str(entry.get("path"))
    if entry.get("data_files") or not os.path.isdir(path):
        return entry
    return dict(entry) | {"data_files": sorted(file for file in os.listdir(path) if file.endswith(TABLES))}


def _messages(entry: Mapping[str, Any], column: str, defaults: Mapping[str, Any]) -> Any:
    names = {"role": "role", "content": "content"} | dict(entry.get("message_property_mappings") or {})
    role = entry.get("message_field_role") or names["role"]
    content = entry.get("message_field_content") or names["content"]
    roles = {str(name): ours for ours, theirs in (entry.get("roles") or defaults).items() for name in theirs}
    if (role, content) == ("role", "content") and not entry.get("roles"):
        return column  # messages in the usual form
    return chat(column, role, content, roles)


def _chats(entry: Mapping[str, Any]) -> Columns:
    columns = {"messages": _messages(entry, str(entry.get("field_messages") or "messages"), _ROLES)}
    return columns | ({"tools": str(entry["field_tools"])} if entry.get("field_tools") else {})


def _pairs(entry: Mapping[str, Any]) -> Columns:
    names = {"prompt": "field_messages", "chosen": "field_chosen", "rejected": "field_rejected"}
    usual = {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}
    return {key: _messages(entry, str(entry.get(name) or usual[key]), _PLAIN_ROLES) for key, name in names.items()}


def _template(text: str, columns: Mapping[str, str]) -> str:
    """Return a template of `data.map.columns` from a format string, with columns in place of its names."""
    for char in "[]":
        text = text.replace(char, char * 2)
    for name, column in columns.items():
        text = text.replace(f"{{{name}}}", f"{{{column}}}")
    return text


def _own_prompt(draft: Draft, item: Item, keys: Mapping[str, Any], kind: str, place: str) -> Columns | None:
    """Return the columns of a type that is an object: fields and formats of the user."""
    of_chats = kind == "chats"
    if any(keys.get(key) for key in ("field_system", *(("system_prompt", "system_format") if of_chats else ()))):
        form = "format" if of_chats else "prompt_format"
        draft.problem(item, f"{place} has a system prompt in its type; write it into `{form}`")
        return None
    return _own_chats(draft, item, keys, place) if of_chats else _own_preferences(keys, kind)


def _fields(keys: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: str(keys.get(f"field_{name}") or name) for name in names}


def _own_chats(draft: Draft, item: Item, keys: Mapping[str, Any], place: str) -> Columns | None:
    fields = _fields(keys, "instruction", "input", "output", "system")
    form, plain = keys.get("format"), keys.get("no_input_format")
    form = form if keys.get("field_input") and form else plain or form or "{instruction}"
    if "{input}" in form and plain and plain != form:
        draft.problem(item, f"{place} has two formats, with and without input; write the rows with one of them")
        return None
    return {"prompt": _template(form, fields), "completion": fields["output"]}


def _own_preferences(keys: Mapping[str, Any], kind: str) -> Columns:
    fields = _fields(keys, *(("prompt", "completion") if kind == "kto" else ("prompt", "chosen", "rejected")))
    forms = {name: str(keys.get(f"{name}_format") or f"{{{name}}}") for name in fields}
    columns = {name: fields[name] if form == f"{{{name}}}" else _template(form, fields) for name, form in forms.items()}
    return columns | (_fields(keys, "label") if kind == "kto" else {})
