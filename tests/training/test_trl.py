"""Chats and texts against the trainer of TRL: the same rows, losses and weights on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.helpers.trl import ROWS, differences, ours, save_decoder, settings, theirs

TOOLS = [{"type": "function", "function": {"name": "w1", "parameters": {"w2": "w3"}}}]
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}w0 {{ m.role }} "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments.x }} {% endfor %} </s>{% endgeneration %} "
    "{% else %}{{ m.content }} </s> {% endif %}{% endfor %}{% if add_generation_prompt %}w0 assistant {% endif %}"
)


def chat_of(index: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": f"w{index}", "arguments": {"x": f"w{index + 9}"}}}
    return [
        {"role": "system", "content": "w30 w31"},
        {"role": "user", "content": f"w{index} w{index + 1}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"w{index + 2}"},
        {"role": "assistant", "content": " ".join(f"w{index + place}" for place in range(index % 3 + 2))},
    ]


def as_sharegpt(chat: list[dict[str, Any]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return [
        {"from": "function_call", "value": json.dumps(message["tool_calls"][0]["function"])}
        if "tool_calls" in message
        else {"from": names.get(message["role"], message["role"]), "value": message["content"]}
        for message in chat
    ]


def shapes() -> dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]]:
    """Return for each shape our task, our map, the rows of the shape, and those that TRL reads."""
    chats = [chat_of(index) for index in range(ROWS)]
    asked = [[f"w{row} w2", f"w{row + 3}" * (row % 2), f"w{row + 4} w{row}"] for row in range(ROWS)]
    alpaca = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in asked]
    joined = [
        {"prompt": f"{one}\n{two}" if two else one, "completion": three} for one, two, three in asked
    ]  # as people write it by hand
    parts = [{"prompt": chat[:4], "completion": chat[4:]} for chat in chats]
    ids = [{"input_ids": [row + place + 3 for place in range(5 + row)]} for row in range(ROWS)]
    labelled = [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in ids]
    plain = [{"messages": chat} for chat in chats]
    sharegpt = [{"conversations": as_sharegpt(chat)} for chat in chats]
    messages, pair = {"messages": "messages"}, {"prompt": "prompt", "completion": "completion"}
    template = {"columns": {"prompt": "{instruction}[\n{input}]", "completion": " {output}"}}
    with_tools = [{"messages": chat, "tools": TOOLS} for chat in chats]
    return {
        "sharegpt": (messages, {}, sharegpt, plain),
        "tools": ({**messages, "tools": "tools"}, {}, with_tools, with_tools),
        "parts": (pair, {}, parts, parts),
        "template": (pair, template, alpaca, [{**row, "completion": f" {row['completion']}"} for row in joined]),
        "ids": ({"text": "input_ids"}, {}, ids, ids),
        "labels": ({"text": "input_ids"}, {}, labelled, labelled),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", shapes())
def test_rows_of_all_shapes_are_trained_as_trl_trains_them(tmp_path: Path, name: str):
    pytest.importorskip("trl")
    from trl import SFTConfig, SFTTrainer

    tokenizer = save_decoder(tmp_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    task, section, rows, expected_rows = shapes()[name]
    for file, written in (("ours.jsonl", rows), ("theirs.jsonl", expected_rows)):
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in written))
    keys = {"assistant_only_loss": "messages" in task, "completion_only_loss": "prompt" in task}
    length = 9 if name == "labels" else 48  # 9 cuts rows
    config = SFTConfig(**settings(tmp_path, 0.1, **keys, max_length=length))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = theirs(tmp_path, SFTTrainer, config, model, "theirs.jsonl")
    *found, _ = ours(tmp_path, {"type": "causal_lm", **task}, "ours.jsonl", 0.1, tmp_path, section, length)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 2e-6  # up to 1.2e-6 on some processors, which is a few roundings of a loss in fp32
    assert weights <= 1e-6
