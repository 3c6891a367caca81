"""Causal language modelling: texts, completions of prompts, and the assistant's turns of chats."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.recipe.schema import Generation
from trainer.tasks.text.columns import SEVERAL_TYPES, STRING_TYPES, cell, require_columns, type_name
from trainer.tasks.text.generated import GENERATED, generated_texts
from trainer.tasks.text.packing import DocumentPacker, Packer, StreamPacker
from trainer.tasks.text.windows import require_fast
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, EvaluatedSplit, Tokenizer

Packing = Literal["none", "documents", "joined"]
Turns = Literal["all", "last", "each"]

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The model types of the table that predict the next token."""

ROLES = ("system", "user", "assistant", "tool")

_ENCODERS = (
    "albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta",
)  # fmt: skip
_TEMPLATE_SECONDS = 10
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class TextColumn:
    """Training on all tokens of the texts of a column, which the recipe's `key` names."""

    column: str
    key: str = "text"

    @property
    def columns(self) -> dict[str, str]:
        """The names of the columns, by the recipe's keys."""
        return {self.key: self.column}


@dataclass(frozen=True)
class CompletionColumns:
    """Training on the completions of prompts."""

    prompt: str
    completion: str

    @property
    def columns(self) -> dict[str, str]:
        return {"prompt": self.prompt, "completion": self.completion}


@dataclass(frozen=True)
class ChatColumn:
    """Training on the assistant's turns of chats."""

    messages: str

    @property
    def columns(self) -> dict[str, str]:
        return {"messages": self.messages}


Examples = TextColumn | CompletionColumns | ChatColumn


@dataclass(frozen=True)
class CausalLMTask(TokenLabels):
    """Causal language modelling with cross entropy over the vocabulary.

    The label of a token is the next token of its document. `vocabulary` describes how the logits are sharded over
    tensor ranks; None if they are not sharded. With `continues`, texts are prompts of generated texts.
    `num_positions` is the maximum number of tokens that the model reads; None: unknown.
    """

    examples: Examples
    packing: Packing
    metric_names: tuple[str, ...]
    vocabulary: VocabularyCut | None = None
    vocabulary_chunk: int | Literal["auto"] | None = None
    takes_token_scores: bool = False
    train_on: Turns = "all"
    settings: Generation = field(default_factory=Generation)
    continues: bool = False
    num_positions: int | None = None

    auto_class_name = "AutoModelForCausalLM"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.examples.columns.values())

    @property
    def beside_rows(self) -> tuple[str, ...]:
        return (
            "metric_names",
            "vocabulary",
            "vocabulary_chunk",
            "takes_token_scores",
            *(() if self.continues else ("settings", "num_positions")),
        )

    @property
    def packs_documents(self) -> bool:
        return self.packing == "documents"

    @property
    def generates(self) -> bool:
        return self.continues

    @property
    def generation(self) -> Generation | None:
        return self.settings if self.continues else None

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ends = [end_token(tokenizer)]
        if isinstance(self.examples, ChatColumn):
            ends += _turn_end(tokenizer)
        return tuple(dict.fromkeys(ends))

    def tokenizer_notes(self, tokenizer: Tokenizer) -> list[str]:
        is_chat = isinstance(self.examples, ChatColumn) and not self.continues and tokenizer.is_fast
        return _turn_notes(tokenizer, self.train_on) if is_chat and tokenizer.chat_template else []

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        if not isinstance(self.examples, ChatColumn) or "tools" not in features:
            return []
        return ["column `tools` is not read: the chat template gets no descriptions of tools"]

    def for_configuration(self, config: Any) -> CausalLMTask:
        """Return the task; refuse a model that sees later tokens."""
        kind = config.model_type
        if kind in _ENCODERS:
            raise UsageError(
                f"`task.type` causal_lm needs a model that predicts the next token, but {kind} sees all tokens of a"
                f" text; use one such as {', '.join(DECODERS)}, or `task.type` masked_lm"
            )
        if self.packs_documents and config.is_encoder_decoder:
            raise UsageError(
                f'`task.packing` is "documents", but decoders of the type {kind} take no positions, which mark the'
                ' documents; use "none", or "joined", which lets documents see each other'
            )
        positions = getattr(config, "max_position_embeddings", None)
        if self.continues and positions is not None and self.settings.max_new_tokens >= positions:
            raise UsageError(
                f"`task.generation.max_new_tokens` must be below the {positions} positions of the model, but is"
                f" {self.settings.max_new_tokens}"
            )
        return replace(self, num_positions=positions)

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        for key, column in self.examples.columns.items():
            require_columns(features, [column], f"task.{key}", where)
            feature = features[column]
            message = _item(feature)
            holds_messages = type_name(message) == SEVERAL_TYPES or (isinstance(message, Mapping) and "role" in message)
            if isinstance(self.examples, ChatColumn):
                if type_name(feature) != SEVERAL_TYPES and not holds_messages:
                    raise DataError(
                        f'`task.messages` must name a column of lists of {{"role": ..., "content": ...}}, but column'
                        f" `{column}` of {where} holds {type_name(feature)}"
                    )
            elif holds_messages:
                raise DataError(
                    f"`task.{key}` must name a column of strings, but column `{column}` of {where} holds messages; join"
                    " those of the prompt and of its completion in one column, and name it in `task.messages`"
                )
            elif getattr(feature, "dtype", None) not in STRING_TYPES:
                raise DataError(
                    f"`task.{key}` must name a column of strings, but column `{column}` of {where} holds"
                    f" {type_name(feature)}"
                )

    def packer(self, max_length: int) -> Packer | None:
        if self.packing == "none":
            return None
        if self.packing == "joined":
            return StreamPacker(max_length)
        return DocumentPacker(max_length, splits=isinstance(self.examples, TextColumn))

    def encode(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Tokenise texts, prompts with completions, or chats; see `TextTask.encode`.

        With `packing`, the result is documents, which `packer` turns into rows. Without it, a text that is longer than
        `max_length` becomes several rows; a prompt with its completion, or a chat, is truncated.

        Raises:
            DataError: a cell is null, a chat or a completion has no token to train, or it is cut by `max_length`.
            UsageError: the tokenizer has no end token or no chat template.
        """
        for column in self.columns:
            values = rows[column]
            if None in values:
                row = first_row + list(values).index(None)
                raise DataError(f"{cell(column, row, where)} is null; fill it, or leave the row out")
        if self.continues:
            return self._encode_prompts(rows, tokenizer, max_length, where, first_row)
        if isinstance(self.examples, TextColumn):
            return self._encode_texts(list(rows[self.examples.column]), tokenizer, max_length)
        examples: list[tuple[str, Tokens]] = []
        columns = (_given(rows[column], [rows.features[column]]) for column in self.columns)
        for row, (first, *others) in enumerate(zip(*columns, strict=True)):
            place = cell(self.columns[-1], first_row + row, where)
            if others:
                found = [_tokens_of_pair(first, others[0], tokenizer, place)]
            else:
                found = _tokens_of_chat(first, tokenizer, self.train_on, place)
            examples += [(place, tokens) for tokens in found]
        return _examples(examples, max_length)

    def _encode_prompts(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Return the tokens of prompts; those of a long prompt are its last ones, which the generated text follows.

        A chat is the prompt of its next turn of the assistant. If that is its last turn, it is left out.
        """
        (column,), end = self.columns, end_token(tokenizer)
        if isinstance(self.examples, ChatColumn):
            texts = [
                _chat_prompt(chat, tokenizer, cell(column, first_row + row, where))
                for row, chat in enumerate(_given(rows[column], [rows.features[column]]))
            ]
        else:
            texts = list(rows[column])
        special = not isinstance(self.examples, ChatColumn)  # a chat template writes its own
        found = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
        if special:
            found = [_without_end(ids, end) for ids in found]
        if self.num_positions is not None:
            max_length = min(max_length, self.num_positions - self.settings.max_new_tokens)
        # An empty prompt begins as a text after another one.
        return {
            "input_ids": [ids[-max_length:] or [end] for ids in found],
            "cut": [len(ids) > max_length for ids in found],
        }

    def _encode_texts(self, texts: list[str], tokenizer: Tokenizer, max_length: int) -> dict[str, list[Any]]:
        """Return the tokens of texts; an empty text has none and is left out."""
        end = end_token(tokenizer)
        texts = [text for text in texts if text]
        features: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        if not texts:
            return features
        for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
            if ids[-1:] != [end]:
                ids = [*ids, end]
            if self.packing == "joined":
                features["input_ids"].append(ids)
                features["labels"].append(ids)
                continue
            # The end token is only predicted.
            step = max_length if self.packing == "none" else len(ids)
            for start in range(0, len(ids) - 1, step):
                part = ids[start : start + step + 1]
                features["input_ids"].append(part[:-1])
                features["labels"].append(part[1:])
        return features

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the model; in packed rows, transformers finds the documents from `position_ids`.

        It does so only without an attention mask and without a cache. Padding, at position 0, sees no other token.
        """
        if "position_ids" not in inputs:
            return inputs
        return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}

    def without_labels(self) -> CausalLMTask:
        examples = self.examples
        if isinstance(examples, CompletionColumns):
            examples = TextColumn(examples.prompt, "prompt")
        return replace(
            self,
            examples=examples,
            packing="none",
            metric_names=(),
            vocabulary_chunk=None,
            train_on="all",
            continues=True,
        )

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        return [{GENERATED: text} for text in generated_texts(answers[GENERATED], split.tokenizer)]


def end_token(tokenizer: Tokenizer) -> int:
    """Return the id of the token after a document: the end token, or else the separator, as of BERT's tokenizers.

    Raises:
        UsageError: the tokenizer has neither.
    """
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UsageError(
        f"the tokenizer `{tokenizer.name_or_path}` has no end token, which separates documents;"
        ' add "eos_token" to the `tokenizer_config.json` of a copy and name its folder in `model.tokenizer`'
    )


Tokens = tuple[list[int], list[bool]]
"""The tokens of an example, and whether each is trained, that is predicted from the tokens before it."""


def _examples(examples: Sequence[tuple[str, Tokens]], max_length: int) -> dict[str, list[Any]]:
    """Return the features of examples, each with its place for messages, cut to `max_length` tokens of input."""
    features: dict[str, list[Any]] = {"input_ids": [], "labels": [], "cut": []}
    for _, (ids, trained) in examples:
        labels = [token if wanted else IGNORED_LABEL for token, wanted in zip(ids[1:], trained[1:], strict=True)]
        features["input_ids"].append(ids[:-1][:max_length])
        features["labels"].append(labels[:max_length])
        features["cut"].append(len(labels) > max_length)
    lost = [row for row, labels in enumerate(features["labels"]) if all(label == IGNORED_LABEL for label in labels)]
    if lost:
        place, (_, trained) = examples[lost[0]]
        before = trained.index(True)
        raise DataError(
            f"{place} has no token to train within `data.max_length` ({max_length}): {before} tokens come"
            f" before the first one, and the same holds for {len(lost)} of {len(examples)} rows from here on that were"
            " read together; increase `data.max_length`, or leave these rows out"
        )
    return features


def _tokens_of_pair(prompt: str, completion: str, tokenizer: Tokenizer, place: str) -> Tokens:
    """Return the tokens of a prompt, its completion and the end token.

    The prompt has the tokens that it has alone, as when the model is asked to complete it.
    """
    if not completion.strip():
        raise DataError(f"{place} is an empty completion; fill it, or leave the row out")
    end = end_token(tokenizer)
    before, whole = (
        _without_end(tokenizer(text, verbose=False)["input_ids"], end) for text in (prompt, prompt + completion)
    )
    if whole[: len(before)] != before or len(whole) == len(before):  # a token spans the border
        whole = [*before, *tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]]
    if not before:  # the first token is predicted from a token, so an empty prompt without a start token needs one
        before, whole = [end], [end, *whole]
    return [*whole, end], [False] * len(before) + [True] * (len(whole) + 1 - len(before))


def _without_end(ids: list[int], end: int) -> list[int]:
    return ids[:-1] if ids[-1:] == [end] else ids


def _tokens_of_chat(chat: Any, tokenizer: Tokenizer, train_on: Turns, place: str) -> list[Tokens]:
    """Return the tokens of a chat in the tokenizer's template, and those of the assistant's turns.

    Only `each` gives more than one example: one for each turn of the assistant, as the template writes it when it is
    the last one. Reasoning models read their earlier turns in another form, without the reasoning.
    """
    messages = _messages(chat, tokenizer, place)
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise DataError(f"{place} is a chat without a turn of the assistant, so nothing is trained; leave it out")
    require_fast(tokenizer, "`task.messages`")
    if train_on == "all":
        texts = [_turns(messages, tokenizer, place)]
    else:
        texts = [_last_turn(messages[: index + 1], tokenizer, place) for index in places]
        texts = texts if train_on == "each" else texts[-1:]
    found = []
    for text, turns in texts:
        ids, spans = _spans(text, tokenizer)
        trained = _trained(spans, turns)
        if not any(trained[1:]):
            raise DataError(f"{place} is a chat with an assistant turn without tokens; fill it, or leave the row out")
        found.append((ids, trained))
    return found


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


def _turn_notes(tokenizer: Tokenizer, train_on: Turns) -> list[str]:
    """Return notes on the first token of an answer and the end token behind it, if they are not trained.

    Such a token stands outside of the template's `{% generation %}` marks.
    """
    question, answer = "What is it?", "Nothing."
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * 2
    try:
        find = _turns if train_on == "all" else _last_turn
        text, turns = find(chat, tokenizer, "a chat of four messages")
    except TrainerError:
        return []  # the template wants other chats
    ids, spans = _spans(text, tokenizer)
    trained = _trained(spans, turns)
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
    where = f"the chat template of `{tokenizer.name_or_path}`"
    return [f"{where}: {note}; move its {{% generation %}} marks in a copy" for note in notes]


def _chat_prompt(chat: Any, tokenizer: Tokenizer, place: str) -> str:
    """Return the text of a chat up to the start of its next turn of the assistant."""
    messages = _messages(chat, tokenizer, place)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{place} must be a chat with a message to answer, but has none; add one, or leave the row out")
    return _text_of(messages, tokenizer, place, add_generation_prompt=True)


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """Return the special token that ends a turn of the assistant in the chat template; empty if there is none."""
    content = "content"
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    after = _text_of(chat, tokenizer, "a chat of two messages").rpartition(content)[2]
    first = tokenizer(after.lstrip(), add_special_tokens=False, verbose=False)["input_ids"][:1]
    return [token for token in first if token in _special(tokenizer)]


def _special(tokenizer: Tokenizer) -> set[int]:
    return {token for token, described in tokenizer.added_tokens_decoder.items() if described.special}


def _require_template(tokenizer: Tokenizer) -> None:
    if not tokenizer.chat_template:
        raise UsageError(
            f"`task.messages` is set, but the tokenizer `{tokenizer.name_or_path}` has no chat template; name one that"
            ' has in `model.tokenizer`, or add "chat_template" to the `tokenizer_config.json` of a copy'
        )


def _item(feature: Any) -> Any:
    """Return the type of the items of a column of lists; None for other columns."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _given(value: Any, feature: Any) -> Any:
    """Return a value without the nulls of structs, which Arrow writes for absent keys; JSON keeps its own nulls."""
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {key: _given(inner, feature[key]) for key, inner in value.items() if inner is not None}
    if (item := _item(feature)) is not None and value is not None:
        return [_given(inner, item) for inner in value]
    return value


def _messages(chat: Any, tokenizer: Tokenizer, place: str) -> list[dict[str, Any]]:
    """Return the messages as the template reads them: without null keys, as transformers does, and with their parts.

    Raises:
        DataError: a message has no known role, no content, another one than text, or calls that the template lacks.
        UsageError: the tokenizer has no template.
    """
    _require_template(tokenizer)
    messages = []
    for number, message in enumerate(chat if isinstance(chat, list) else [chat], start=1):
        if not isinstance(message, dict | None):
            raise DataError(f"{place}, message {number}, must be an object with a role, but is {message!r}; correct it")
        given = {key: value for key, value in (message or {}).items() if value is not None}
        role = given.get("role")
        if role not in ROLES:
            raise DataError(
                f"{place}, message {number}, must have a role of {', '.join(ROLES)}, but has {role!r}; rename it"
            )
        if "content" not in given and role != "assistant":
            raise DataError(f"{place}, message {number}, has no content; fill it, or leave the row out")
        if given.get("weight", 1) != 1:
            raise DataError(
                f"{place}, message {number}, has the weight {given['weight']}, but all turns are trained alike; leave"
                " the row out, or remove the weight"
            )
        if given.get("tool_calls") and "tool_calls" not in tokenizer.get_chat_template():
            raise DataError(
                f"{place}, message {number}, has tool calls, which the chat template of `{tokenizer.name_or_path}` does"
                " not write; add them to a copy of the template, or leave the row out"
            )
        if not isinstance(content := given.get("content", ""), str):
            given["content"] = _content(content, tokenizer, f"{place}, message {number},")
        messages.append(given)
    return messages


def _content(content: Any, tokenizer: Tokenizer, place: str) -> Any:
    """Return the parts of a content for a template that reads parts, or else their joined text."""
    if not isinstance(content, list):
        raise DataError(f"{place} must have a text or a list of texts as content, but has {content!r}; write a text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise DataError(
                f'{place} must have parts of the type "text", but has one of {kind!r}; leave the part or the row out'
            )
    return content if _reads_parts(tokenizer) else "".join(part["text"] for part in content)


def _reads_parts(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes the text of a part, and not its list."""
    text = "part of a message"
    chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    try:
        written = _text_of(chat, tokenizer, "a chat of one message")
    except TrainerError:
        return False
    return text in written and not re.search(r"""['"]text['"]""", written)


def _turns(messages: list[dict[str, Any]], tokenizer: Tokenizer, place: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the start and end of each turn of the assistant in it.

    The turns are those that the template marks, or else follow from the texts of the beginnings of the chat. The token
    mask of transformers is not used: it includes later turns if a turn ends in a space that no token covers.
    """
    if _GENERATION_MARK.search(template := tokenizer.get_chat_template()):
        from transformers.utils.chat_template_utils import render_jinja_template

        with _template_errors(place):
            texts, marked = render_jinja_template(
                conversations=[messages],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
        return texts[0], list(marked[0])
    whole = _text_of(messages, tokenizer, place)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            until, (turn,) = _last_turn(messages[: index + 1], tokenizer, place)
            if not whole.startswith(until):
                raise UsageError(
                    f"the chat template of the tokenizer `{tokenizer.name_or_path}` changes earlier messages when later"
                    f" ones follow ({place}, message {index + 1}), so the assistant's turns cannot be found; set"
                    " `task.train_on` to last or each, or add {% generation %} marks to a copy of the template"
                )
            turns.append(turn)
    return whole, turns


def _last_turn(messages: list[dict[str, Any]], tokenizer: Tokenizer, place: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat that ends with a turn of the assistant, and the start and end of that turn.

    The turn follows the prompt of a generation. If the template writes another one, such as the start of a reasoning,
    the turn starts with its content: there, the texts of two contents differ.
    """
    if _GENERATION_MARK.search(tokenizer.get_chat_template()):
        text, turns = _turns(messages, tokenizer, place)
        return text, turns[-1:]
    until = _text_of(messages, tokenizer, place)
    before = _text_of(messages[:-1], tokenizer, place, add_generation_prompt=True)
    if not until.startswith(before):
        one, other = (
            _text_of([*messages[:-1], {"role": "assistant", "content": content}], tokenizer, place)
            for content in ("a", "b")
        )
        pairs = enumerate(zip(one, other, strict=False))
        before = one[: next((at for at, (left, right) in pairs if left != right), None)]
    if not until.startswith(before):
        raise UsageError(
            f"the chat template of the tokenizer `{tokenizer.name_or_path}` changes the messages before a turn of the"
            f" assistant ({place}, message {len(messages)}), so the turn cannot be found; add"
            " {% generation %} marks to a copy of the template"
        )
    return until, [(len(before), len(until))]


def _text_of(messages: list[dict[str, Any]], tokenizer: Tokenizer, place: str, **options: Any) -> str:
    """Return the text of messages; empty without one, as before a chat that the assistant begins."""
    if not messages:
        return ""
    with _template_errors(place):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


class _SlowTemplateError(BaseException):
    """Error of a chat template that runs too long; a template cannot catch it."""


def _stop_template(*_: Any) -> None:
    raise _SlowTemplateError


@contextmanager
def _template_errors(place: str) -> Iterator[None]:
    """Name the chat of errors in its template, and end a template that runs too long.

    The time is that of the processor, so a busy machine refuses no template. Python runs handlers of signals in the
    main thread only; a template in another thread has no limit.
    """
    has_limit = threading.current_thread() is threading.main_thread()
    try:
        if has_limit:
            before = signal.signal(signal.SIGVTALRM, _stop_template)
            signal.setitimer(signal.ITIMER_VIRTUAL, _TEMPLATE_SECONDS)
        try:
            yield
        finally:
            if has_limit:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, before)
    except _SlowTemplateError:
        raise UsageError(
            f"the chat template of the tokenizer must write a chat within {_TEMPLATE_SECONDS} seconds, but was still"
            f" running for {place}; mend a copy of the template (`model.tokenizer`), or leave the row out"
        ) from None
    except Exception as error:  # a template may raise any error, for example on roles that do not alternate
        raise DataError(
            f"{place} is a chat that the tokenizer's template refuses: {error}; mend the chat, or leave the row out"
        ) from error
