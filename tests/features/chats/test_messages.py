"""Messages in the forms that chat templates read: tool calls, contents, flags and further keys."""

from __future__ import annotations

import json

import pytest

from trainer.base.errors import DataError
from trainer.features.chats.messages import read_messages
from trainer.features.chats.templates import ChatTemplate

PLACE = "row 1"
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}|{% endfor %}"
CALLS = (
    "{{% for m in messages %}}[{{{{ m.role }}}}] {{{{ m.content }}}}{{% for call in m.tool_calls or [] %}}"
    "{{% set call = call.function %}}<{{{{ call.name }}}}: {}>{{% endfor %}}{{% endfor %}}"
)
OF_OBJECTS = {  # as the templates of Qwen 2.5, Llama 3.2, gpt-oss; Nemotron, GLM; Gemma 4, which raises
    "tojson": "{{ call.arguments | tojson }}",
    "items": "{% for key, value in call.arguments | items %}{{ key }}={{ value }}{% endfor %}",
    "either": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "raises": "{% if call.arguments is string %}{{ raise_exception('text') }}{% endif %}{{ call.arguments | tojson }}",
}
OF_TEXTS = {"text": "{{ '```' + call.arguments }}", "plain": "{{ call.arguments }}"}  # the first as DeepSeek V3
OBJECT = {"city": "Rome", "days": [1, None], "ü": True}
TEXT = json.dumps(OBJECT, ensure_ascii=False)


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate("name", text, ())


def asked(**message):
    return [{"role": "user", "content": "hi"}, {"role": "assistant", **message}]


def calling(arguments):
    return asked(tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": arguments}}])


def written(template, chat):
    return template.write(read_messages(chat, template, PLACE)[0], PLACE)


@pytest.mark.parametrize("name", [*OF_OBJECTS, *OF_TEXTS])
def test_arguments_have_the_form_that_the_template_writes(name):
    template = template_of(CALLS.format((OF_OBJECTS | OF_TEXTS)[name]))
    right = calling(OBJECT if name in OF_OBJECTS else TEXT)
    expected = template.write(right, PLACE)
    assert '\\"' not in expected
    whole = [{**message, "tool_calls": json.dumps(message["tool_calls"])} for message in right[1:]]
    for chat in (calling(OBJECT), calling(TEXT), [right[0], *whole]):
        assert written(template, chat) == expected
    no_arguments = template.write(calling({} if name in OF_OBJECTS else ""), PLACE)
    assert written(template, calling("")) == written(template, calling(None)) == no_arguments


@pytest.mark.parametrize("form", [OF_OBJECTS["tojson"], OF_TEXTS["text"]])
@pytest.mark.parametrize("arguments", ["{'city': 'Rome'}", "[1]", json.dumps(TEXT), "Rome", [1]])
def test_arguments_that_are_no_object_are_refused(arguments, form):
    with pytest.raises(DataError, match=r"row 1, message 2, must have a tool call with a JSON object as arguments"):
        read_messages(calling(arguments), template_of(CALLS.format(form)), PLACE)


@pytest.mark.parametrize("arguments", [OBJECT, TEXT])
@pytest.mark.parametrize(
    ("text", "content", "number", "problem"),
    [
        (TURNS, None, 1, "has tool calls, which"),
        (TURNS + "{# tool_calls #}", "", 1, "has tool calls, which"),
        (  # as DeepSeek R1's
            CALLS.format(OF_OBJECTS["either"]).replace("m.tool_calls or []", "m.tool_calls if m.content is undefined"),
            "",
            1,
            "has tool calls beside a content, which",
        ),
        (  # as gpt-oss's and Llama 3's
            CALLS.format(OF_OBJECTS["tojson"]).replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            None,
            2,
            "has several tool calls in a turn, which",
        ),
    ],
)
def test_tool_calls_that_the_template_leaves_out_are_refused(text, content, number, problem, arguments):
    chat = calling(arguments)
    chat[1] |= {"content": content, "tool_calls": chat[1]["tool_calls"] * number}
    with pytest.raises(DataError, match=f"row 1, message 2, {problem}"):
        read_messages(chat, template_of(text), PLACE)


def test_an_empty_list_of_calls_is_none():
    template = template_of(
        "{% for m in messages %}{% if 'tool_calls' in m %}call{% endif %}{{ m.content }}{% endfor %}"
    )
    assert written(template, asked(content="yes", tool_calls=[])) == "hiyes"


def test_a_call_with_its_arguments_under_another_name_is_refused():
    chat = asked(tool_calls=[{"function": {"name": "weather", "parameters": OBJECT}}])
    with pytest.raises(DataError, match="must have `arguments` in a tool call, but has `parameters`; rename it"):
        read_messages(chat, template_of(CALLS.format(OF_OBJECTS["either"])), PLACE)


def test_a_text_becomes_parts_for_a_template_that_writes_parts_alone():
    template = template_of(
        "{% for m in messages %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endfor %}"
    )
    assert written(template, asked(content="yes")) == "(hi)(yes)"


@pytest.mark.parametrize("flag", ["weight", "loss", "train", "training"])
@pytest.mark.parametrize("value", [False, 0])
def test_a_false_flag_of_another_tool_is_a_weight_of_0(flag, value):
    chat = [*asked(content="bad", **{flag: value}), *asked(content="good", **{flag: True})]
    messages, trained = read_messages(chat, template_of(TURNS), PLACE)
    assert trained == [True, False, True, True]
    assert not any(flag in message for message in messages)


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        (asked(content="a", train="false"), r"message 2, must have `train` true or false, but has 'false'"),
        (
            asked(content=[{"type": "text", "text": "a", "weight": 0}]),
            r"message 2, must have `weight` beside its content",
        ),
        (asked(content="a", loss=0.5), r"message 2, must have `loss` true or false, but has 0.5"),
        ([{"role": "user", "content": "a", "train": True}], r"message 1, has `train` true, but is of the user"),
        (asked(content="a", train_detail=[{"train": False}]), r"message 2, has `train_detail`, which is not read"),
        (asked(content="a", learn=False), r"message 2, has `learn`, .* leave it out by `drop` in `data.map.columns`"),
        (asked(content="a", reasoning_content="why"), r"message 2, has `reasoning_content`, which is not read"),
        (asked(content="a", thinking="why"), r"message 2, has `thinking`, which is not read"),
        (asked(content="a", function_call={"name": "f"}), r"message 2, has `function_call`, which is not read"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(chat, problem):
    with pytest.raises(DataError, match=f"row 1, {problem}"):
        read_messages(chat, template_of(TURNS), PLACE)


LAST_REASONING = (  # as Qwen 3 and gpt-oss: the reasoning of the last turn only
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content }}{% if m.end %}.{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            TURNS,
            {"name": "ann", "id": "1", "tool_call_id": "1", "reasoning_content": "", "weight": 1},
        ),
        (LAST_REASONING, {"reasoning_content": "why", "end": False}),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", {"anything": 1}),
    ],
)
def test_a_key_that_the_template_reads_is_kept(text, keys):
    messages, _ = read_messages(asked(content="a", **keys) * 2, template_of(text), PLACE)
    kept = {key: value for key, value in keys.items() if key != "weight"}
    assert messages[1] == messages[3] == {"role": "assistant", "content": "a", **kept}
