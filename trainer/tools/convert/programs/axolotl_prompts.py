"""Ready-made prompts of axolotl 0.19, as templates of `data.map.columns`.

The texts are data of that tool: a model that is trained with other ones reads other tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import TrainerError
from trainer.tools.convert.programs.rows import Columns, RowSet

_STYLES: Mapping[str, tuple[str, str]] = {
    "instruct": ("{}\n\n", "### Instruction:\n{instruction}\n\n[### Input:\n{input}\n\n]### Response:\n"),
    "chat": ("SYSTEM: {}\n", "USER: {instruction}[\n{input}]\nASSISTANT:"),
    "chatml": (
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{instruction}[\n{input}]<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{}<|end|>\n",
        "<|user|>\n{instruction}<|end|>[{input}<|assistant|>][{!input}\n<|assistant|>\n]",
    ),
}
"""The system text and the question of each prompt style."""
_PLAIN = (
    "Below is an instruction that describes a task[{?input}, paired with an input that provides further context]."
    " Write a response that appropriately completes the request."
)
_CONCISE = (
    "Below is an instruction from a USER that describes a task[{?input}, paired with an input that provides further"
    " context]. The ASSISTANT writes a response that [{?input}concisely and appropriately][{!input}appropriately and"
    " concisely] completes the request.\n\n"
)


@dataclass(frozen=True)
class _Prompt:
    """A type of data set.

    Attributes:
        fields: the columns of instruction, input (empty: none) and answer.
        system: the text before the question; empty: none. A column in braces is left out where it is blank.
        style: the style of the prompt; empty: the type may name it behind a colon.
    """

    fields: tuple[str, str, str] = ("instruction", "input", "output")
    system: str = _PLAIN
    style: str = ""
    forms: tuple[str, str] | None = None  # instead of those of the style
    answer: str = ""  # the template of the answer; empty: the column

    def columns(self, style: str, names: Collection[str] | None) -> Columns:
        """Return the columns of the task.

        Args:
            names: the columns of the rows; None: they are not known.
        """
        system, question = self.forms or _STYLES[self.style or style]
        before = system.replace("{}", self.system) if self.system else ""
        text = f"[{before}]" if self.system.startswith("{") else before
        instruction, context, answer = self.fields
        has_context = context and (names is None or context in names)
        text = _with_input(text + question, context) if has_context else _without_input(text + question)
        return {"prompt": text.replace("{instruction}", f"{{{instruction}}}"), "completion": self.answer or answer}


_ORCA = ("question", "", "response")
_PROMPTS: Mapping[str, _Prompt] = {
    "alpaca": _Prompt(),
    "gpteacher": _Prompt(("instruction", "input", "response")),
    "oasst": _Prompt(("INSTRUCTION", "", "RESPONSE")),
    "jeopardy": _Prompt(("question", "category", "answer"), answer="what is {answer}"),
    "summarizetldr": _Prompt(
        ("article", "", "summary"),
        "",
        forms=("", "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"),
    ),
    "alpaca_instruct": _Prompt(style="instruct"),
    "alpaca_instruct.load_no_prompt": _Prompt(system="", style="instruct"),
    "alpaca_chat": _Prompt(style="chat"),
    "alpaca_chat.load_no_prompt": _Prompt(system="", style="chat"),
    "alpaca_chat.load_concise": _Prompt(system=_CONCISE, style="chat"),
    "alpaca_chat.load_qa": _Prompt(("question", "", "answer"), _CONCISE, "chat"),
    "alpaca_chat.load_camel_ai": _Prompt(("message_1", "", "message_2"), _CONCISE, "chat"),
    "alpaca_w_system": _Prompt(system="{system}", style="chat"),
    "alpaca_w_system.load_chat": _Prompt(system="{system}", style="chat"),
    "alpaca_w_system.load_instruct": _Prompt(system="{system}", style="instruct"),
    "alpaca_w_system.load_open_orca": _Prompt(
        _ORCA, "{system_prompt}", forms=("### System:\n{}\n", "### Human:\n{instruction}\n### Assistant:\n")
    ),
    "alpaca_w_system.load_open_orca_chatml": _Prompt(_ORCA, "{system_prompt}", "chatml"),
}
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}
"""The system text, the question, and the end of an answer of the prompts of preferences."""
_OF_PAIRS: Mapping[str, tuple[str, str, str]] = {
    "intel": ("question", "chosen", "rejected"),
    "icr": ("input", "chosen", "rejected"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
    "ultra": ("prompt", "chosen[1].content", "rejected[1].content"),
    "argilla_chat": ("chosen[0].content", "chosen[1].content", "rejected[1].content"),
}
_OF_KTO = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
_QUESTIONS = ("prompt", "input", "question", "instruction")  # in the order of axolotl
_WITH_SYSTEM = ("intel", "icr")  # the data sets that they are named after have this column


def prompt_columns(type_: str, names: Collection[str] | None) -> Columns | None:
    """Return the columns of prompts and answers of a type, such as `alpaca:chat`; None: it is not known.

    Args:
        names: the columns of the rows; None: they are not known.
    """
    name, _, style = type_.removesuffix(".load").partition(":")
    prompt = _PROMPTS.get(name)
    has_style = prompt is not None and not (prompt.style or prompt.forms)
    if prompt is None or (style and (not has_style or style not in _STYLES)):
        return None
    return prompt.columns(style or "instruct", names)


def preference_columns(type_: str, kind: str, names: Collection[str] | None) -> Columns | None:
    """Return the columns of preferences of a type, such as `chatml.intel`; None: it is not known.

    Args:
        kind: the rows of the task, pairs or kto.
    """
    form, _, name = type_.partition(".")
    fields = _pair_of(name or "default", names) if kind == "pairs" else _rated(name)
    if form not in _FORMS or fields is None:
        return None
    system, question, end = _FORMS[form]
    has_system = name in _WITH_SYSTEM if names is None else "system" in names
    before = f"[{system}]" if has_system and name != "argilla_chat" else ""
    prompt, *answers = fields
    keys = ("chosen", "rejected") if kind == "pairs" else ("completion",)
    columns = {"prompt": before + question.replace("{prompt}", f"{{{prompt}}}")}
    columns |= {key: f"{{{answer}}}{end}" for key, answer in zip(keys, answers, strict=True)}
    return columns | ({} if kind == "pairs" else {"label": "label"})


def note_on_prompts(type_: object, rows: RowSet | None) -> str:
    """Return a note on the prompts of a type, given its rows; empty: there is none."""
    if not isinstance(type_, str):
        return ""
    form, _, name = type_.partition(".")
    if form in _FORMS and name not in (*_WITH_SYSTEM, "argilla_chat") and (rows is None or known_columns(rows) is None):
        return "a column `system` is taken for missing; else write `[...{system}...]` before the prompt, as in axolotl"
    if prompt_columns(type_, None) is not None:
        return "prompt and answer are tokenised as one text; axolotl joins the tokens of both"
    return ""


def known_columns(rows: RowSet) -> Collection[str] | None:
    """Return the columns of the first row of a file; None: it is not on this machine, or cannot be read."""
    from trainer.data.formats.base import TextOptions
    from trainer.data.formats.table import format_of, reader_of

    for file in map(Path, rows.files[:1]):
        name = format_of(file)
        if name is not None and os.path.isfile(file):
            with suppress(TrainerError, OSError, ValueError):
                row = next(iter(reader_of(name).rows(file, str(file), TextOptions())), None)
                return row if isinstance(row, dict) else None
    return None


def _pair_of(name: str, names: Collection[str] | None) -> tuple[str, str, str] | None:
    """Return the columns of question and both answers; None: the type is not known."""
    if name != "default":
        return _OF_PAIRS.get(name)
    if names is None:
        return ("prompt", "chosen", "rejected")
    question = next((column for column in _QUESTIONS[:-1] if column in names), _QUESTIONS[-1])
    chosen, rejected = (key if key in names else f"{key}_response" for key in ("chosen", "rejected"))
    return (question, chosen, rejected)


def _rated(name: str) -> tuple[str, str] | None:
    return (_OF_KTO[name], "completion") if name in _OF_KTO else None


def _with_input(text: str, column: str) -> str:
    for mark in ("", "?", "!"):
        text = text.replace(f"{{{mark}input}}", f"{{{mark}{column}}}")
    return text


def _without_input(text: str) -> str:
    """Return a template without its parts on the input, as for rows without it."""

    def kept(part: re.Match[str]) -> str:
        if "{input}" in part[0] or "{?input}" in part[0]:
            return ""
        return part[1].replace("{!input}", "") if "{!input}" in part[0] else part[0]

    return re.sub(r"\[([^\[\]]*)\]", kept, text)
