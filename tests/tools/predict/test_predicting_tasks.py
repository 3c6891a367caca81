"""`trainer evaluate` and `trainer predict` with a tiny model of each task."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT, TINY_T5
from trainer.base.errors import DataError
from trainer.cli import main
from trainer.features.masked_lm.masked_lm import MaskedLMTask
from trainer.tools.predict.chunked_rows import read_chunks

Row = dict[str, Any]
MODEL = {"config": {**TINY_BERT, "initializer_range": 0.2}}
LONG, SHORT, EMPTY, UNKNOWN = " ".join(WORDS[:40]), "word1 word2 word3", "", "? ? ?"


def text_row(words: list[str], number: int) -> Row:
    return {"text": " ".join(words), "label": "ab"[number % 2], "score": number / 7}


def word_row(words: list[str], number: int) -> Row:
    tags = ["B-X" if word < "word3" else "I-X" if word < "word6" else "O" for word in words]
    return {"words": words, "tags": tags, "plain": ["ab"[len(word) % 2] for word in words]}


def span_row(words: list[str], number: int) -> Row:
    return {"text": " ".join(words), "spans": [{"start": 0, "end": len(words[0]), "label": "X"}]}


def question_row(words: list[str], number: int) -> Row:
    answers = {"text": [words[1]], "answer_start": [len(words[0]) + 1]}
    return {"question": words[0], "context": " ".join(words), "answers": answers}


def choice_row(words: list[str], number: int) -> Row:
    return {"context": " ".join(words), "choices": words[: 2 + number % 3], "label": number % 2}


def pair_row(words: list[str], number: int) -> Row:
    return {"a": " ".join(words), "b": " ".join(words[::-1]), "source": " ".join(words), "target": words[-1]}


def texts(column: str, *more: str, **columns: Any) -> list[Row]:
    return [{column: text, **columns} for text in (LONG, SHORT, *more, SHORT)]


def is_probability(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1 + 1e-6


def check_classes(row: Row, found: Row) -> None:
    assert set(found) == {"prediction", "probabilities"}
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert found["probabilities"][found["prediction"]] == max(found["probabilities"].values())


def check_entities(row: Row, found: Row) -> None:
    assert set(found) == {"entities"}
    for entity in found["entities"]:
        part = row[next(iter(row))][entity["start"] : entity["end"]]
        assert entity["text"] == (part if isinstance(part, str) else " ".join(part))
        assert entity["label"] == "X"
        assert is_probability(entity["score"])


def check_tags(row: Row, found: Row) -> None:
    assert set(found) == {"tags", "scores"}
    assert len(found["tags"]) == len(found["scores"]) == len(row["words"])
    assert {tag for tag, word in zip(found["tags"], row["words"], strict=True) if word} <= {"a", "b"}


def check_answer(row: Row, found: Row) -> None:
    assert {"answer", "start", "end", "score", "n_best"} <= set(found)
    for answer in [found, *found["n_best"]]:
        assert answer["answer"] == (row["context"][answer["start"] : answer["end"]] if answer["answer"] else "")
        assert is_probability(answer["score"])


def check_choice(row: Row, found: Row) -> None:
    assert set(found) == {"prediction", "index", "probabilities"}
    assert found["prediction"] == row["choices"][found["index"]]
    assert sum(found["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert found["probabilities"][found["index"]] == max(found["probabilities"])


def check_tokens(row: Row, found: Row) -> None:
    assert len(found["tokens"]) == row["text"].split().count("[MASK]")
    assert "[MASK]" not in found["filled"]


def check_number(row: Row, found: Row) -> None:
    assert set(found) == {"prediction"}
    assert math.isfinite(found["prediction"])


def check_generated(row: Row, found: Row) -> None:
    assert set(found) == {"generated"}
    assert len(found["generated"].split()) <= 4


def check_embedding(row: Row, found: Row) -> None:
    assert math.fsum(value**2 for value in found["embedding"]) == pytest.approx(1, abs=1e-5)


@dataclass(frozen=True)
class Case:
    """A task, its training rows, rows to predict, and a check of each output row without the columns of the input."""

    task: Mapping[str, Any]
    row: Callable[[list[str], int], Row]
    inputs: list[Row]
    check: Callable[[Row, Row], None]
    sections: Mapping[str, Any] = field(default_factory=dict)


QUESTION = {"question": "word1"}
CHOICES = [["word1", "word2"], ["word1", "word2", "word3"], ["?", "word4"], ["word5"] * 4]
LORA = {"model": {**MODEL, "adapter": {"type": "lora", "rank": 2, "targets": ["query"]}}}
CASES = {
    "sequence_classification": Case({}, text_row, texts("text", EMPTY, UNKNOWN, label=3), check_classes),
    "lora": Case({}, text_row, texts("text", EMPTY), check_classes, LORA),
    "sequence_regression": Case(
        {"label": "score"},
        text_row,
        texts("text", EMPTY, UNKNOWN),
        check_number,
    ),
    "words": Case(
        {"type": "token_classification", "words": "words", "tags": "tags"},
        word_row,
        [{"words": text.split(" ")} for text in (LONG, SHORT, UNKNOWN)] + [{"words": words} for words in ([""], [])],
        check_entities,
    ),
    "plain tags": Case(
        {"type": "token_classification", "words": "words", "tags": "plain", "metrics": ["accuracy"]},
        word_row,
        [{"words": text.split(" ")} for text in (LONG, SHORT, UNKNOWN)] + [{"words": words} for words in ([""], [])],
        check_tags,
    ),
    "spans": Case(
        {"type": "token_classification", "text": "text", "spans": "spans"},
        span_row,
        texts("text", EMPTY, UNKNOWN),
        check_entities,
    ),
    "question_answering": Case(
        {}, question_row, texts("context", UNKNOWN, **QUESTION), check_answer,
    ),
    "unanswerable": Case(
        {"type": "question_answering", "unanswerable": True}, question_row, texts("context", **QUESTION),
        check_answer,
    ),
    "multiple_choice": Case(
        {}, choice_row,
        [{**row, "choices": CHOICES[i]} for i, row in enumerate(texts("context", EMPTY, UNKNOWN)[:4])], check_choice,
    ),
    "masked_lm": Case({"metrics": ["perplexity"]}, text_row, texts("text", EMPTY, "word1 [MASK] word2"), check_tokens),
    "embedding": Case({"texts": ["a", "b"]}, pair_row, texts("a", UNKNOWN), check_embedding),
    "seq2seq_lm": Case(
        {"metrics": ["rougeL"], "generation": {"max_new_tokens": 4}},
        pair_row,
        texts("source", UNKNOWN),
        check_generated,
        {"model": {"config": {**TINY_T5}}},
    ),
}  # fmt: skip
TRUNCATES = (
    "sequence_classification", "lora", "sequence_regression", "multiple_choice", "masked_lm", "embedding", "seq2seq_lm",
)  # fmt: skip
STEPS = {"training": {"max_steps": 2}, "evaluation": {"every": "2 steps"}, "data": {"group_by_length": False}}


def write(folder: Path, name: str, case: Case) -> Path:
    recipe = write_tiny_run(folder, **{"model": MODEL, **STEPS, **case.sections})
    described = json.loads(recipe.read_text())
    kept = {"text": "text"} if name in ("sequence_regression", "masked_lm") else {}
    default = described["task"] if name in ("sequence_classification", "lora") else {"type": name, **kept}
    recipe.write_text(json.dumps({**described, "task": {**default, **case.task}}))
    rows = random.Random(0)
    for split, number in (("train", 16), ("validation", 11)):
        found = [case.row(rows.choices(WORDS, k=rows.randint(4, 24)), index) for index in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    if name == "seq2seq_lm":
        tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return recipe


def evaluated(run: Path, capfd: pytest.CaptureFixture[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of `trainer evaluate` and those of the training's last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    capfd.readouterr()
    assert main(["evaluate", str(run / "model"), "--json"]) == 0
    return json.loads(capfd.readouterr().out)["metrics"], [line["eval"] for line in lines if "eval" in line][-1]


def predicted(run: Path, rows: list[Row], output: Path, *options: str) -> list[Row]:
    """Return the output of `trainer predict`; columns of the input must be there unchanged."""
    file = output.with_name("in.jsonl")
    file.write_text("".join(json.dumps({"id": number, **row}) + "\n" for number, row in enumerate(rows)))
    assert main(["predict", str(run), "--input", str(file), "--output", str(output), *options]) == 0
    if output.suffix == ".parquet":
        found = pyarrow.parquet.read_table(output).to_pylist()
    else:
        found = [json.loads(line) for line in output.read_text().splitlines()]
    for number, (before, after) in enumerate(zip(rows, found, strict=True)):
        assert after.pop("id") == number
        for name, value in before.items():
            assert after.pop(name) == value
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_task(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Chunks of one row give the rows of one chunk, for the odd rows too: they are long, empty or unknown."""
    case, run = CASES[name], tmp_path / "run"
    assert main(["run", str(write(tmp_path, name, case))]) == 0
    found, last = evaluated(run, capfd)
    assert found == pytest.approx(last, abs=1e-6)
    rows = predicted(run, case.inputs, tmp_path / "out.jsonl")
    for row, answer in zip(case.inputs, rows, strict=True):
        case.check(row, answer)
    capfd.readouterr()
    single = predicted(run, case.inputs, tmp_path / "out.parquet", "--chunk-rows", "1")
    for row, answer in zip(rows, single, strict=True):
        assert shown(answer) == shown(row)
    notes = capfd.readouterr().err
    assert ("truncated: 1 rows of `" in notes) == (name in TRUNCATES)


def test_masked_tokens_alone_have_logits_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, run = CASES["masked_lm"], tmp_path / "run"
    assert main(["run", str(write(tmp_path, "masked_lm", case))]) == 0
    rows = [{"text": f"word{number} [MASK] word2 word3 word4 [MASK] word5"} for number in range(24)]
    sizes: list[int] = []

    def recorded(task: MaskedLMTask, logits: Tensor, labels: Tensor) -> Tensor:
        sizes.append(len(logits))
        return token_scores(task, logits, labels)

    token_scores = MaskedLMTask.token_scores
    monkeypatch.setattr(MaskedLMTask, "token_scores", recorded)
    monkeypatch.setattr("trainer.features.chunked_head.head._EVALUATED_ELEMENTS", 5 * TINY_BERT["vocab_size"])
    found = predicted(run, rows, tmp_path / "out.jsonl", "evaluation.batch_size=24")
    assert (max(sizes), sum(sizes)) == (5, 64)  # of 216 tokens; 48 are masked, and shapes are rounded
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    inputs = tokenizer([row["text"] for row in rows], return_tensors="pt")
    with torch.no_grad():
        best = AutoModelForMaskedLM.from_pretrained(run / "model").eval()(**inputs).logits.argmax(-1)
    masked = inputs["input_ids"] == tokenizer.mask_token_id
    expected = [tokenizer.convert_ids_to_tokens(row[places].tolist()) for row, places in zip(best, masked, strict=True)]
    assert [answer["tokens"] for answer in found] == expected


def shown(value: Any) -> Any:
    """Return a value with rounded numbers, which depend on the batch in their last digits."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-5)
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    return [shown(part) for part in value] if isinstance(value, list) else value


def test_equal_names_of_csv_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="must have a name of its own for each column, but names `text` more"):
        list(read_chunks(tmp_path / "in.csv", "csv", 10, 0, "`in.csv`"))
