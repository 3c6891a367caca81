"""Chats in the template of a tokenizer: their tokens, and those to train."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.features.chats import templates
from trainer.features.chats.messages import parsed, read_messages, require_written
from trainer.features.chats.templates import ChatTemplate, end_of_call, writes_name
from trainer.tasks.text.answers import Chats, Tokens, Tools, Turns, holds_chats, messages_of
from trainer.tasks.text.windows import require_fast
from trainer.tasks.types import Dataset, Tokenizer

_ROWS_LOOKED_AT = 100
_SPEAKERS = ("system", "user", "assistant")
"""Roles whose names may say who speaks; the name of a tool stands in its call, too."""

Spans = list[tuple[int, int]]
"""The start and end of each part of a text."""


class TemplateChats(Chats):
    """Chats in the template of a tokenizer."""

    def whole(self, chat: Any, tokenizer: Tokenizer, train_on: Turns, place: str, tools: Tools = None) -> list[Tokens]:
        """Return the tokens of a chat in the tokenizer's template, and those of the assistant's turns.

        Reasoning models read their earlier turns in another form, without the reasoning. Turns with a weight of 0 are
        not trained.
        """
        template = ChatTemplate.of(tokenizer, tools)
        messages, weights = read_messages(chat, template, place, tools)
        trained_turns = [weights[index] for index, message in enumerate(messages) if message["role"] == "assistant"]
        places = [index for index, message in enumerate(messages) if message["role"] == "assistant" and weights[index]]
        if not places:
            weight = " with a weight of 1" if trained_turns else ""
            raise DataError(
                f"{place} is a chat without a turn of the assistant{weight}, so nothing is trained; leave the row out"
            )
        require_fast(tokenizer, "`task.messages`")
        texts: list[tuple[str, Spans]] = []
        if train_on == "all":
            text, turns = _turns(messages, template, place, tools)
            texts.append((text, _weighted(turns, trained_turns)))
            require_written(messages, places, text, template, place, tools, fix="set `task.train_on` to each")
        else:
            for index in places if train_on == "each" else places[-1:]:
                text, turn = _last_turn(messages[: index + 1], template, place, tools)
                texts.append((text, turn))
                require_written(messages[: index + 1], [index], text, template, place, tools)
        found = []
        for text, parts in texts:
            ids, spans = _spans(text, tokenizer)
            trained = _trained(spans, parts)
            # The first token of a text has no loss, because a model predicts each token from those before it.
            if not any(trained[1:]):
                raise DataError(
                    f"{place} is a chat with an assistant turn without tokens; fill it, or leave the row out"
                )
            found.append((ids, trained))
        return found

    def answer(
        self, prompt: Sequence[Any], answer: Sequence[Any], tokenizer: Tokenizer, tools: Tools, place: str
    ) -> Tokens:
        """Return the tokens of a chat in the tokenizer's template, and those of the assistant's turns in its answer."""
        if prompt and list(answer[: len(prompt)]) == list(prompt):
            raise DataError(
                f"{place} begins with the messages of its prompt; set `task.prompt` to null if the answers are whole"
                " chats"
            )
        template = ChatTemplate.of(tokenizer, tools)
        messages, weights = read_messages([*prompt, *answer], template, place, tools)
        places = [at for at in range(len(prompt), len(messages)) if messages[at]["role"] == "assistant"]
        own = [weights[at] for at in places]
        if not any(own) or messages[-1]["role"] != "assistant":
            raise DataError(f"{place} must be an answer that ends with a turn of the assistant; leave the row out")
        require_fast(tokenizer, "a chat")
        if len(answer) == 1:
            text, last = _last_turn(messages, template, place, tools)
            turns = [last]
        else:
            text, turns = _turns(messages, template, place, tools)
        require_written(messages, [at for at in places if weights[at]], text, template, place, tools)
        ids, spans = _spans(text, tokenizer)
        trained = _trained(spans, _weighted(turns[-len(own) :], own))
        if not any(trained[1:]):
            raise DataError(f"{place} is an answer without tokens; fill it, or leave the row out")
        return ids, trained

    def notes(self, tokenizer: Tokenizer, train_on: Turns) -> list[str]:
        """Return notes on a template without `{% generation %}` marks, and on tokens that its marks leave out.

        These are the first token of an answer, and the end token behind it.
        """
        question, answer = "What is it?", "Nothing."
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * 2
        template, place = ChatTemplate.of(tokenizer), "a chat of four messages"
        try:
            messages, _ = read_messages(chat, template, place)
            if train_on == "all":
                text, turns = _turns(messages, template, place)
            else:
                text, last = _last_turn(messages, template, place)
                turns = [last]
            header = _unprompted(messages, template, place)
        except TrainerError:
            return []  # the template wants other chats
        ids, spans = _spans(text, tokenizer)
        trained = _trained(spans, _weighted(turns, [True] * len(turns)))
        first = text.rfind(answer)
        behind = first + len(answer)
        behind += len(text[behind:]) - len(text[behind:].lstrip())
        special = _special(tokenizer)
        notes = []
        for token, own, (start, end) in zip(ids, trained, spans, strict=True):
            if own or first < 0:
                continue
            if start <= first < end:
                notes.append("the first token of an answer is not trained")
            elif start <= behind < end and token in special:
                notes.append(f"the token {text[behind:end]!r} behind an answer is not trained, so answers may not end")
        where = f"the chat template of `{template.name}`"
        if not template.has_marks:
            notes = [
                f"{where} has no {{% generation %}} marks, so the assistant's turns are found by comparing texts of"
                " chats; see them in `trainer preview`"
            ]
        else:
            notes = [f"{where}: {note}; move its {{% generation %}} marks in a copy" for note in notes]
        if header:
            notes.append(
                f"{where} writes no {header!r} for `add_generation_prompt`, so a model must generate it before an"
                " answer; add it to a copy"
            )
        return notes

    def tools(self, value: Any, tokenizer: Tokenizer, place: str) -> Tools:
        """Return the tools of a chat.

        Raises:
            DataError: they are no list of objects, or the chat template does not write them.
        """
        try:
            tools = json.loads(value) if isinstance(value, str) and value.strip() else value or None
        except ValueError:
            tools = value
        if tools is None or tools == []:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{place} must be a list of JSON schemas, or its text, but is {value!r}; correct it")
        if tokenizer.chat_template and "tools" not in ChatTemplate.of(tokenizer, tools).text:
            raise DataError(
                f"{place} has tools, which the chat template of `{tokenizer.name_or_path}` does not write; add them to"
                " a copy of the template, or remove `task.tools`"
            )
        return [_with_schema(tool) for tool in tools]

    def prompt(self, chat: Any, tokenizer: Tokenizer, place: str, tools: Tools = None) -> str:
        """Return the text of a chat up to the start of its next turn of the assistant."""
        template = ChatTemplate.of(tokenizer, tools)
        messages, _ = read_messages(chat, template, place, tools)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise DataError(
                f"{place} must be a chat with a message to answer, but has none; add one, or leave the row out"
            )
        text = template.write(messages, place, tools, add_generation_prompt=True)
        require_written(messages, [], text, template, place, tools)
        return text

    def ends(self, tokenizer: Tokenizer) -> list[int]:
        """Return the added tokens that end turns of the assistant, behind a content and behind a call.

        A call of a tool may end a turn with a token of its own, behind the tokens that end the call.
        """
        content = "content"
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        template, place = ChatTemplate.of(tokenizer), "a chat of two messages"
        try:
            after = template.write(read_messages(chat, template, place)[0], place).rpartition(content)[2]
        except TrainerError:
            after = ""  # the template wants other chats
        first, after_call = (
            tokenizer(text.lstrip(), add_special_tokens=False, verbose=False)["input_ids"]
            for text in (after, end_of_call(template))
        )
        special = _special(tokenizer)
        return [
            *(token for token in first[:1] if token in tokenizer.added_tokens_decoder),
            *[token for token in after_call if token in special][-1:],
        ]

    def column_notes(self, columns: Sequence[str], rows: Dataset, tokenizer: Tokenizer) -> list[str]:
        """Return notes on columns with names of speakers that the chat template leaves out."""
        notes = []
        for column in columns:
            if not holds_chats(rows.features.get(column)):
                continue
            template = ChatTemplate.of(tokenizer)
            messages = [message for chat in rows[column][:_ROWS_LOOKED_AT] for message in messages_of(chat)]
            roles = {one.get("role") for one in messages if isinstance(one, Mapping) and one.get("name")}
            if left_out := [role for role in _SPEAKERS if role in roles and not writes_name(template, role)]:
                notes.append(
                    f"column `{column}` has messages of the {' and the '.join(left_out)} with a `name`, which is not"
                    f" read: the chat template of `{template.name}` does not write it"
                )
        return notes

    def set_date(self, tokenizer: Tokenizer, day: str | None) -> bool:
        return templates.set_date(tokenizer, day)


TEMPLATE = TemplateChats()


def _weighted(turns: Sequence[Spans], weights: Sequence[bool]) -> Spans:
    """Return the parts of the turns with a weight of 1."""
    return [span for turn, weight in zip(turns, weights, strict=True) if weight for span in turn]


def _spans(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text that a chat template wrote, and the start and end of each token in the text."""
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(made["input_ids"]), list(made["offset_mapping"])


def _trained(spans: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether each token holds a character of a turn; it may begin with the blank before the turn.

    Some tokenizers leave the blank out of the span. A token of blanks before the turn then has an empty span, at the
    start of the turn, and is not trained.
    """
    return [any(first < end and start < last for first, last in turns) for start, end in spans]


def _with_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the schema of its parameters as an object, which data sets often hold as JSON text."""
    if isinstance(inner := tool.get("function"), dict):
        return {**tool, "function": _with_schema(inner)}
    return {**tool, "parameters": parsed(tool["parameters"])} if "parameters" in tool else tool


def _special(tokenizer: Tokenizer) -> set[int]:
    return {token for token, described in tokenizer.added_tokens_decoder.items() if described.special}


def _turns(
    messages: list[dict[str, Any]], template: ChatTemplate, place: str, tools: Tools = None
) -> tuple[str, list[Spans]]:
    """Return the text of a chat, and the parts of each turn of the assistant in it.

    The turns are those that the template marks, or else follow from the texts of the beginnings of the chat. The token
    mask of transformers is not used: it includes later turns if a turn ends in a space that no token covers.
    """
    if template.has_marks:
        text, marked = template.write_marked(messages, place, tools)
        return text, _by_turn(text, marked, messages, template, place, tools)
    whole = template.write(messages, place, tools)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            until, turn = _last_turn(messages[: index + 1], template, place, tools)
            if not whole.startswith(until):
                raise UsageError(
                    f"the chat template of the tokenizer `{template.name}` changes earlier messages when later ones"
                    f" follow ({place}, message {index + 1}), so the assistant's turns cannot be found; set"
                    " `task.train_on` to last or each, or add {% generation %} marks to a copy of the template"
                )
            turns.append(turn)
    return whole, turns


def _by_turn(
    text: str, marked: Spans, messages: list[dict[str, Any]], template: ChatTemplate, place: str, tools: Tools
) -> list[Spans]:
    """Return the marked parts of each turn of the assistant.

    A template may mark several parts of a turn, such as its reasoning, its content and its end. They then begin behind
    the text of the messages before the turn.

    Raises:
        UsageError: the template marks a part before the first turn.
    """
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(marked) == len(places):
        return [[span] for span in marked]
    # A template may end a shorter chat in another way, so its text counts as far as both agree.
    starts = [len(_common_start(text, template.write(messages[:index], place, tools))) for index in places]
    turns: list[Spans] = [[] for _ in places]
    for span in marked:
        if not (number := bisect(starts, span[0])):
            raise UsageError(
                f"the chat template of `{template.name}` marks {text[slice(*span)]!r:.40} before the first turn of the"
                f" assistant in {place}; correct its {{% generation %}} marks in a copy"
            )
        turns[number - 1].append(span)
    return turns


def _last_turn(
    messages: list[dict[str, Any]], template: ChatTemplate, place: str, tools: Tools = None
) -> tuple[str, Spans]:
    """Return the text of a chat that ends with a turn of the assistant, and the parts of that turn.

    The turn follows the prompt of a generation, or starts with its content if that is not a beginning of the chat.
    """
    if template.has_marks:
        text, turns = _turns(messages, template, place, tools)
        return text, turns[-1]
    until = template.write(messages, place, tools)
    before = template.write(messages[:-1], place, tools, add_generation_prompt=True)
    if not before or not until.startswith(before):
        # There is no prompt, or it has more than the chat, such as the start of a reasoning.
        before = _before_content(until, messages[:-1], template, place, tools)
    elif (header := _header(template)) and until.startswith(before + header):
        before += header  # which the template does not write in this place for a prompt
    if not until.startswith(before):
        raise UsageError(
            f"the chat template of the tokenizer `{template.name}` changes the messages before a turn of the assistant"
            f" ({place}, message {len(messages)}), so the turn cannot be found; add {{% generation %}} marks to a copy"
            " of the template"
        )
    return until, [(len(before), len(until))]


def _unprompted(messages: list[dict[str, Any]], template: ChatTemplate, place: str) -> str:
    """Return the text before the content of the last turn that no prompt of a generation shows; empty without one."""
    before = messages[:-1]
    prompt, shown = (template.write(before, place, add_generation_prompt=wanted) for wanted in (True, False))
    start = _before_content(template.write(messages, place), before, template, place, None)
    return start[len(prompt) :].strip() if prompt == shown and start.startswith(prompt) else ""


def _before_content(text: str, before: list[dict[str, Any]], template: ChatTemplate, place: str, tools: Tools) -> str:
    """Return the text before the content of the last turn of a chat.

    The content begins where the texts of two contents differ. A chat that the assistant begins has no prompt of a
    generation, so its turn begins after the header of other turns, if `text` has it there.
    """
    contents = (read_messages({"role": "assistant", "content": content}, template, place)[0] for content in ("a", "b"))
    one, other = (template.write([*before, *content], place, tools) for content in contents)
    if before:
        return _common_start(one, other)
    found = _common_start(text, one, other)
    header = _header(template)
    start = found.rfind(header) if header else -1
    return found if start < 0 else found[: start + len(header)]


@lru_cache(maxsize=16)
def _header(template: ChatTemplate) -> str:
    """Return the text that begins a turn of the assistant; empty if the prompt of a generation does not show it."""
    place = "a chat of one message"
    try:
        chat, _ = read_messages({"role": "user", "content": "question"}, template, place)
        without, prompt = (template.write(chat, place, add_generation_prompt=wanted) for wanted in (False, True))
    except TrainerError:
        return ""
    return prompt[len(without) :] if prompt.startswith(without) else ""


def _common_start(*texts: str) -> str:
    differing = (at for at, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    return texts[0][: next(differing, min(map(len, texts)))]
