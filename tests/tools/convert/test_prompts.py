"""Ready-made prompts of axolotl: the texts that its 0.19 makes of these rows, written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.base.errors import RecipeError
from trainer.features.data_map.row_map import RowMap
from trainer.features.data_map.section import DataMap
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.draft import Outcome

Write = Callable[..., Path]
KEYS: dict[str, Any] = {"base_model": "m", "micro_batch_size": 2, "learning_rate": 1e-4, "output_dir": "runs/x"}
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
    " response that appropriately completes the request."
)
PLAIN = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
ASKED = {"instruction": "Add [1]", "input": "1 and {2}", "output": "3", "system": "Be kind."}
BARE = {**ASKED, "input": "", "system": ""}
CHAT = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
PAIR = {"question": "Q", "prompt": "P", "system": "S", "chosen": "yes", "rejected": "no"}


def of(write: Write, entry: dict[str, Any], **keys: Any) -> Conversion:
    return convert([write(KEYS | keys | {"datasets": [entry]}, "a.yaml")], None, 1)


def mapped(write: Write, type_: str, rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    """Return the columns of the task that a converted recipe makes of a file with these rows."""
    Path("a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = of(write, {"path": "a.jsonl", "type": type_}, **keys).recipe
    section = DataMap.model_validate(recipe["data"]["map"])
    columns = {key: value for key, value in recipe["task"].items() if key in (section.columns or {})}
    assert columns == {key: key for key in section.columns or {}}
    found = RowMap.of(section, list(columns), {name: [row[name] for row in rows] for name in rows[0]}, "a.jsonl")
    assert found is not None
    return found.of_rows(rows, 0, "a.jsonl")


@pytest.mark.parametrize(
    ("type_", "with_input", "without"),
    [
        (
            "alpaca",
            f"{WITH_INPUT}\n\n### Instruction:\nAdd [1]\n\n### Input:\n1 and {{2}}\n\n### Response:\n",
            f"{PLAIN}\n\n### Instruction:\nAdd [1]\n\n### Response:\n",
        ),
        (
            "alpaca:chat",
            f"SYSTEM: {WITH_INPUT}\nUSER: Add [1]\n1 and {{2}}\nASSISTANT:",
            f"SYSTEM: {PLAIN}\nUSER: Add [1]\nASSISTANT:",
        ),
        (
            "alpaca:chatml",
            f"<|im_start|>system\n{WITH_INPUT}<|im_end|>\n<|im_start|>user\nAdd [1]\n1 and {{2}}<|im_end|>\n"
            "<|im_start|>assistant\n",
            f"<|im_start|>system\n{PLAIN}<|im_end|>\n<|im_start|>user\nAdd [1]<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "alpaca:phi",
            f"<|system|>\n{WITH_INPUT}<|end|>\n<|user|>\nAdd [1]<|end|>1 and {{2}}<|assistant|>",
            f"<|system|>\n{PLAIN}<|end|>\n<|user|>\nAdd [1]<|end|>\n<|assistant|>\n",
        ),
        (
            "alpaca_instruct.load_no_prompt",
            "### Instruction:\nAdd [1]\n\n### Input:\n1 and {2}\n\n### Response:\n",
            "### Instruction:\nAdd [1]\n\n### Response:\n",
        ),
        (
            "alpaca_w_system.load_chat",
            "SYSTEM: Be kind.\nUSER: Add [1]\n1 and {2}\nASSISTANT:",
            "USER: Add [1]\nASSISTANT:",
        ),
        (
            "alpaca_chat.load_concise",
            "SYSTEM: Below is an instruction from a USER that describes a task, paired with an input that provides"
            " further context. The ASSISTANT writes a response that concisely and appropriately completes the request."
            "\n\n\nUSER: Add [1]\n1 and {2}\nASSISTANT:",
            "SYSTEM: Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that"
            " appropriately and concisely completes the request.\n\n\nUSER: Add [1]\nASSISTANT:",
        ),
    ],
)
def test_prompts_of_instructions(write: Write, type_: str, with_input: str, without: str):
    first, second = mapped(write, type_, [ASKED, BARE])
    assert (first["prompt"], second["prompt"]) == (with_input, without)
    assert first["completion"] == second["completion"] == "3"
    no_column = {key: value for key, value in BARE.items() if key != "input"}
    assert mapped(write, type_, [no_column])[0]["prompt"] == without


def test_prompts_with_other_columns(write: Write):
    (row,) = mapped(write, "jeopardy", [{"question": "q", "category": "c", "answer": "a"}])
    assert row["prompt"].endswith("### Instruction:\nq\n\n### Input:\nc\n\n### Response:\n")
    assert row["completion"] == "what is a"
    (row,) = mapped(write, "summarizetldr", [{"article": "long", "summary": "short"}])
    assert row["prompt"] == "USER: Summarize the following article as a TL;DR.\nlong\nASSISTANT:"
    orca = {"question": "q", "response": "r", "system_prompt": "s"}
    (row,) = mapped(write, "alpaca_w_system.load_open_orca", [orca])
    assert row == {"prompt": "### System:\ns\n### Human:\nq\n### Assistant:\n", "completion": "r"}


def llama(question: str, system: str = "") -> str:
    turns = [("system", system), ("user", question)][not system :]
    asked = "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>" for role, text in turns)
    return f"{asked}<|start_header_id|>assistant<|end_header_id|>\n\n"


def chatml(question: str, system: str = "") -> str:
    turns = [("system", system), ("user", question)][not system :]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("type_", "row", "prompt", "answers"),
    [
        ("chatml.intel", PAIR, chatml("Q", "S"), ("yes<|im_end|>", "no<|im_end|>")),
        ("llama3.intel", {**PAIR, "system": ""}, llama("Q"), ("yes<|eot_id|>", "no<|eot_id|>")),
        ("chatml.icr", {**PAIR, "input": "I"}, chatml("I", "S"), ("yes<|im_end|>", "no<|im_end|>")),
        ("llama3.prompt_pairs", PAIR, llama("P", "S"), ("yes<|eot_id|>", "no<|eot_id|>")),
        (
            "llama3.ultra",
            {"prompt": "P", "chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "B"}]},
            llama("P"),
            ("A<|eot_id|>", "B<|eot_id|>"),
        ),
        ("chatml.argilla_chat", {"chosen": CHAT, "rejected": CHAT}, chatml("U"), ("A<|im_end|>", "A<|im_end|>")),
        (
            "chatml",
            {"instruction": "I", "chosen_response": "yes", "rejected_response": "no"},
            chatml("I"),
            ("yes<|im_end|>", "no<|im_end|>"),
        ),
    ],
)
def test_prompts_of_pairs(write: Write, type_: str, row: dict[str, Any], prompt: str, answers: tuple[str, str]):
    (found,) = mapped(write, type_, [row], rl="dpo")
    assert found == {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def test_prompts_of_rated_answers(write: Write):
    row = {"instruction": "I", "completion": "yes", "label": True}
    (found,) = mapped(write, "llama3.argilla", [row], rl="kto")
    assert found == {"prompt": llama("I"), "completion": "yes<|eot_id|>", "label": True}


def test_rows_without_a_type_are_ready(write: Write):
    recipe = of(write, {"path": "a.jsonl", "type": None}, rl="dpo").recipe
    assert "map" not in recipe["data"]


@pytest.mark.parametrize(
    ("type_", "keys"),
    [
        ("alpaca:odd", {}),
        ("alpaca_chat:chat", {}),
        ("explainchoice", {}),
        ("chatml.intel", {}),
        ("chatml.intel", {"rl": "orpo"}),
        ("zephyr.nectar", {"rl": "dpo"}),
        ("chatml.argilla_chat", {"rl": "kto"}),
        ("chatml.intel", {"reward_model": True}),
    ],
)
def test_other_types_are_refused_by_name(write: Write, type_: str, keys: dict[str, Any]):
    with pytest.raises(RecipeError, match=rf"has the type {type_}, which decides"):
        of(write, {"path": "a.jsonl", "type": type_}, **keys)


def test_assumptions_on_rows_that_are_not_here_are_named(write: Write):
    found = of(write, {"path": "argilla/rows", "type": "chatml.ultra"}, rl="dpo")
    assert "system" not in found.recipe["data"]["map"]["columns"]["prompt"]
    (line,) = [line for line in found.lines if line.item.name == "datasets"]
    assert line.outcome is Outcome.DIFFERS
    assert "a column `system` is taken for missing" in line.text
    known = of(write, {"path": "Intel/orca_dpo_pairs", "type": "chatml.intel"}, rl="dpo")
    assert "{system}" in known.recipe["data"]["map"]["columns"]["prompt"]


# Several data sets of the hub


def test_sets_of_the_hub_become_files_with_the_command_that_writes_each(write: Write):
    sets = [
        {"path": "tatsu-lab/alpaca", "type": "alpaca"},
        {"path": "org/more", "name": "en", "split": "train[:5%]", "revision": "v1", "type": "alpaca"},
        {"path": "b.jsonl", "type": "alpaca"},
    ]
    found = convert([write(KEYS | {"datasets": sets, "val_set_size": 0.1}, "a.yaml")], None, 1)
    files = ["tatsu-lab--alpaca--train.parquet", "org--more--en--v1--train--5.parquet", "b.jsonl"]
    assert found.recipe["data"]["train"] == files
    assert found.recipe["data"]["source"] == "files"
    (line,) = [line for line in found.lines if line.item.name == "datasets"]
    assert line.outcome is Outcome.TODO
    load = 'load_dataset("org/more", name="en", revision="v1", split="train[:5%]")'
    assert f"python -c 'from datasets import load_dataset; {load}.to_parquet(\"{files[1]}\")'" in line.text


def test_another_set_to_validate_on_becomes_a_file(write: Write):
    one, two = ({"path": path, "type": "completion"} for path in ("org/a", "org/b"))
    recipe = of(write, one, test_datasets=[two]).recipe
    assert recipe["data"]["train"] == "org--a--train.parquet"
    assert recipe["data"]["validation"] == "org--b--train.parquet"


@pytest.mark.parametrize("path", ["./set", "rows.jsonl"])
def test_the_command_writes_the_rows_of_a_part(tmp_path: Path, write: Write, path: str):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"w{row}" for row in range(10)]})
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set/train.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    found = of(write, {"path": path, "split": "train[:30%]", "type": "completion"})
    (line,) = [line for line in found.lines if line.item.name == "datasets"]
    code = line.text.partition("python -c '")[2].partition("'")[0]
    exec(code)  # the command of the report
    written = datasets.Dataset.from_parquet(str(found.recipe["data"]["train"]), cache_dir=str(tmp_path / "cache"))
    assert written["text"][:] == ["w0", "w1", "w2"]
