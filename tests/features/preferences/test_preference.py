from __future__ import annotations

import copy
from itertools import chain

import datasets
import pytest
import torch

from trainer.base.errors import DataError, UsageError
from trainer.features.preferences.section import Preference
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.registry import build_task

WHERE = "`rows.jsonl`"
TURNS = "{% if tools %}[tools] {{ tools[0].name }}\n{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n"
TEMPLATE = TURNS + "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


def task_of(**keys):
    return build_task(Preference(type="preference", **keys))


def turn(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(task, rows, tokenizer, max_length=100, batch=2):
    rows = datasets.Dataset.from_list(rows)
    task = task.resolve(rows, WHERE).for_split(rows, 0)
    spans = [range(first, min(first + batch, len(rows))) for first in range(0, len(rows), batch)]
    parts = [task.encode(rows.select(span), tokenizer, max_length, WHERE, span.start) for span in spans]
    return {name: list(chain.from_iterable(part[name] for part in parts)) for name in parts[0]}


def trained(features, tokenizer, row, text):
    labels = features["labels"][row][text]
    return tokenizer.decode([label for label in labels if label != IGNORED_LABEL], skip_special_tokens=True)


PAIR = {"prompt": "a file", "chosen": " is read", "rejected": " is open"}
CHAT = [turn("user", "open a file"), turn("assistant", "is it open"), turn("user", "the name")]


def test_both_answers_have_the_tokens_of_the_prompt(tokenizer):
    features = encode(task_of(), [PAIR], tokenizer)
    assert [trained(features, tokenizer, 0, text) for text in (0, 1)] == ["is read", "is open"]
    (first, second) = features["input_ids"][0]
    assert first[:3] == second[:3]
    of_orpo = encode(task_of(loss={"type": "orpo"}), [PAIR], tokenizer)
    assert of_orpo["input_ids"] == features["input_ids"]
    marked = [label for label, own in zip(of_orpo["labels"][0][0], of_orpo["answer"][0][0], strict=True) if own]
    assert marked == [label for label in features["labels"][0][0] if label != IGNORED_LABEL]
    assert IGNORED_LABEL not in of_orpo["labels"][0][0]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_kto_pairs_each_prompt_with_the_answer_before(tokenizer, batch):
    words = ["read", "open", "file", "name", "many"]
    rows = [{"prompt": "the", "completion": f" {word}", "label": word != "file"} for word in words]
    features = encode(task_of(loss={"type": "kto"}), rows, tokenizer, batch=batch)
    found = [[trained(features, tokenizer, row, text) for text in (0, 1)] for row in range(len(words))]
    assert found == [[word, words[index - 1]] for index, word in enumerate(words)]
    assert features["desirable"] == [1, 1, 0, 1, 1]


def test_kto_names_an_empty_answer_of_the_row_before(tokenizer):
    rows = [{"prompt": "the", "completion": text, "label": True} for text in (" read", None, " open")]
    split = datasets.Dataset.from_list(rows)
    task = task_of(loss={"type": "kto"}).resolve(split, WHERE).for_split(split, 0)
    with pytest.raises(DataError, match=r"`completion`, row 2 .*is null"):
        task.encode(split.select([2]), tokenizer, 100, WHERE, 2)


def test_chats_with_a_prompt_and_chats_that_start_alike_are_the_same(chatty):
    chosen, rejected = turn("assistant", "is read"), turn("assistant", "is open")
    apart = [{"prompt": CHAT, "chosen": [chosen], "rejected": [rejected], "tools": '[{"name": "directory"}]'}]
    whole = [{"chosen": [*CHAT, chosen], "rejected": [*CHAT, rejected], "tools": '[{"name": "directory"}]'}]
    one = encode(task_of(tools="tools"), apart, chatty)
    assert one == encode(task_of(prompt=None, tools="tools"), whole, chatty)
    assert [trained(one, chatty, 0, text) for text in (0, 1)] == ["is read", "is open"]
    assert "directory" in chatty.decode(one["input_ids"][0][0])
    assert one != encode(task_of(), apart, chatty)


@pytest.mark.parametrize("rejected", [" is open", " is read by many", ""])
def test_whole_texts_are_divided_where_their_tokens_differ(tokenizer, rejected):
    """The form of Anthropic's HH: one text may go on where the other ends."""
    start = "open a file. the name is read"
    whole = {"chosen": start, "rejected": start.removesuffix(" is read") + rejected}
    features = encode(task_of(prompt=None), [whole], tokenizer)
    one, other = (
        [*ids, labels[-1]] for ids, labels in zip(features["input_ids"][0], features["labels"][0], strict=True)
    )
    assert [one, other] == [[*tokenizer(text)["input_ids"]] for text in (whole["chosen"], whole["rejected"])]
    number = next(at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    for ids, labels in zip((one, other), features["labels"][0], strict=True):
        assert labels == [IGNORED_LABEL] * (number - 1) + ids[number:]
    if rejected == " is open":
        apart = {"prompt": "open a file. the name is", "chosen": " read", "rejected": " open"}
        assert features == encode(task_of(), [apart], tokenizer)


def test_a_chat_with_a_label_ends_with_its_answer(chatty):
    chats = [[*CHAT, turn("assistant", word)] for word in ("read", "open", "many")]
    labels = ["desirable", "0", "True"]
    whole = [{"completion": chat, "label": label} for chat, label in zip(chats, labels, strict=True)]
    apart = [{"prompt": CHAT, "completion": chat[3:], "label": at != 1} for at, chat in enumerate(chats)]
    kto = {"type": "kto"}
    features = encode(task_of(prompt=None, loss=kto), whole, chatty, batch=2)
    assert features == encode(task_of(loss=kto), apart, chatty)
    assert features["desirable"] == [1, 0, 1]
    assert [trained(features, chatty, row, 0) for row in range(3)] == ["read", "open", "many"]


@pytest.mark.parametrize(
    ("keys", "row", "problem"),
    [
        ({}, {**PAIR, "rejected": " "}, "empty completion"),
        ({"prompt": None}, {"chosen": "a file", "rejected": "the file"}, "must start with the same text"),
        ({"prompt": None}, {"chosen": "a file", "rejected": "a file"}, "must continue in different ways"),
        ({}, {"chosen": "a file", "rejected": "a name"}, "set it to null if the answers are whole texts"),
        (
            {"prompt": None, "loss": {"type": "kto"}},
            {"completion": "a file", "label": True},
            "must hold whole chats, but it holds texts; name the column of the prompts",
        ),
        ({}, {**PAIR, "chosen": [turn("assistant", "is read")]}, "must all be texts or all be messages"),
        ({}, {"prompt": "a", "chosen": "b"}, "names the column `rejected`"),
        ({"tools": "prompt2"}, {**PAIR, "prompt2": "x"}, "applies to chats"),
        (
            {"loss": {"type": "kto"}},
            {"prompt": "a", "completion": " read", "label": 3},
            r"no, desirable or undesirable, but is 3; correct it, or set `data.map.columns` to ",
        ),
        (
            {"loss": {"type": "kto"}},
            {"prompt": "a", "completion": " read", "label": "thumbs up"},
            r'"label": {"column": "label", "values": {"thumbs up": true, "...": false}}}, with true for desirable',
        ),
        ({"prompt": None}, {"chosen": CHAT[:2], "rejected": CHAT[1:2]}, "must start with the same message"),
        ({"prompt": None}, {"chosen": CHAT[:2], "rejected": CHAT[:2]}, "must continue in different ways"),
        ({}, {"prompt": CHAT[:1], "chosen": CHAT[:2], "rejected": CHAT[:2]}, "begins with the messages of its prompt"),
        (
            {},
            {**PAIR, "chosen": " is" * 99 + " read", "rejected": " is" * 99 + " open"},
            "is the rejected answer within",
        ),
        ({}, {"prompt": CHAT, "chosen": CHAT[2:], "rejected": CHAT[2:]}, "ends with a turn of the assistant"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(chatty, keys, row, problem):
    with pytest.raises(DataError, match=problem):
        encode(task_of(**keys), [row], chatty)


def test_metrics_by_hand():
    """Rewards of the first pair are 0.1 * (2, -1), of the second 0.1 * (0, 1)."""
    scores = torch.zeros(2, 2, 5)
    scores[..., 0] = torch.tensor([[-3.0, -6.0], [-4.0, -4.0]])  # log-probabilities
    scores[..., 1] = torch.tensor([[-5.0, -5.0], [-4.0, -5.0]])  # of the reference
    scores[..., 2] = 1.0
    task = task_of()
    expected = {"reward_accuracy": 0.5, "reward_margin": 0.1, "chosen_logps": -3.5, "rejected_logps": -5.0}
    assert task.metrics({"scores": scores}) == pytest.approx(expected)
    kto = task_of(loss={"type": "kto"}, metrics=["reward_accuracy", "reward_margin", "kl"])
    scores[0, :, 4] = 1.0  # the first row is desirable; answers to other prompts have the mean log-ratio 0
    found = kto.metrics({"scores": scores})
    assert {name: found[name] for name in ("reward_accuracy", "reward_margin", "kl")} == pytest.approx(
        {"reward_accuracy": 0.5, "reward_margin": 0.2, "kl": 0.0}
    )
    sigmoid = torch.sigmoid(torch.tensor([0.2, 0.0]))
    assert found["loss"] == pytest.approx(float((1 - sigmoid).mean()))


def test_predictions_of_chats_with_tools_are_refused():
    with pytest.raises(UsageError, match="describes no tools"):
        task_of(tools="tools").without_labels()
