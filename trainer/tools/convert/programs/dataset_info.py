"""Data sets of LLaMA-Factory: `dataset`, `eval_dataset` and the entries of `dataset_info.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.recipe.reading.files import read_file, shown_path
from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.programs.rows import Columns, RowSet, chat, take_train_and_held
from trainer.tools.convert.sources import Item, Tool

_LF = Tool.LLAMA_FACTORY
_INFO = "dataset_info.json"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "tool_calls",
    "system_tag": "system",
}  # fmt: skip
_ROLES_OF_OPENAI = {tag: role for tag, role in _ROLES.items() if role != "tool_calls"}
_KNOWN = ("file_name", "hf_hub_url", "formatting", "ranking", "subset", "split", "columns", "tags", "num_samples")
_MEDIA = ("images", "videos", "audios")


def rows(draft: Draft, folder: Path, stage: str) -> None:
    """Convert `dataset`, `eval_dataset` and `val_size`.

    Args:
        stage: pt, sft, dpo, kto or rm.
    """
    sources = draft.sources
    item, tests, share = (sources.given(_LF, key) for key in ("dataset", "eval_dataset", "val_size"))
    place, mixing, shares = (sources.get(_LF, key) for key in ("dataset_dir", "mix_strategy", "interleave_probs"))
    if item is None:
        draft.missing["data"] = "the rows: `dataset` is missing"
        draft.unread("dataset is missing", tests, share, place, mixing, shares)
        return
    _mixing(draft, mixing, shares)
    assert place is not None
    info = _info(draft, place, item)
    draft.say(place, Outcome.CONVERTED, "the folder of the files in `data`")
    if info is None:
        draft.unread("the rows are not known", tests, share)
        return
    train = _sets(draft, item, info, str(place.value), stage)
    held = _sets(draft, tests, info, str(place.value), stage) if tests is not None else None
    if not train or held == []:
        return
    take_train_and_held(draft, folder, train, held, item, tests, share)
    strategy = sources.get(Tool.TRAINING_ARGUMENTS, "eval_strategy")
    if not (tests or share) and strategy is not None and strategy.value != "no":
        draft.override("evaluation.every", None, strategy, note="there are no validation rows")


def _mixing(draft: Draft, strategy: Item | None, shares: Item | None) -> None:
    if strategy is not None and strategy.value != "concat":
        draft.refuse_file(strategy, "every row counts once, or data.mixture gives each file its share of an epoch")
    draft.unread("mix_strategy is concat", shares)


def _info(draft: Draft, place: Item, item: Item) -> dict[str, Any] | None:
    """Return the entries of `dataset_info.json`, which lies relative to the current folder or to the file."""
    if not isinstance(place.value, str):
        draft.problem(place, "must be the folder of dataset_info.json")
        return None
    if place.value == "ONLINE":
        return {name: {"hf_hub_url": name} for name in draft.names(item)}
    origin = item.origin
    for base in (Path(), *([origin.folder] if origin else [])):
        file = base / place.value / _INFO
        if file.is_file():
            node, problems = read_file(file)
            draft.problems += map(str, problems)
            found = node.plain()
            if isinstance(found, dict):
                return {name: entry for name, entry in found.items() if isinstance(entry, dict)}
            draft.problems.append(f"{shown_path(file)}: must be an object of data sets")
            return None
    text = f"{place.value}/{_INFO}, which describes the rows, does not exist; copy it there, and convert again"
    draft.refuse("data.train", text, item)
    return None


def _sets(draft: Draft, item: Item, info: Mapping[str, Any], place: str, stage: str) -> list[RowSet]:
    """Return the data sets of a key; an empty list after a problem."""
    found = []
    for name in draft.names(item):
        entry = info.get(name)
        if entry is None:
            draft.problem(item, f"names {name}, which is not in {place}/{_INFO}; add it there")
            return []
        problem = _problem(entry, stage)
        if problem:
            draft.problem(item, f"names {name}, whose entry in {_INFO} {problem}")
            return []
        columns = _columns(entry, stage)
        if columns is None:
            draft.problem(item, f"names {name}, whose entry in {_INFO} has no columns for stage {stage}; correct it")
            return []
        split = str(entry.get("split") or "train")
        if "hf_hub_url" in entry:
            keys = {"subset": str(entry["subset"])} if entry.get("subset") else {}
            found.append(RowSet((), str(entry["hf_hub_url"]), keys, split, columns))
        else:
            found.append(RowSet((os.path.join(place, str(entry.get("file_name"))),), "", {}, split, columns))
    return found


def _problem(entry: Mapping[str, Any], stage: str) -> str:
    """Return the problem of an entry whose rows cannot be read alike."""
    strange = [key for key in entry if key not in _KNOWN and not key.endswith(("_hub_url", "_hub_sha"))]
    strange += [key for key in ("columns", "tags") if not isinstance(entry.get(key) or {}, dict)]
    if strange:
        return f"has {', '.join(strange)} without a counterpart; remove it"
    media = [key for key in _MEDIA if (entry.get("columns") or {}).get(key)]
    form = entry.get("formatting", "alpaca")
    problems = {
        f"has {', '.join(media)}: models of text and images are not supported": media,
        "has num_samples, which decides what is learned; name a file with these rows": entry.get("num_samples"),
        "names no file and no data set of the Hugging Face hub; write its rows into a file": not (
            entry.keys() & {"hf_hub_url", "file_name"}
        ),
        f"has the formatting {form}; write alpaca, sharegpt or openai": form not in ("alpaca", "sharegpt", "openai"),
        f"has no ranking, which stage {stage} needs; add it, and the columns chosen and rejected": (
            stage in ("dpo", "rm") and not entry.get("ranking")
        ),
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


def _columns(entry: Mapping[str, Any], stage: str) -> Columns | None:
    """Return the columns of the task; None: the entry does not name them."""
    given = entry.get("columns")
    # Without `columns`, all have their defaults; beside others, a column that is left out is none.
    columns: dict[str, str | None] = dict(_COLUMNS) if given is None else dict(given)
    if entry.get("formatting", "alpaca") == "alpaca":
        return _of_alpaca(columns, stage)
    return _of_chats(entry, columns, stage)


def _of_alpaca(columns: Mapping[str, str | None], stage: str) -> Columns | None:
    prompt, query = columns.get("prompt"), columns.get("query")
    if not prompt:
        return None
    question = f"{{{prompt}}}[\n{{{query}}}]" if query else f"{{{prompt}}}"
    if stage == "pt":
        return {"text": question if query else prompt}
    before = [{"role": "system", "content": f"[{{{columns['system']}}}]"}] if columns.get("system") else []
    if columns.get("history"):
        before.append({"role": "turns", "content": str(columns["history"])})
    asked = [*before, {"role": "user", "content": question}]
    answers = {name: [{"role": "assistant", "content": f"{{{column}}}"}] for name, column in columns.items() if column}
    if stage in ("dpo", "rm", "kto"):
        return _preferences(columns, stage, asked, answers, "response")
    if "response" not in answers:
        return None
    return {"messages": [*asked, *answers["response"]]} | _tools(columns)


def _preferences(
    columns: Mapping[str, str | None], stage: str, prompt: Any, answers: Mapping[str, Any], completion: str
) -> Columns | None:
    """Return the columns of preferences; None: the entry does not name them.

    Args:
        prompt: the column of the prompt; None: the answers have it.
        answers: columns of answers, by their names in `columns`.
        completion: the name of the column that stage kto rates.
    """
    first = {"prompt": prompt} if prompt else {}
    names = {"completion": completion} if stage == "kto" else {"chosen": "chosen", "rejected": "rejected"}
    label = {"label": columns.get("kto_tag")} if stage == "kto" else {}
    if not all(label.values()) or not {*names.values()} <= answers.keys():
        return None
    return first | {key: answers[name] for key, name in names.items()} | label


def _tools(columns: Mapping[str, str | None]) -> dict[str, Any]:
    return {"tools": str(columns["tools"])} if columns.get("tools") else {}


def _of_chats(entry: Mapping[str, Any], columns: Mapping[str, str | None], stage: str) -> Columns | None:
    tags = dict(_TAGS) if entry.get("tags") is None else entry["tags"]
    role, content = tags.get("role_tag"), tags.get("content_tag")
    if not (role and content and columns.get("messages")) or stage == "pt":
        return None
    of_tags = _ROLES_OF_OPENAI if entry.get("formatting") == "openai" else _ROLES
    roles = {str(tags[tag]): ours for tag, ours in of_tags.items() if tags.get(tag)}
    read = {
        name: chat(column, role, content, roles, columns.get("system") if name == "messages" else None)
        for name, column in columns.items()
        if column
    }
    if stage in ("dpo", "rm", "kto"):
        return _preferences(columns, stage, read["messages"] if stage != "kto" else None, read, "messages")
    return {"messages": read["messages"]} | _tools(columns)
