"""Data sets of axolotl: path, type and columns of each item of `datasets` and `test_datasets`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.programs.rows import ENDINGS, Columns, RowSet, chat, held_share, take_rows
from trainer.tools.convert.sources import Item, Tool

_AX = Tool.AXOLOTL
_ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"], "tool": ["tool"]}
_PLAIN_ROLES = {name: [name] for name in _ROLES}  # of preferences
_LOADING = ("path", "split", "name", "data_files", "ds_type", "revision", "type", "trust_remote_code")
_OF_CHATS = (
    "field_messages", "message_property_mappings", "message_field_role", "message_field_content", "roles",
    "field_tools",
)  # fmt: skip
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
    sources = draft.sources
    item, tests = sources.written(_AX, "datasets"), sources.given(_AX, "test_datasets")
    share = sources.written(_AX, "val_set_size")
    if sources.given(_AX, "train_on_inputs") is not None:
        inputs = sources.given(_AX, "train_on_inputs")
        if inputs is not None and draft.flag(inputs):
            draft.refuse_file(inputs, "prompts are not trained; for texts without a prompt, use the type completion")
    if item is None or not item.value:
        draft.missing["data"] = "the rows: `datasets` is missing"
        draft.unread("datasets is missing", tests, share, sources.written(_AX, "excess_length_strategy"))
        return
    train = _sets(draft, item, kind)
    held = _sets(draft, tests, kind) if tests is not None else []
    if not train or (tests is not None and not held):
        return
    if tests is not None and held:
        draft.unread("test_datasets has precedence", share)
        take_rows(draft, folder, train, held, item, tests)
    else:
        take_rows(draft, folder, train, held_share(draft, share), item, *([share] if share else []))
    _evaluation(draft, bool(held or (share is not None and share.value)))
    strategy = sources.get(_AX, "excess_length_strategy")
    if kind == "chats" and strategy is not None and strategy.value != "truncate":
        text = "axolotl leaves rows with more than sequence_len tokens out; here they are cut at `data.max_length`"
        draft.say(item if strategy.origin is None else strategy, Outcome.DIFFERS, text)
    elif strategy is not None:
        draft.say(strategy, Outcome.SAME, "longer rows are cut at `data.max_length`")


def _evaluation(draft: Draft, has_rows: bool) -> None:
    """Turn evaluation off without validation rows, as axolotl does."""
    keys = [draft.sources.written(Tool.TRAINING_ARGUMENTS, key) for key in ("eval_strategy", "eval_steps")]
    keys.append(draft.sources.written(_AX, "evals_per_epoch"))
    if not has_rows:
        given = [key for key in keys if key]
        draft.override("evaluation.every", None, *given, note="there are no validation rows")


def _sets(draft: Draft, item: Item, kind: str) -> list[RowSet]:
    """Return the data sets of a key; an empty list after a problem."""
    if not isinstance(item.value, list) or not all(isinstance(entry, dict) for entry in item.value):
        draft.problem(item, "must be a list of data sets, each with a path and a type; begin each with `- path:`")
        return []
    found = []
    for place, entry in enumerate(item.value):
        if wrong := _wrong(entry):
            draft.problem(item, f"has a wrong type in {item.key}[{place}]: {wrong}; correct it")
            return []
        columns = _columns(draft, item, entry, kind, f"{item.key}[{place}]")
        loaded = _loaded(draft, item, entry, f"{item.key}[{place}]")
        if columns is None or loaded is None:
            return []
        files, name, keys = loaded
        found.append(RowSet(files, name, keys, str(entry.get("split") or "train"), columns))
    return found


def _wrong(entry: Mapping[str, Any]) -> str:
    """Return the first key with a value of a wrong type."""
    kind = entry.get("type")
    texts = dict(entry) | (kind if isinstance(kind, dict) else {})
    for key, value in texts.items():
        if value is None or key in ("type", "trust_remote_code", "split_thinking", "drop_system_message"):
            continue
        if key == "message_property_mappings":
            right = isinstance(value, dict) and all(isinstance(name, str) for name in value.values())
        elif key == "roles":
            right = isinstance(value, dict) and all(isinstance(names, list) for names in value.values())
        elif key == "data_files":
            right = isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))
        else:
            right = isinstance(value, str) or not key.startswith(
                ("path", "split", "name", "field", "format", "ds_type")
            )
            right = right and (isinstance(value, str) or not key.endswith(("_format", "prompt", "_role", "_content")))
        if not right:
            return key
    return ""


def _loaded(
    draft: Draft, item: Item, entry: Mapping[str, Any], place: str
) -> tuple[tuple[str, ...], str, dict[str, str]] | None:
    path, files = entry.get("path"), entry.get("data_files")
    if not isinstance(path, str) or not path:
        draft.problem(item, f"has no path in {place}; write it")
        return None
    named = [files] if isinstance(files, str) else [str(file) for file in files or []]
    if os.path.isdir(path):
        named = [os.path.join(path, file) for file in named]
        named = named or sorted(name for ending in ENDINGS for name in glob(f"{path}/*{ending}"))
        return (tuple(named), "", {}) if named else ((), path, {})
    if path.lower().removesuffix(".gz").endswith(ENDINGS) or os.path.isfile(path):
        return (path,), "", {}
    if path in ("json", "csv", "parquet", "text") and named:  # the builders of `datasets`
        return tuple(named), "", {}
    if named:
        draft.refuse("data.train", f"single files of a hub repository, {', '.join(named)}; download them", item)
        return None
    if entry.get("ds_type") and entry["ds_type"] not in ("json", "csv", "parquet"):
        draft.refuse("data.train", f"{path} of the type {entry['ds_type']}; write its rows as JSON Lines", item)
        return None
    keys = {"name": "subset", "revision": "revision"}
    return (), path, {ours: str(entry[theirs]) for theirs, ours in keys.items() if entry.get(theirs)}


def _columns(draft: Draft, item: Item, entry: Mapping[str, Any], kind: str, place: str) -> Columns | None:
    """Return the columns of the task, or None after a problem."""
    type_ = entry.get("type")
    known: tuple[str, ...] = _LOADING
    columns: Columns | None = None
    if isinstance(type_, dict):
        columns = _own_prompt(draft, item, type_, kind, place)
    elif kind == "chats" and type_ == "chat_template":
        known += _OF_CHATS
        columns = _chats(entry)
    elif kind == "chats" and type_ == "completion":
        known += ("field",)
        columns = {"text": str(entry.get("field") or "text")}
    elif kind == "chats" and type_ == "alpaca":
        text = (
            "axolotl's Alpaca prompt, as a template in `columns.prompt` with {instruction} and {input};"
            ' \'{"columns": {"prompt": "{instruction}[\\n{input}]", "completion": "output"}}\' has no words around them'
        )
        draft.refuse("data.map", text, item)
        columns = {"prompt": "prompt", "completion": "completion"}
    elif kind in ("pairs", "rewards") and type_ in ("chat_template.default", "chat_template"):
        known += (*_OF_CHATS, "field_chosen", "field_rejected")
        columns = _pairs(entry)
    else:
        shown = type_ if type_ else "without a type"
        rule = f"{place} has the type {shown}, which decides what is learned; write the rows as chats, with the type"
        draft.problem(item, f"{rule} {'chat_template.default' if kind in ('pairs', 'rewards') else 'chat_template'}")
    if columns is None:
        return None
    further = {key: value for key, value in entry.items() if key not in known and value not in (None, "", [], {})}
    for key, value in further.items():
        if value not in _DEFAULTS.get(key, ()):
            draft.problem(item, f"{place} has `{key}`, which decides what is learned and has no counterpart; remove it")
            return None
    return columns


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
    field = {name: str(keys.get(f"field_{name}") or name) for name in ("instruction", "input", "output", "system")}
    if kind == "chats":
        form, plain = keys.get("format"), keys.get("no_input_format")
        if keys.get("system_prompt") or keys.get("system_format") or keys.get("field_system"):
            draft.problem(item, f"{place} has a system prompt in its type; write it into `format`")
            return None
        form = form if keys.get("field_input") and form else plain or form or "{instruction}"
        if "{input}" in form and plain and plain != form:
            draft.problem(item, f"{place} has two formats, with and without input; write the rows with one of them")
            return None
        return {"prompt": _template(form, field), "completion": field["output"]}
    names = ("prompt", "completion") if kind == "kto" else ("prompt", "chosen", "rejected")
    if keys.get("field_system"):
        draft.problem(item, f"{place} has a system prompt in its type; write it into `prompt_format`")
        return None
    fields = {name: str(keys.get(f"field_{name}") or name) for name in names}
    forms = {name: str(keys.get(f"{name}_format") or f"{{{name}}}") for name in names}
    columns: dict[str, Any] = {
        name: fields[name] if form == f"{{{name}}}" else _template(form, fields) for name, form in forms.items()
    }
    return columns | ({"label": str(keys.get("field_label") or "label")} if kind == "kto" else {})
