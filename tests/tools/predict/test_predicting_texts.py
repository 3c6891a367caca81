"""`trainer predict` with models that generate texts, and with bad rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_DECODERS
from trainer.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} [MASK] {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
GENERATION = {"max_new_tokens": 5}
COLUMNS = {"text": {"text": "text"}, "prompt": {"prompt": "text", "completion": "label"}, "chat": {"messages": "chat"}}
PROMPTS = ["word1 word2 word3", "word4", "", " ".join(WORDS[:40]), "word9 word8 word7 word6", "word5 word5", "word2"]
Row = dict[str, Any]


@pytest.fixture(scope="module", params=COLUMNS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    task = {"type": "causal_lm", "text": None, **COLUMNS[request.param], "metrics": ["perplexity"]}
    recipe = write_tiny_run(
        folder,
        task={**task, "generation": GENERATION},
        model={"config": {**TINY_DECODERS["gpt2"], "initializer_range": 0.5}},
        training={"max_steps": 1},
        evaluation={"every": None},
        data={"group_by_length": False},
    )
    write_template(folder / "tokenizer")
    rows = random.Random(0)
    for split in ("train", "validation"):
        texts = [rows.choices(WORDS, k=4) for _ in range(8)]
        lines = [{"text": " ".join(words[:3]), "label": words[3], "chat": chat_of(*words[2:])} for words in texts]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["run", str(recipe)]) == 0
    return request.param, folder / "run" / "model"


def write_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def chat_of(*contents: str) -> list[Row]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def in_parts(chat: list[Row]) -> list[Row]:
    """Return a chat with names, and with contents as lists of parts."""
    return [{**message, "name": "a", "content": [{"type": "text", "text": message["content"]}]} for message in chat]


def predicted(model: Path, rows: list[Row], folder: Path, *options: str) -> list[Row]:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "out.jsonl"
    arguments = ["--input", str(folder / "in.jsonl"), "--output", str(output), "--overwrite", *options]
    assert main(["predict", str(model), *arguments]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def prompts(kind: str) -> list[Row]:
    if kind != "chat":
        return [{"text": text} for text in PROMPTS]
    return [{"chat": chat_of(*(PROMPTS[0] if at else "word3", "word1", text))} for at, text in enumerate(PROMPTS)]


def by_hand(kind: str, folder: Path, row: Row, **options: Any) -> str:
    """Return the text that transformers generates for a row alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    if kind == "chat":
        ids = tokenizer(
            tokenizer.apply_chat_template(row["chat"], tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )["input_ids"]
    else:
        ids = tokenizer(row["text"])["input_ids"][:-1]  # without [SEP]
    ids = torch.tensor([ids[-16:]])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("beams", [1, 3])
def test_each_row_has_the_text_that_it_has_alone(trained, tmp_path, capfd, beams):
    kind, model = trained
    rows = prompts(kind)
    given = [{"chat": in_parts(row["chat"])} if at % 2 and kind == "chat" else row for at, row in enumerate(rows)]
    found = predicted(model, given, tmp_path, f"task.generation.num_beams={beams}")
    options = {} if beams == 1 else {"num_beams": beams}  # the exported folder has all others
    expected = [by_hand(kind, model, row, **options) for row in rows]
    assert [row["generated"] for row in found] == expected
    assert len(set(expected)) > 3
    assert "truncated: 1 rows" in capfd.readouterr().err


def test_an_answer_ends_with_its_turn_in_predictions_and_in_the_folder(tmp_path, capfd):
    task = {"type": "causal_lm", "messages": "chat", "metrics": ["perplexity"]}
    assert_turn_ends(task, tmp_path, capfd)


def assert_turn_ends(task, tmp_path, capfd):
    """The turn ends with another token than a document of the tokenizer, and than texts of the configuration."""
    recipe = write_tiny_run(
        tmp_path,
        model={"config": TINY_DECODERS["llama"]},
        training={"max_steps": 25},
        optimizer={"learning_rate": 0.03},
        evaluation={"every": None},
    )
    content = json.loads(recipe.read_text())
    content["task"] = {**task, "generation": GENERATION}
    recipe.write_text(json.dumps(content))
    write_template(tmp_path / "tokenizer")
    chats = [chat_of(f"word{number}", "word50") for number in range(8)]
    worse = chat_of("", "word60 word61")[1:]
    rows = [{"chat": chat, "asked": chat[:1], "answer": chat[1:], "worse": worse} for chat in chats]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert main(["run", str(recipe)]) == 0
    assert "no end token" not in capfd.readouterr().out
    model = tmp_path / "run" / "model"
    found = predicted(model, rows, tmp_path)
    asked = [{"chat": row["asked"]} for row in rows]
    assert [row["generated"] for row in found] == [by_hand("chat", model, row) for row in asked] == ["word50"] * 8


def test_drawn_tokens_depend_on_the_row_only(trained, tmp_path):
    kind, model = trained
    rows, sampling = prompts(kind), ["task.generation.do_sample=true", "task.generation.temperature=2.0"]
    found = predicted(model, rows, tmp_path, *sampling)
    assert predicted(model, rows, tmp_path, *sampling, "--chunk-rows", "2", "--batch-size", "1") == found
    assert predicted(model, rows, tmp_path, *sampling, "training.seed=1") != found
    if kind == "text":
        many = [rows[0]] * 600
        options = [*sampling, "task.generation.max_new_tokens=1", "task.generation.top_k=20"]
        drawn = [row["generated"] for row in predicted(model, many, tmp_path, *options)]
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = torch.tensor([tokenizer(rows[0]["text"])["input_ids"][:-1]])
        logits = AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, -1] / 2.0
        best, expected = logits.topk(20), Counter[str]()
        for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
            expected[tokenizer.decode([token], skip_special_tokens=True)] += share  # some tokens have no text
        assert len(set(drawn)) > 1
        assert set(drawn) <= expected.keys()
        for text, share in expected.items():
            assert drawn.count(text) / 600 == pytest.approx(share, abs=0.08)


def test_a_bad_row_has_its_error_and_the_others_their_texts(trained, tmp_path, capfd):
    kind, model = trained
    column = "chat" if kind == "chat" else "text"
    rows = prompts(kind)
    expected = predicted(model, rows, tmp_path)
    bad = [*rows[:3], {column: None}, *rows[3:], {column: 7}]
    capfd.readouterr()
    output = tmp_path / "bad.jsonl"
    (tmp_path / "bad.in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad) + "\n \n{broken\n")
    arguments = ["predict", str(model), "--input", str(tmp_path / "bad.in.jsonl"), "--output", str(output)]
    arguments += ["--chunk-rows", "2"]
    assert main(arguments) == 2
    message = capfd.readouterr().err
    assert "row 4 of `" in message
    assert "2 rows are done, and the same command with --skip-bad-rows resumes" in " ".join(message.split())
    assert main([*arguments, "--skip-bad-rows"]) == 0
    notes = capfd.readouterr().err
    assert "resumes after 2 rows" in notes
    assert "bad: 3 rows of `" in notes
    assert "skipped: 2 empty lines of `" in notes
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert ["error" in row for row in found] == [False] * 3 + [True] + [False] * 4 + [True, True]
    assert [row for row in found if "error" not in row] == expected
    assert "row 4 of `" in found[3]["error"]
    assert "line 12 of `" in found[-1]["error"]
