"""Messages of chats in the form that a chat template reads, and the turns that are not trained.

Every key of a message is read here or by the template, and every text is written by it, or else refused, since a
missing one changes the meaning of a chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.features.chats.templates import (
    ChatTemplate,
    names_key,
    needs_parts,
    needs_text_of_arguments,
    reads_parts,
    writes_calls,
    writes_role,
)
from trainer.tasks.text.answers import Tools, messages_of

ROLES = ("system", "developer", "user", "assistant", "tool")

FLAGS = ("weight", "loss", "train", "training")
"""Keys of messages that say whether a turn is trained, in the spellings of several tools."""

_READ = frozenset({"role", "content", "tool_calls"})
_LABELS = frozenset({"name", "id", "tool_call_id"})
"""Keys that name a message, which a template may leave out."""
_OF_CALLS = _LABELS | {"type", "index", "function", "arguments"}
_REASONING = re.compile(r"</?think>")
_SHOWN = 40  # characters of a text in a message
_OTHER = "another text"


def read_messages(
    chat: Any, template: ChatTemplate, place: str, tools: Tools = None
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages as the template reads them, and whether each is trained if it is of the assistant.

    They are without null keys, as in transformers. Contents and the arguments of tool calls have the form that the
    template writes: text or parts, objects or JSON text.

    Raises:
        DataError: a message has no known role, no content, another one than text, or a key that the template lacks.
        UsageError: the template does not write messages of the developer.
    """
    messages, weights = [], []
    for number, message in enumerate(messages_of(chat), start=1):
        own = f"{place}, message {number},"
        if not isinstance(message, dict | None):
            raise DataError(f"{own} must be an object with a role, but is {message!r}; correct it")
        given = {key: value for key, value in (message or {}).items() if value is not None}
        role = given.get("role")
        if role not in ROLES:
            raise DataError(f"{own} must have a role of {', '.join(ROLES)}, but has {role!r}; rename it")
        if "content" not in given and role != "assistant":
            raise DataError(f"{own} has no content; fill it, or leave the row out")
        weights.append(_is_trained(given, own))
        if role == "developer" and not writes_role(template, role):
            raise UsageError(
                f"{own} is of the developer, which the chat template of `{template.name}` does not write; map it to"
                " system by `roles` in `data.map.columns`"
            )
        if calls := given.pop("tool_calls", None):  # some templates read an empty list as a call
            given["tool_calls"] = _tool_calls(calls, given.get("content"), template, own)
        if "content" in given:
            given["content"] = _content(given["content"], template, own)
        messages.append(given)
    _require_read(messages, template, place, tools)
    return messages, weights


def _is_trained(message: dict[str, Any], place: str) -> bool:
    """Remove the flags of a message, and return whether all are true."""
    trained = True
    for flag in FLAGS:
        if (value := message.pop(flag, None)) is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            needed = "a weight of 0 or 1" if flag == "weight" else f"`{flag}` true or false"
            raise DataError(f"{place} must have {needed}, but has {value!r}; correct it")
        if value and flag != "weight" and message["role"] != "assistant":
            raise DataError(
                f"{place} has `{flag}` true, but is of the {message['role']}; only turns of the assistant are trained:"
                " remove it, or leave the row out"
            )
        trained = trained and bool(value)
    return trained


def _content(content: Any, template: ChatTemplate, place: str) -> Any:
    """Return a content as the template reads it: a text, or parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if needs_parts(template) else content
    if not isinstance(content, list):
        raise DataError(f"{place} must have a text or a list of texts as content, but has {content!r}; write a text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise DataError(
                f'{place} must have parts of the type "text", but has one of {kind!r}; leave the part or the row out'
            )
        if flags := [flag for flag in FLAGS if flag in part]:
            raise DataError(f"{place} must have `{flags[0]}` beside its content, but has it in a part; correct it")
    return content if reads_parts(template) else "".join(part["text"] for part in content)


def _tool_calls(calls: Any, content: Any, template: ChatTemplate, place: str) -> list[Any]:
    found = parsed(calls)
    if not isinstance(found, list) or not all(isinstance(call, dict) for call in map(parsed, found)):
        raise DataError(f"{place} must have a list of objects as tool calls, but has {calls!r:.80}; correct it")
    form = content if content is None or content == "" else "content"
    # Two calls stand for all larger numbers, so that few results are cached.
    if not writes_calls(template, form, min(len(found), 2)):
        kind = "tool calls"
        if writes_calls(template, form, 1):
            kind = "several tool calls in a turn"
        elif writes_calls(template, None, 1):
            kind = "tool calls beside a content"
        raise DataError(
            f"{place} has {kind}, which the chat template of `{template.name}` does not write; add them to a copy"
            " of the template, or leave the row out"
        )
    return [_tool_call(parsed(call), template, place) for call in found]


def _tool_call(call: Mapping[str, Any], template: ChatTemplate, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments in the form that the template writes."""
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _tool_call(inner, template, place)}
    if (given := call.get("arguments")) is None:
        if others := sorted(key for key in call.keys() - _OF_CALLS if call[key] is not None):
            raise DataError(
                f"{place} must have `arguments` in a tool call, but has {', '.join(f'`{key}`' for key in others)};"
                " rename it"
            )
        given = ""
    arguments = {} if given == "" else parsed(given)
    if not isinstance(arguments, dict):
        raise DataError(
            f"{place} must have a tool call with a JSON object as arguments, but has {given!r:.80}; correct it"
        )
    if needs_text_of_arguments(template):
        return {**call, "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
    return {**call, "arguments": arguments}


def parsed(value: Any) -> Any:
    """Return the value of JSON text; another value, and a text that is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _require_read(messages: Sequence[Mapping[str, Any]], template: ChatTemplate, place: str, tools: Tools) -> None:
    """Refuse a key of a message that neither this module nor the template reads.

    The first message of each role with the key decides, as the last one of its chat: templates of reasoning models
    write the reasoning of the last turn only.
    """
    seen = set()
    for at, message in enumerate(messages):
        for key in message.keys() - _READ - _LABELS:
            if (message["role"], key) in seen or message[key] in ("", [], {}):
                continue
            seen.add((message["role"], key))
            if not _is_read(key, messages[: at + 1], template, place, tools):
                raise DataError(
                    f"{place}, message {at + 1}, has `{key}`, which is not read: the chat template of"
                    f" `{template.name}` does not write it; add it to a copy of the template, or leave it out by `drop`"
                    " in `data.map.columns`"
                )


def _is_read(key: str, messages: Sequence[Mapping[str, Any]], template: ChatTemplate, place: str, tools: Tools) -> bool:
    """Return whether a key of the last message changes the text of a chat; a name in the template does for a flag."""
    *before, last = messages
    if not isinstance(last[key], str) and names_key(template, key):
        return True
    # A reasoning may stand under several names, and transformers copies one to the others.
    without = {name: value for name, value in last.items() if name in _READ or value != last[key]}
    try:
        written, short = (template.write([*before, end], place, tools) for end in (last, without))
    except TrainerError:
        return True  # the whole chat has the better message, if any
    return written != short


def require_written(
    messages: Sequence[Mapping[str, Any]],
    trained: Collection[int],
    text: str,
    template: ChatTemplate,
    place: str,
    tools: Tools,
    fix: str = "",
) -> None:
    """Refuse a chat with a text that its template leaves out.

    Templates of reasoning models leave out the reasoning of earlier turns, which only a trained turn needs.

    Args:
        trained: the indices of the turns that are trained.
        text: the text of the chat.
        fix: how each turn is written as the last one; empty if it is.
    """
    squeezed = _squeezed(text)
    given = json.dumps([*messages, template.text], ensure_ascii=False, default=str)
    for at, message in enumerate(messages):
        for key, part, other in _texts(message, at in trained):
            if other == message[key] or not part.strip():
                continue
            # A text that stands in another message or in the template would be found even if this message is left out.
            stands_elsewhere = given.count(json.dumps(part, ensure_ascii=False)[1:-1]) > 1
            if not stands_elsewhere and (part in text or _squeezed(part) in squeezed):
                continue
            others = [*messages[:at], {**message, key: other}, *messages[at + 1 :]]
            if _attempted(others, template, place, tools) != text:
                continue  # it is written in another form
            last = _attempted(messages[: at + 1], template, place, tools) if fix else None
            way = f"{fix}, " if last and _squeezed(part) in _squeezed(last) else ""
            raise DataError(
                f"{place}, message {at + 1}, has {part.strip()[:_SHOWN]!r} in `{key}`, which the chat template of"
                f" `{template.name}` does not write there; {way}add it to a copy of the template, or leave the row out"
            )


def _texts(message: Mapping[str, Any], is_trained: bool) -> Iterator[tuple[str, str, Any]]:
    """Return the texts of a message: the key of each, the text, and the value of the key with another one."""
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            for number, part in enumerate(value):
                other = {**part, "text": _OTHER}
                yield key, str(part.get("text", "")), [*value[:number], other, *value[number + 1 :]]
        elif not isinstance(value, str):
            continue
        elif key == "content" and message["role"] == "assistant":
            parts = [part for part in _REASONING.split(value) if part.strip()]
            yield from ((key, part, value.replace(part, _OTHER)) for part in (parts if is_trained else parts[-1:]))
        elif key == "content" or (is_trained and key not in _READ | _LABELS):
            yield key, value, _OTHER


def _attempted(messages: Sequence[Mapping[str, Any]], template: ChatTemplate, place: str, tools: Tools) -> str | None:
    """Return the text of messages; None if the template refuses them."""
    try:
        return template.write(messages, place, tools)
    except TrainerError:
        return None


def _squeezed(text: str) -> str:
    return "".join(text.split())
