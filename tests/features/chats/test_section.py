"""The keys of chats in the section of causal language models."""

from __future__ import annotations

import pytest

from trainer.recipe.schema import CausalLM


def test_an_error_names_the_key_of_chats_only_where_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    task = CausalLM.model_construct(type="causal_lm")

    def messages() -> str:
        return " ".join(str(one) for one in task.contradictions())

    assert "set it, or `task.messages`, or `task.prompt` and `task.completion`" in messages()
    # Not `delitem`, which would put the key back at the end.
    monkeypatch.setattr(CausalLM, "__pydantic_fields__", {**CausalLM.model_fields})
    del CausalLM.model_fields["messages"]
    assert "set it, or `task.prompt` and `task.completion`" in messages()
