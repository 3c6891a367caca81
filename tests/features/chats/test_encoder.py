"""Chats in rows of causal language models, and their templates."""

from __future__ import annotations

import copy
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import datasets
import pyarrow
import pytest

from tests.tasks.test_causal_lm import WHERE, byte_tokenizer, encode, rows_of, task_of
from trainer.base.errors import DataError, UsageError
from trainer.data import tokenised_split
from trainer.data.formats.base import Files, TextOptions
from trainer.data.readers import read_files
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.features.chats import templates as chat_templates
from trainer.features.chats.encoder import TEMPLATE
from trainer.parallel.microbatch import IGNORED_LABEL

TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
PLAIN_TEMPLATE = TURNS + "{% if add_generation_prompt %}[assistant] {% endif %}"
MARKED_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "open the file"},
    {"role": "assistant", "content": "the file is open"},
    {"role": "user", "content": "read"},
    {"role": "assistant", "content": "a name"},
]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_only_the_turns_of_the_assistant_are_trained(chatty, template):
    chatty.chat_template = template
    encoded = encode(task_of(messages="messages"), rows_of(messages=[CHAT]), chatty)
    (ids,), (labels,) = encoded["input_ids"], encoded["labels"]
    assert ids == chatty(chatty.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"][:-1]
    trained = [label for label in labels if label != IGNORED_LABEL]
    assert chatty.decode(trained) == "the file is open a name"
    assert all(label in (IGNORED_LABEL, token) for label, token in zip(labels, ids[1:], strict=False))


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_turns_with_a_weight_of_0_are_read_only(chatty, template, train_on):
    chatty.chat_template = template
    for light, trained in ((2, "a name"), (4, "the file is open")):
        chat = [{**message, "weight": int(place != light)} for place, message in enumerate(CHAT)]
        encoded = encode(task_of(messages="messages", train_on=train_on), rows_of(messages=[chat]), chatty)
        (labels,) = encoded["labels"]
        assert chatty.decode([label for label in labels if label != IGNORED_LABEL]) == trained


def test_prompts_and_completions_of_messages_are_chats(chatty):
    rows = rows_of(prompt=[CHAT[:2], CHAT[:2]], completion=[CHAT[2:3], CHAT[2:]])
    task = task_of(prompt="prompt", completion="completion")
    encoded = encode(task, rows, chatty)
    for place, (whole, trained) in enumerate([(CHAT[:3], "the file is open"), (CHAT, "the file is open a name")]):
        text = chatty.apply_chat_template(whole, tokenize=False)
        assert encoded["input_ids"][place] == chatty(text, add_special_tokens=False)["input_ids"][:-1]
        labels = [label for label in encoded["labels"][place] if label != IGNORED_LABEL]
        assert chatty.decode(labels) == trained
    prompts = encode(task.without_labels(), rows_of(prompt=[CHAT[:2]]), chatty)
    text = chatty.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompts["input_ids"] == [chatty(text, add_special_tokens=False)["input_ids"]]


def test_messages_of_the_developer_need_a_template_that_writes_them(chatty):
    chat = [{"role": "developer", "content": "be brief"}, *CHAT[1:3]]
    task = task_of(messages="messages")
    (ids,) = encode(task, rows_of(messages=[chat]), chatty)["input_ids"]
    assert "developer" in chatty.decode(ids)
    chatty.chat_template = PLAIN_TEMPLATE.replace("messages %}", "messages if m.role != 'developer' %}")
    with pytest.raises(UsageError, match=r"message 1, is of the developer, which the chat template .* does not write"):
        encode(task, rows_of(messages=[chat]), chatty)


THINKING = [*CHAT[:2], {"role": "assistant", "content": "<think>why</think>the file is open"}, *CHAT[3:]]
FORGETFUL_TEMPLATE = (  # as Qwen3's, which writes the reasoning of the last turn only
    "{% for m in messages %}[{{ m.role }}] {{ m.content if loop.last else m.content.split('</think>')[-1] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
PREFILLED_TEMPLATE = (  # as DeepSeek-R1's, which begins replies with a reasoning that its chats lack
    "{% for m in messages %}[{{ m.role }}] {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "train_on", "expected"),
    [
        (FORGETFUL_TEMPLATE, "last", [(5, "a name")]),
        (FORGETFUL_TEMPLATE, "each", [(3, "<think>why</think>the file is open"), (5, "a name")]),
        (MARKED_TEMPLATE, "each", [(3, "<think>why</think>the file is open"), (5, "a name")]),
        (PREFILLED_TEMPLATE, "each", [(3, "the file is open"), (5, "a name")]),
        (PREFILLED_TEMPLATE, "all", [(5, "the file is open a name")]),
    ],
)
def test_turns_are_trained_as_the_template_writes_them_last(chatty, template, train_on, expected):
    chatty.chat_template = template
    chat = CHAT if template == PREFILLED_TEMPLATE else THINKING
    encoded = encode(task_of(messages="messages", train_on=train_on), rows_of(messages=[chat]), chatty)
    assert len(encoded["input_ids"]) == len(expected)
    for ids, labels, (number, content) in zip(encoded["input_ids"], encoded["labels"], expected, strict=True):
        text = chatty.apply_chat_template(chat[:number], tokenize=False)
        assert ids == chatty(text, add_special_tokens=False)["input_ids"][:-1]
        trained = [label for label in labels if label != IGNORED_LABEL]
        assert trained == chatty(content, add_special_tokens=False)["input_ids"]


MARKED_PARTS = (  # as Phi 3's and Gemma 4's in TRL, which mark the reasoning, the content and the end of a turn
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "{% generation %}<{{ m.thinking }}>{% endgeneration %}{% endif %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{% generation %}name{% endgeneration %}{% endif %}"
)
LEAVES_OUT = {
    "reasoning": (THINKING, PREFILLED_TEMPLATE, "each", "message 3, has 'why' in `content`"),
    "earlier reasoning": (
        THINKING,
        MARKED_TEMPLATE.replace(
            "m.content }}\n{% end", "m.content if loop.last else m.content.split('>')[-1] }}\n{% end"
        ),
        "all",
        r"message 3, has 'why' in `content`, .* does not write there; set `task.train_on` to each, add it",
    ),
    "key": (
        [*CHAT[:2], {**CHAT[2], "thinking": "why"}, CHAT[3], {**CHAT[4], "thinking": "name"}],
        MARKED_PARTS,
        "all",
        "message 3, has 'why' in `thinking`.*; set `task.train_on` to each",
    ),
    "role": (
        CHAT,
        PLAIN_TEMPLATE.replace("messages %}", "messages if m.role != 'system' %}"),
        "last",
        "message 1, has",
    ),
    "parts": (
        [{**one, "content": [{"type": "text", "text": text} for text in (one["content"], "many")]} for one in CHAT],
        PLAIN_TEMPLATE.replace("m.content", "m.content if m.content is string else m.content[0].text"),
        "last",
        "message 1, has 'many' in `content`",
    ),
    "text of another message": (
        [CHAT[0], {"role": "user", "content": "open"}, {"role": "assistant", "content": "open"}, *CHAT[1:]],
        PLAIN_TEMPLATE.replace("messages %}", "messages if loop.index0 != 1 %}").replace(
            "loop.index0 != 1", "m != messages[1]"
        ),
        "last",
        "message 2, has 'open' in `content`",
    ),
}


@pytest.mark.parametrize(("chat", "template", "train_on", "problem"), LEAVES_OUT.values(), ids=LEAVES_OUT)
def test_a_text_that_the_template_leaves_out_is_refused(chatty, chat, template, train_on, problem):
    chatty.chat_template = template
    with pytest.raises(DataError, match=problem):
        encode(task_of(messages="messages", train_on=train_on), rows_of(messages=[chat]), chatty)


@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_a_turn_has_all_its_marked_parts(chatty, train_on):
    chatty.chat_template = MARKED_PARTS
    last = {**CHAT[4], "thinking": "why"}
    first, later = "the file is open", "< why > a name name"
    each = [f"{first} name", later]
    answers = {"all": [f"{first} {later}"], "last": [later], "each": each}[train_on]
    task = task_of(messages="messages", train_on=train_on)
    encoded = encode(task, rows_of(messages=[[*CHAT[:4], last]]), chatty)
    assert trained_texts(chatty, encoded) == answers
    messages = [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3], last]
    encoded = encode(task, rows_of(messages=[messages]), chatty)
    assert trained_texts(chatty, encoded) == [later]
    answer = task_of(prompt="prompt", completion="completion")
    encoded = encode(answer, rows_of(prompt=[CHAT[:4]], completion=[[last]]), chatty)
    assert trained_texts(chatty, encoded) == [later]


def trained_texts(tokenizer, encoded):
    return [tokenizer.decode([label for label in row if label != IGNORED_LABEL]) for row in encoded["labels"]]


PROMPTED_LAST = PLAIN_TEMPLATE.replace("_prompt %}", "_prompt and messages[-1].content != 'read' %}")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}[system] be brief\n{% endif %}"
HEADED_TEMPLATE = (  # as Qwen 3's: the header is that of a prompt, and a reasoning follows
    DEFAULT_SYSTEM + "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<{{ m.reasoning_content }}>"
    "{% elif m.role == 'assistant' and loop.last %}<>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "opening", "first", "later"),
    [
        (PLAIN_TEMPLATE, {}, "open", "a name"),
        (PREFILLED_TEMPLATE, {}, "open", "a name"),
        (TURNS, {}, "open", "[ assistant ] a name"),  # no prompt of a generation shows the header
        (MARKED_TEMPLATE, {}, "open", "a name"),
        (PROMPTED_LAST, {}, "open", "a name"),
        (HEADED_TEMPLATE, {"reasoning_content": "file"}, "< file > open", "< > a name"),
    ],
)
@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_of_a_chat_that_the_assistant_begins_only_the_turns_are_trained(
    chatty, template, opening, first, later, train_on
):
    chatty.chat_template = DEFAULT_SYSTEM + template
    chat = [{"role": "assistant", "content": "open", **opening}, *CHAT[3:]]
    expected = {"all": [f"{first} {later}"], "last": [later], "each": [first, later]}[train_on]
    for rows, trained in (([chat], expected), ([chat[:1]], [first])):
        encoded = encode(task_of(messages="messages", train_on=train_on), rows_of(messages=rows), chatty)
        assert trained_texts(chatty, encoded) == trained


BLANK_TEMPLATE = (  # ends the prefix of an answer with a blank
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
MARKED_BLANK_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("answers", [("no", "no "), ("\u65e5\u672c ", " no"), ("", "n\n no"), ("\u00e9", "  no")])
def test_trained_tokens_equal_the_mask_of_transformers(trim_offsets, answers):
    tokenizer = byte_tokenizer(trim_offsets)
    chat = [
        message
        for answer in answers
        for message in ({"role": "user", "content": "no?"}, {"role": "assistant", "content": answer})
    ]
    # With trimmed spans, the mask of transformers lacks turns that begin with a blank.
    reference = byte_tokenizer(trim_offsets=False)
    expected = reference.apply_chat_template(
        chat, chat_template=MARKED_BLANK_TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (BLANK_TEMPLATE, MARKED_BLANK_TEMPLATE):
        tokenizer.chat_template = template
        encoded = encode(task_of(messages="messages"), rows_of(messages=[chat]), tokenizer, 200)
        (ids,), (labels,) = encoded["input_ids"], encoded["labels"]
        assert ids == expected["input_ids"][:-1]
        assert [int(label != IGNORED_LABEL) for label in labels] == expected["assistant_masks"][1:]


@pytest.mark.parametrize("train_on", ["all", "last", "each"])
@pytest.mark.parametrize(
    ("template", "notes"),
    [
        (BLANK_TEMPLATE, [r"so the assistant's turns are found by comparing texts of chats"]),
        (MARKED_BLANK_TEMPLATE, []),
        (PLAIN_TEMPLATE, [r"has no {% generation %} marks"]),
        (TURNS, [r"has no {% generation %} marks", r"writes no '[assistant]' for `add_generation_prompt`"]),
        ("{{ raise_exception('no') }}", []),
        (
            MARKED_BLANK_TEMPLATE.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}\n{{ eos_token }}"),
            [r"the token '</s>' behind an answer is not trained"],
        ),
        (
            MARKED_BLANK_TEMPLATE.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"),
            [r"the first token of an answer is not trained"],
        ),
    ],
)
def test_untrained_ends_of_answers_are_noted(train_on, template, notes):
    tokenizer = byte_tokenizer(False)
    tokenizer.chat_template = template
    found = task_of(messages="messages", train_on=train_on).tokenizer_notes(tokenizer)
    assert len(found) == len(notes)
    assert all(note in text for note, text in zip(notes, found, strict=True))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS + PLAIN_TEMPLATE, MARKED_TEMPLATE + ENDLESS])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_endless_template_is_refused(chatty, tmp_path, monkeypatch, template, processes):
    monkeypatch.setattr(chat_templates, "_SECONDS", 0.05)
    monkeypatch.setattr(tokenised_split, "_ROWS_AT_ONCE", 1)
    chatty.chat_template = template
    split = Split(rows_of(messages=[CHAT] * 3), WHERE)
    with pytest.raises(UsageError, match=r"template .* within 0.05 seconds, but .* row 1 of .*; fix a copy"):
        encode_split(split, task_of(messages="messages"), chatty, 100, tmp_path, processes)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    chatty.chat_template = PLAIN_TEMPLATE
    assert len(encode_split(split, task_of(messages="messages"), chatty, 100, tmp_path, processes)) == 3


def test_a_chat_is_rendered_in_any_thread(chatty):
    with ThreadPoolExecutor(1) as pool:
        rows = rows_of(messages=[CHAT])
        assert pool.submit(encode, task_of(messages="messages"), rows, chatty).result()["labels"]


def test_a_generated_text_of_a_chat_ends_with_the_turn(chatty):
    task = task_of(messages="messages").without_labels()
    assert task.end_tokens(chatty) == (chatty.sep_token_id,)
    chatty.chat_template = TURNS.replace("\n", "[MASK]\n")
    assert task.end_tokens(chatty) == (chatty.sep_token_id, chatty.mask_token_id)
    chatty.add_tokens(["<end>"])  # no special one
    chatty.chat_template = TURNS.replace("\n", " <end>\n")
    assert task.end_tokens(chatty) == (chatty.sep_token_id, len(chatty) - 1)
    of_calls = (
        "[{{ m.role }}] {% for call in m.tool_calls %}<end>{{ call.function.arguments | tojson }}[PAD] <end>[MASK]"
    )
    chatty.chat_template = (
        f"{{% for m in messages %}}{of_calls}{{% else %}}{{{{ m.content }}}}{{% endfor %}}{{% endfor %}}"
    )
    assert task.end_tokens(chatty) == (chatty.sep_token_id, chatty.mask_token_id)
    chatty.chat_template = "{{ raise_exception('other chats only') }}"
    assert task.end_tokens(chatty) == (chatty.sep_token_id,)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"messages": [CHAT[:2]]}, r"row 1 .* is a chat without a turn of the assistant"),
        ({"messages": [[{"role": "bot", "content": "a"}]]}, r"message 1, must have a role of .*, but has 'bot'"),
        ({"messages": [[CHAT[1], {"role": "user", "content": None}]]}, r"row 1 .*, message 2, has no content"),
        ({"messages": [[{"role": "assistant", "content": 4}]]}, r"message 1, .* a text .* but has 4; write"),
        ({"messages": [[{"role": "user", "content": [{"type": "image"}]}]]}, r"has one of 'image'; leave the part"),
        ({"messages": [[{**CHAT[2], "weight": 0}]]}, r"without a turn of the assistant with a weight of 1, so nothing"),
        ({"messages": [[{**CHAT[2], "weight": 0.5}]]}, r"message 1, must have a weight of 0 or 1, but has 0.5"),
        ({"prompt": [CHAT[:2]], "completion": ["a"]}, r"must all be texts or all be messages"),
        (
            {"prompt": [CHAT[:1]], "completion": [CHAT[1:2]]},
            r"an answer that ends with a turn of the assistant",
        ),
        ({"messages": ["a"]}, r"`task.messages` must name a column of lists of .* holds string"),
        ({"messages": [[], []]}, r"column `messages` of .* holds empty lists only; fill them, or name another column"),
        ({"prompt": [[]], "completion": [[]]}, r"column `prompt` of .* holds empty lists only; fill them, or name"),
    ],
)
def test_bad_rows_are_refused(chatty, columns, problem):
    keys = {name: name for name in columns} | ({"completion": "completion"} if "prompt" in columns else {})
    with pytest.raises(DataError, match=problem):
        encode(task_of(**keys), rows_of(**columns), chatty, max_length=20)


TOOLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.name is defined %} {{ m.name }}:{% endif %} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}\n{% endfor %}"
)
ASKED, ANSWERED = {"role": "user", "content": "read"}, {"role": "assistant", "content": "42"}
PARTS = [{"type": "text", "text": "a file "}, {"type": "text", "text": "is read"}]


def call_of(**arguments):
    call = {"type": "function", "function": {"name": "open", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CHATS = {
    "names": (TOOLS_TEMPLATE, [[{**ASKED, "name": "directory"}, ANSWERED], [ASKED, ANSWERED]]),
    "tools": (TOOLS_TEMPLATE, [[ASKED, call_of(name="file")], [ASKED, call_of(directory="many"), ANSWERED]]),
    "nulls": (TOOLS_TEMPLATE, [[ASKED, call_of(name="file", directory=None)]]),
    "parts": (PARTS_TEMPLATE, [[{"role": "user", "content": PARTS}, {"role": "assistant", "content": '{"a": 1}'}]]),
    "joined": (PLAIN_TEMPLATE, [[{"role": "user", "content": PARTS}, ANSWERED]]),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_have_the_text_that_the_tokenizer_writes_for_their_json(chatty, tmp_path, name):
    chatty.chat_template, chats = CHATS[name]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    rows, _ = read_files("json", Files([path], TextOptions(), "data.train"))
    encoded = encode(task_of(messages="messages"), rows, chatty, max_length=200)
    joined = [{**ASKED, "content": "a file is read"}, ANSWERED]
    for ids, chat in zip(encoded["input_ids"], [joined] if name == "joined" else chats, strict=True):
        text = chatty.apply_chat_template(chat, tokenize=False)
        assert ids == chatty(text, add_special_tokens=False)["input_ids"][:-1]


def test_nulls_of_structs_are_absent_keys(chatty):
    template, chats = CHATS["tools"]
    chatty.chat_template = template
    call = chats[0][1]["tool_calls"][0]["function"]
    filled = [copy.deepcopy(chats[0])]
    filled[0][1]["tool_calls"][0]["function"]["arguments"] = call["arguments"] | {"directory": None}
    both = [*filled, [ASKED, call_of(name="file", directory="many")]]
    rows = datasets.Dataset(pyarrow.table({"messages": both}))
    assert type(rows.features["messages"].feature) is dict
    encoded = encode(task_of(messages="messages"), rows, chatty, max_length=200)
    text = chatty.apply_chat_template(chats[0], tokenize=False)
    assert encoded["input_ids"][0] == chatty(text, add_special_tokens=False)["input_ids"][:-1]


def test_a_template_without_tool_calls_is_refused(chatty):
    task, rows = task_of(messages="messages"), rows_of(messages=[[ASKED, call_of(name="file")]], tools=["open"])
    with pytest.raises(DataError, match=r"row 1 .*, message 2, has tool calls, which the chat template .* not write"):
        encode(task, rows, chatty)
    known = ("system", "images", "chat_template_kwargs", "enable_thinking", "train", "mask_history", "documents")
    for column in (*known, "id", "roles_to_train"):
        rows = rows.add_column(column, ["be brief"])
    notes = task.conversion_notes(rows.features)
    assert "column `system` is not read; name it in `system` of `data.map.columns`" in notes[0]
    assert [note.split("`")[1] for note in notes[1:-1]] == ["tools", *known[1:]]
    assert notes[-1] == "columns that are not read: `id`, `roles_to_train`"
    texts = rows_of(prompt=["open"], completion=["file"], system=["be brief"])
    notes = task_of(prompt="prompt", completion="completion").conversion_notes(texts.features)
    assert notes == ["column `system` is not read; write it before the prompt by a template in `data.map.columns`"]


@pytest.mark.parametrize("as_text", [True, False, "schema"])
def test_tools_are_given_to_the_template(chatty, as_text):
    chatty.chat_template = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + PLAIN_TEMPLATE
    tools = [{"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}]
    columns = {
        "messages": [[ASKED, ANSWERED]] * 3,
        "tools": [json.dumps(tools), "[]", None] if as_text is True else [tools, [], None],
    }
    if as_text == "schema":
        function = tools[0]["function"]
        columns["tools"][0] = [{**tools[0], "function": {**function, "parameters": json.dumps(function["parameters"])}}]
    task = task_of(messages="messages", tools="tools")
    encoded = encode(task, rows_of(**columns), chatty, max_length=200)
    for ids, own in zip(encoded["input_ids"], [tools, None, None], strict=True):
        text = chatty.apply_chat_template([ASKED, ANSWERED], tools=own, tokenize=False)
        assert ids == chatty(text, add_special_tokens=False)["input_ids"][:-1]
    prompts = encode(task.without_labels(), rows_of(**columns), chatty, max_length=200)["input_ids"]
    assert "function" in chatty.decode(prompts[0])
    assert "function" not in chatty.decode(prompts[1])
    chatty.chat_template = PLAIN_TEMPLATE
    with pytest.raises(DataError, match=r"`tools`, row 1 .* has tools, which the chat template .* does not write"):
        encode(task, rows_of(**columns), chatty, max_length=200)
    columns["tools"] = [json.dumps(tools), "[]", "[7]"]
    chatty.chat_template = TOOLS_TEMPLATE + "{{ tools }}"
    for one in (task, task.without_labels()):
        with pytest.raises(DataError, match=r"column `tools`, row 3 of .* must be a list of JSON schemas"):
            encode(one, rows_of(**columns), chatty, max_length=200)


def test_names_of_speakers_that_the_template_leaves_out_are_noted(chatty):
    named = [{**ASKED, "name": "Ann"}, {**ANSWERED, "name": "Bob"}, {**ASKED, "name": None}]
    rows = rows_of(messages=[[ASKED, ANSWERED, ASKED], named], prompt=["a", "b"])
    columns = ["messages", "prompt"]
    for template, notes in (
        (PLAIN_TEMPLATE, "of the user and the assistant with a `name`"),
        (PLAIN_TEMPLATE + "{{ messages[0].name }}", "of the assistant with a `name`"),
        (TOOLS_TEMPLATE, None),
    ):
        chatty.chat_template = template
        found = TEMPLATE.column_notes(columns, rows, chatty)
        assert [notes in note for note in found] == [True] * (notes is not None)
    assert not TEMPLATE.column_notes(columns, rows_of(messages=[[ASKED]], prompt=["a"]), chatty)


def test_later_messages_with_other_keys_than_the_first_are_read(tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    chats = [[ASKED, ANSWERED]] * 3 + [[ASKED, call_of(name="file")]]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **keys: load(*given, **keys, chunksize=100))
    rows, _ = read_files("json", Files([path], TextOptions(), "data.train"))
    assert rows["messages"][:] == chats


def test_a_template_that_drops_earlier_turns_is_refused(chatty):
    chatty.chat_template = "{% for m in messages[-2:] %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    with pytest.raises(UsageError, match=r"changes earlier messages .*row 1 .*add \{% generation %\} marks"):
        encode(task_of(messages="messages"), rows_of(messages=[CHAT]), chatty)


def test_tokenizers_without_a_template_or_an_end_token_are_refused(tokenizer):
    with pytest.raises(UsageError, match="has no chat template"):
        encode(task_of(messages="messages"), rows_of(messages=[CHAT]), tokenizer)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.sep_token = None
    with pytest.raises(UsageError, match=r'has no end token, .* add "eos_token"'):
        encode(task_of(text="text"), rows_of(text=["a"]), tokenizer)
