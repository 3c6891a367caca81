"""The keys of chats in the section `task` of causal language models, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

from trainer.recipe.paths import shown_value
from trainer.recipe.schema import CausalLM, TaskSection
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash


class ChatKeys(CausalLM):
    """The columns and the trained turns of chats."""

    messages: Name | None = None
    """Column of chats, as lists of {"role": ..., "content": ...}; the assistant's turns are trained, unless their
    `weight` is 0."""
    tools: Name | None = None
    """Column of the tools of a chat, as lists of JSON schemas or their text."""
    train_on: Literal["all", "last", "each"] = "all"
    """Trained turns of a chat: all in one row, the last one, or each in its own row. `last` and `each` suit templates
    that change earlier messages."""


def contradictions(task: TaskSection) -> Iterator[Contradiction]:
    if not isinstance(task, CausalLM):
        return
    own, columns = cast(ChatKeys, task), task.sources
    keys = [f"task.{key}" for key in columns]
    named = " and ".join(f"`{key}`" for key in keys)
    if own.tools is not None:
        if list(columns) == ["text"]:
            yield clash(f"applies to chats, but the examples are {named}; remove it", "task.tools", *keys)
        if own.tools in (own.messages, own.prompt, own.completion):
            text = f"is {shown_value(own.tools)}, which is also a column of {named}; name another"
            yield clash(text, "task.tools", *keys)
    if own.train_on != "all" and list(columns) != ["messages"]:
        yield clash(f"applies to `task.messages`, but the examples are {named}; remove it", "task.train_on", *keys)
