"""Prompts with their answers, both texts or both messages of chats: their tokens, and those to train.

The encoder of chats is registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainer.base.errors import DataError, UsageError
from trainer.base.extensions import sole
from trainer.base.nulls import item_of
from trainer.base.text import listed
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.text.columns import SEVERAL_TYPES, STRING_TYPES, bare, fix_of, framed, require_columns, type_name
from trainer.tasks.types import Dataset, Encoded, Tokenizer

_OF_SHAPES = frozenset(("conversations", "instruction", "output"))
"""Columns of other tools from which chats and prompts are made, with a note on the columns beside them."""
_COLUMNS_SHOWN = 10

Turns = Literal["all", "last", "each"]
Tools = Sequence[dict[str, Any]] | None
"""The tools of a chat, as JSON schemas; None: it has none."""
Tokens = tuple[list[int], list[bool]]
"""The tokens of an example, and whether each is trained, that is predicted from the tokens before it."""


class Chats(ABC):
    """The encoder of chats. In its methods, `place` names the cell of a chat in messages of errors."""

    @abstractmethod
    def whole(self, chat: Any, tokenizer: Tokenizer, train_on: Turns, place: str, tools: Tools) -> list[Tokens]:
        """Return the examples of a chat, in which turns of the assistant are trained.

        Only `each` gives more than one example: one for each turn of the assistant, as it is written when it is the
        last one.
        """

    @abstractmethod
    def answer(
        self, prompt: Sequence[Any], answer: Sequence[Any], tokenizer: Tokenizer, tools: Tools, place: str
    ) -> Tokens:
        """Return the tokens of the messages of a prompt and its answer, which is trained."""

    @abstractmethod
    def prompt(self, chat: Any, tokenizer: Tokenizer, place: str, tools: Tools) -> str:
        """Return the text of a chat up to the start of its next turn of the assistant."""

    @abstractmethod
    def tools(self, value: Any, tokenizer: Tokenizer, place: str) -> Tools:
        """Return the tools of a chat, from a list of objects or its JSON text."""

    @abstractmethod
    def ends(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that end turns of the assistant."""

    @abstractmethod
    def notes(self, tokenizer: Tokenizer, train_on: Turns) -> list[str]:
        """Return notes on how turns of the assistant are found."""

    @abstractmethod
    def column_notes(self, columns: Sequence[str], rows: Dataset, tokenizer: Tokenizer) -> list[str]:
        """Return notes on the first rows of the columns that hold chats."""

    @abstractmethod
    def set_date(self, tokenizer: Tokenizer, day: str | None) -> bool:
        """Set the date that chats have as today's, and return whether they have one; None: that of today."""


def encoder_of_chats() -> Chats | None:
    """Return the registered encoder of chats; None: there is none."""
    encoder: Chats | None = sole("chats")
    return encoder


def required_chats() -> Chats:
    """Return the registered encoder of chats.

    Raises:
        UsageError: there is none.
    """
    if (encoder := encoder_of_chats()) is None:
        raise UsageError("the rows hold chats, but no encoder of chats is installed; convert them to texts")
    return encoder


def messages_of(value: Any) -> list[Any]:
    """Return the messages of a cell, which holds a list of them or one."""
    return value if isinstance(value, list) else [value]


def end_token(tokenizer: Tokenizer) -> int:
    """Return the id of the token after a document; see `known_end`.

    Raises:
        UsageError: the tokenizer has none.
    """
    if (token := known_end(tokenizer)) is None:
        raise UsageError(
            f"the tokenizer `{tokenizer.name_or_path}` has no end token, which separates documents;"
            ' add "eos_token" to the `tokenizer_config.json` of a copy and name its folder in `model.tokenizer`'
        )
    return token


def known_end(tokenizer: Tokenizer) -> int | None:
    """Return the id of the end token, or else of the separator, as of BERT's tokenizers; None: there is neither."""
    token: int | None = tokenizer.eos_token_id
    return tokenizer.sep_token_id if token is None else token


def features_of(examples: Sequence[tuple[str, Tokens]], max_length: int) -> Encoded:
    """Return the features of examples, each with its place for messages, cut to `max_length` tokens.

    The last token is only predicted.
    """
    labelled = [
        (place, (ids, [token if wanted else IGNORED_LABEL for token, wanted in zip(ids, trained, strict=True)]))
        for place, (ids, trained) in examples
    ]
    return features_of_labels(labelled, max_length)


def features_of_labels(examples: Sequence[tuple[str, tuple[Sequence[int], Sequence[int]]]], max_length: int) -> Encoded:
    """Return the features of tokens with a label each, which is that of the token itself; see `features_of`."""
    features: Encoded = {"input_ids": [], "labels": [], "cut": []}
    for _, (ids, labels) in examples:
        features["input_ids"].append(list(ids[:max_length][:-1]))
        # Shifted here, so that neither the model nor the loss shifts labels again.
        features["labels"].append(list(labels[1:max_length]))
        features["cut"].append(len(ids) > max_length)
    trained = [any(label != IGNORED_LABEL for label in labels) for labels in features["labels"]]
    if not all(trained):
        place, (_, labels) = examples[trained.index(False)]
        # The label at place 0 does not count: no token before it predicts it.
        before = next((at for at, label in enumerate(labels) if at and label != IGNORED_LABEL), None)
        if before is None:
            raise DataError(f"{place} has no token to train; leave the row out")
        raise DataError(
            f"{place} has no token to train within `data.max_length` ({max_length}): {before} tokens come before the"
            " first one; increase `data.max_length`, or leave the row out"
        )
    return features


def _tokens_of_pair(prompt: str, completion: str, tokenizer: Tokenizer, place: str) -> Tokens:
    """Return the tokens of a prompt, its completion and the end token.

    The prompt has the tokens that it has alone, as when the model is asked to complete it. A completion behind it has
    no start token.
    """
    if not completion.strip():
        raise DataError(f"{place} is an empty completion; fill it, or leave the row out")
    end = end_token(tokenizer)
    start = tokenizer.bos_token_id
    (completion,) = bare([completion], tokenizer, [start] if prompt and start not in (None, end) else [], [end])
    # Tokenised as one text, because the first token of a completion depends on the text before it.
    before, whole = framed([prompt, prompt + completion], tokenizer)
    if whole[: len(before)] != before or len(whole) == len(before):  # a token spans the border
        whole = [*before, *tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]]
    if not before:  # the first token is predicted from a token, so an empty prompt without a start token needs one
        before, whole = [end], [end, *whole]
    return [*whole, end], [False] * len(before) + [True] * (len(whole) + 1 - len(before))


def tokens_after(prompt: Any, answer: Any, tokenizer: Tokenizer, tools: Tools, place: str) -> Tokens:
    """Return the tokens of a prompt with its answer, both texts or both messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return _tokens_of_pair(prompt, answer, tokenizer, place)
    return required_chats().answer(messages_of(prompt), messages_of(answer), tokenizer, tools, place)


def holds_messages(feature: Any) -> bool:
    """Return whether a column holds lists of messages."""
    message = item_of(feature)
    return type_name(message) == SEVERAL_TYPES or (isinstance(message, Mapping) and "role" in message)


def holds_chats(feature: Any) -> bool:
    """Return whether a column holds messages, or lists of them."""
    is_message = isinstance(feature, Mapping) and "role" in feature
    return is_message or holds_messages(feature) or type_name(feature) == SEVERAL_TYPES


def unread_notes(
    features: Mapping[str, Any], read: Sequence[str], is_chat: bool = True, takes_tools: bool = True
) -> list[str]:
    """Return notes on columns beside those of chats or prompts that are not read, with fixes for known ones."""
    of_system = "name it in `system` of `data.map.columns` to begin the chats with it"
    if not is_chat:
        of_system = "write it before the prompt by a template in `data.map.columns`"
    fixes = dict.fromkeys(("system", "system_prompt", "instructions"), of_system)
    if is_chat:
        of_tools = "name it in `task.tools` to describe the tools in chats"
        of_images = "the model reads the texts of chats only"
        fixes |= dict.fromkeys(("tools", "functions") if takes_tools else (), of_tools)
        fixes |= dict.fromkeys(("image", "images", "videos", "audios"), of_images)
        fixes |= dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "set it in a copy of the chat template")
        fixes |= dict.fromkeys(("weight", "train", "loss", "mask_history"), "set `weight` in the messages instead")
        fixes["documents"] = "write them into the messages"
    unread = [column for column in features if column not in read]
    others = [f"`{column}`" for column in unread if column not in fixes]
    notes = [f"column `{column}` is not read; {fix}" for column, fix in fixes.items() if column in unread]
    if others and _OF_SHAPES.isdisjoint(features):
        notes.append(f"columns that are not read: {listed(others, _COLUMNS_SHOWN)}")
    return notes


def check_texts_or_chats(features: Mapping[str, Any], columns: Mapping[str, str], where: str) -> bool:
    """Return whether the columns hold messages, after a check that all hold texts, or all messages.

    Raises:
        DataError: a column is missing or of another type, or the columns hold both.
    """
    kinds = {}
    for key, column in columns.items():
        is_apart = key == "prompt" and "chosen" in columns
        fix = "; set it to null if the answers are whole texts or chats" if is_apart else ""
        require_columns(features, [column], f"task.{key}", where, fix)
        feature = features[column]
        kinds[column] = holds_chats(feature)
        if not kinds[column] and getattr(feature, "dtype", None) not in STRING_TYPES:
            kind = type_name(feature)
            raise DataError(
                f"`task.{key}` must name a column of strings or of messages, but column `{column}` of {where} holds"
                f" {kind}{fix_of(kind)}"
            )
    if len(set(kinds.values())) > 1:
        texts, chats = (", ".join(f"`{name}`" for name in kinds if kinds[name] == kind) for kind in (False, True))
        raise DataError(
            f"prompts and answers of {where} must all be texts or all be messages, but {texts} holds texts, and"
            f" {chats} messages; set `task.prompt` to null if the answers are whole chats, or convert a column"
        )
    return any(kinds.values())
