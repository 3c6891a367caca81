"""Chat templates of tokenizers: the texts that they write, within limits of time and memory, and the forms they read.

A template is code of its author. It runs in the sandbox of transformers; the limits end one that does not stop.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.features.chats.template_watch import watched
from trainer.tasks.text.answers import Tools
from trainer.tasks.types import Tokenizer

Message = Mapping[str, Any]

_SECONDS = 10
_BYTES = 256 << 20  # of memory beside the present one
_CHARACTERS = 1 << 24
_NUMBER_BITS = 1 << 16
_DIGITS = 1 << 8
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATE = "chat_date"  # an attribute of tokenizers, and so a part of their digests
_TODAY = "strftime_now"  # the function of templates
_PROBES = 16  # templates with forms in memory


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it reads.

    Attributes:
        name: the name of its tokenizer.
        date: the date that it writes as today's, in the form of ISO 8601; None: that of today.
    """

    name: str
    text: str
    special: tuple[tuple[str, str | tuple[str, ...]], ...]
    date: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Tools = None) -> ChatTemplate:
        """Return the template of a tokenizer, which may have another one for chats with tools.

        Raises:
            UsageError: it has none.
        """
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise UsageError(
                f"`task.messages` is set, but the tokenizer `{name}` has no chat template; name one that has in"
                ' `model.tokenizer`, or add "chat_template" to the `tokenizer_config.json` of a copy'
            )
        special = tokenizer.special_tokens_map.items()
        # Tuples, because `lru_cache` keeps the forms that a template reads and hashes its fields.
        frozen = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in special)
        text = tokenizer.get_chat_template(tools=list(tools) if tools else None)
        return cls(name, text, frozen, getattr(tokenizer, _DATE, None))

    @property
    def has_marks(self) -> bool:
        """Whether `{% generation %}` marks the turns of the assistant."""
        return _MARK.search(self.text) is not None

    def write(self, messages: Sequence[Message], place: str, tools: Tools = None, **options: Any) -> str:
        """Return the text of messages; empty without one, as before a chat that the assistant begins.

        Raises:
            DataError: the template refuses the chat at `place`.
            UsageError: the template needs too much time or memory.
        """
        return self._rendered(messages, place, tools, **options)[0] if messages else ""

    def write_marked(
        self, messages: Sequence[Message], place: str, tools: Tools = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and the start and end of each part that the template marks; see `write`."""
        text, marked = self._rendered(messages, place, tools, return_assistant_tokens_mask=True)
        return text, list(marked[0])

    def _rendered(self, messages: Sequence[Message], place: str, tools: Tools, **options: Any) -> tuple[str, Any]:
        from transformers.utils import chat_template_utils

        _bound_sandbox(chat_template_utils)
        # Arrow writes null for keys that a message lacks, and templates would find them defined.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        special = {key: list(value) if isinstance(value, tuple) else value for key, value in self.special}
        limit = None
        try:
            with _limited(), self._dated(chat_template_utils):
                texts, marked = chat_template_utils.render_jinja_template(
                    conversations=[given], tools=tools, chat_template=self.text, **options, **special
                )
        except _SlowTemplateError:
            limit = f"{_SECONDS} seconds", "was still running"
        except MemoryError:
            limit = f"{_BYTES >> 20:,} MiB of memory", "needed more"
        except Exception as error:  # a template may raise any error, for example on roles that do not alternate
            raise DataError(
                f"{place} is a chat that the tokenizer's template refuses: {error}; correct the chat, or leave the row"
                " out"
            ) from error
        if limit is None and len(texts[0]) > _CHARACTERS:
            limit = f"{_CHARACTERS:,} characters", f"wrote {len(texts[0]):,}"
        if limit is not None:  # raised here, the error keeps none of the texts that the template made
            gc.collect()  # the frames of a template are a circle
            raise UsageError(
                f"the chat template of the tokenizer must write a chat within {limit[0]}, but {limit[1]} for {place};"
                " fix a copy of the template (`model.tokenizer`), or leave the row out"
            )
        return texts[0], marked

    @contextmanager
    def _dated(self, module: Any) -> Iterator[None]:
        """Give the template its date, in place of today's."""
        if self.date is None:
            yield
            return
        # transformers caches compiled templates, so `render_jinja_template` renders this object; its globals hide those
        # of the environment.
        names = module._compile_jinja_template(self.text).globals
        names[_TODAY] = datetime.fromisoformat(self.date).strftime
        try:
            yield
        finally:
            del names[_TODAY]


def set_date(tokenizer: Tokenizer, day: str | None) -> bool:
    """Set the date that the chat template of a tokenizer writes as today's, and return whether it writes one.

    Args:
        day: the date; None: that of today.
    """
    writes = _TODAY in str(tokenizer.chat_template)
    if day is not None and writes:  # it is a part of the key of the cache
        setattr(tokenizer, _DATE, day)
    return writes


class _SlowTemplateError(BaseException):
    """Error of a chat template that runs too long; a template cannot catch it."""


def _stop_template(*_: Any) -> None:
    raise _SlowTemplateError


@contextmanager
def _limited() -> Iterator[None]:
    """Limit processor time and address space. The kernel counts both, whatever a template calls.

    The time is that of the processor, so a busy machine refuses no template. Python runs handlers of signals in the
    main thread only, and a limit of memory holds for the whole process: another thread, which reads later rows of a
    stream, has a watcher.
    """
    if threading.current_thread() is not threading.main_thread():
        with watched(_SECONDS, _BYTES, _SlowTemplateError):
            yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The handler is set before the timer and goes after it, because by default SIGPROF ends the process.
    before = signal.signal(signal.SIGPROF, _stop_template)
    try:
        if (used := _address_space()) is not None:
            # `RLIMIT_AS` counts the whole address space, with all libraries that the process has mapped.
            limits = [limit for limit in (used + _BYTES, soft, hard) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int | None:
    """Return the bytes of the process's address space; None: the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


@lru_cache(maxsize=1)
def _bound_sandbox(module: Any) -> None:
    """Let transformers compile templates in a sandbox without operations of long numbers and sums of lists.

    No signal interrupts one operation, and their time grows with the square. The sandbox has no random functions
    either: ranks, and a resumed run, would train on other texts.
    """
    from jinja2 import pass_environment
    from jinja2.filters import do_round, make_attrgetter

    @pass_environment
    def add(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
        total = start
        for value in values if attribute is None else map(make_attrgetter(environment, attribute), values):
            if not (isinstance(total, int | float) and isinstance(value, int | float)):
                raise TypeError("the filter `sum` adds numbers only")
            total += value
        return total

    def rounded(value: Any, precision: int = 0, method: Any = "common") -> Any:
        if abs(precision) > _DIGITS:
            raise OverflowError(f"a number is rounded to more than {_DIGITS} digits")
        return do_round(value, precision, method)

    sandbox: Any = module.ImmutableSandboxedEnvironment

    class Bounded(sandbox):  # type: ignore[misc]
        # Jinja passes these operators alone to `call_binop`; a sum has one bit more than its operands, and needs no
        # limit.
        intercepted_binops = frozenset({"*", "**", "//", "%"})

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            del self.filters["random"], self.globals["lipsum"]
            self.filters |= {"sum": add, "round": rounded}

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length()
                if (bits * right if operator == "**" else bits + right.bit_length()) > _NUMBER_BITS:
                    raise OverflowError(f"a number of more than {_NUMBER_BITS:,} bits")
            return super().call_binop(context, operator, left, right)

    module.ImmutableSandboxedEnvironment = Bounded
    # Templates that were compiled before belong to the old sandbox.
    module._compile_jinja_template.cache_clear()


_QUESTION = {"role": "user", "content": "question"}
_PART = "part of a message"
_ARGUMENTS = {"first_key": "first value"}
_AFTER_CALLS: tuple[tuple[Message, ...], ...] = (
    (),
    ({"role": "tool", "tool_call_id": "call00000", "name": "name", "content": "result"},),
)


def _attempt(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """Return the text of messages; empty if the template refuses them."""
    try:
        return template.write(messages, "a chat of the checks of templates")
    except TrainerError:
        return ""


@lru_cache(maxsize=_PROBES)
def writes_role(template: ChatTemplate, role: str) -> bool:
    """Return whether the chat template writes messages of a role, and does not skip or refuse them."""
    return _PART in _attempt(template, [{"role": role, "content": _PART}, _QUESTION])


@lru_cache(maxsize=_PROBES)
def writes_name(template: ChatTemplate, role: str) -> bool:
    """Return whether the chat template writes the name of a speaker, or refuses such a message."""
    message = {"role": role, "content": "content", "name": _PART}
    chats = {"system": [message, _QUESTION], "assistant": [_QUESTION, message]}
    text = _attempt(template, chats.get(role, [message]))
    return _PART in text or not text


@lru_cache(maxsize=_PROBES)
def reads_parts(template: ChatTemplate) -> bool:
    """Return whether the chat template writes the text of a part, and not its list."""
    written = _attempt(template, [{"role": "user", "content": [{"type": "text", "text": _PART}]}])
    return _PART in written and not re.search(r"""['"]text['"]""", written)


@lru_cache(maxsize=_PROBES)
def needs_parts(template: ChatTemplate) -> bool:
    """Return whether the chat template writes contents only as lists of parts."""
    return _PART not in _attempt(template, [{"role": "user", "content": _PART}]) and reads_parts(template)


@lru_cache(maxsize=_PROBES)
def needs_text_of_arguments(template: ChatTemplate) -> bool:
    """Return whether the chat template writes the arguments of a tool call only if they are JSON text."""
    for after in _AFTER_CALLS:
        of_object, of_text = (
            _attempt(template, [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_call(form)]}, *after])
            for form in (_ARGUMENTS, json.dumps(_ARGUMENTS))
        )
        if of_object or of_text:
            is_object = all(word in of_object for pair in _ARGUMENTS.items() for word in pair)
            return not (is_object and repr(_ARGUMENTS) not in of_object) and json.dumps(_ARGUMENTS) in of_text
    return False


@lru_cache(maxsize=_PROBES)
def writes_calls(template: ChatTemplate, content: str | None, number: int) -> bool:
    """Return whether the chat template writes tool calls beside a content, or refuses such a turn with an error.

    Args:
        content: the content of the turn; None: it has none.
        number: the number of its calls.
    """
    if "tool_calls" not in template.text:
        return False
    words = [f"called{count}" for count in range(number)]
    for form, after in product((_ARGUMENTS, json.dumps(_ARGUMENTS)), _AFTER_CALLS):
        calls = [_call(form, word) for word in words]
        text = _attempt(template, [_QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}, *after])
        if text:
            return all(word in text for word in words)
    return True


def end_of_call(template: ChatTemplate) -> str:
    """Return the text behind the arguments of a tool call that ends a turn; empty if the template writes no calls."""
    arguments = json.dumps(_ARGUMENTS) if needs_text_of_arguments(template) else _ARGUMENTS
    for content in (None, ""):
        text = _attempt(
            template, [_QUESTION, {"role": "assistant", "content": content, "tool_calls": [_call(arguments)]}]
        )
        before, _, after = text.rpartition(_ARGUMENTS["first_key"])
        if before:
            return after
    return ""


def _call(arguments: Any, name: str = "name") -> dict[str, Any]:
    # Templates of Mistral refuse ids of other lengths than nine letters and digits.
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def names_key(template: ChatTemplate, key: str) -> bool:
    """Return whether the chat template has the name of a key of messages, as in `message.key` or `'key' in message`."""
    return re.search(rf"[.'\"]{re.escape(key)}\b", template.text) is not None
