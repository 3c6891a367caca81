"""The shipped chain with a tiny model and rows of files, killed in each stage and resumed under other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainer
from tests.features.stages.test_chain import finished, losses
from tests.helpers import processes, warm

SHIPPED = Path(trainer.__file__).parent
FILES = SHIPPED.parent / "recipes" / "sample"
OF_STAGES = ["01-rows_128", "02-rows_1024", "03-rows_8192", "04-decay", "05-sentiment", "06-names", "07-answers"]
TINY_ENCODER = {
    "vocab_size": 3000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "local_attention": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "cls_token_id": 2,
    "sep_token_id": 3,
}  # fmt: skip


def write_shipped_chain(folder: Path) -> Path:
    """Write a recipe that extends the shipped chain, with a tiny model and rows of files in the columns of the hub."""
    texts = [{"sentence": row["text"], **row} for row in read_rows(FILES / "train.jsonl", 75)]
    names = read_rows(SHIPPED / "features" / "token_classification" / "recipes" / "train.jsonl", 61)
    questions = read_rows(SHIPPED / "features" / "question_answering" / "recipes" / "train.jsonl", 60)
    rows = {
        "texts": texts,
        "sentiment": [{**row, "label": len(row["text"]) % 2} for row in texts],
        "names": [{"tokens": row["words"], "ner_tags": row["tags"]} for row in names],
        "answers": [row for row in questions if row["answers"]["text"]][:33],
    }
    data = {}
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
        file = str(folder / f"{name}.jsonl")
        data[name] = {"source": "files", "train": file, "validation": file, "cache": "cache"}
    long = {"global_batch_size": 4, "micro_batch_size": 1}
    tuning = {"global_batch_size": 6, "micro_batch_size": 3}
    rate = {"learning_rate": 1e-3}  # so that a lost moment shows in the next loss
    recipe = {
        "extends": "modernbert_base_stages",
        "name": "tiny",
        "model": {"config": TINY_ENCODER, "tokenizer": str(FILES / "tokenizer")},
        "data": data["texts"],
        "training": {"global_batch_size": 8, "batch_size_warmup": {"start": 4, "increment": 2, "steps": 2}},
        "schedule": {"warmup": 2},
        "stages": {
            "*": {
                "precision": "fp32",
                "compile": False,  # context ranks refuse it
                "evaluation": {"every": "4 steps", "verify_export": 0},
                "checkpoint": {"every": "2 steps", "asynchronous": False},
                "logging": {"every": "1 step", "to": ["jsonl"]},
            },
            # Deaths at step 4 of stages with 4 steps and at step 6 of those with 6 strike in one stage of a run only.
            "rows_128": {"data": {"max_length": 24}, "training": {"max_steps": 4, "micro_batch_size": 4}},
            "rows_1024": {"data": {"max_length": 48}, "training": {"max_steps": 6, "micro_batch_size": 2}},
            "rows_8192": {"data": {**data["texts"], "max_length": 96}, "training": {**long, "max_steps": 4}},
            "decay": {
                "data": {**data["texts"], "max_length": 96},
                "training": {**long, "max_steps": 6},
                "schedule": {"decay": 6},
            },
            "sentiment": {"data": data["sentiment"], "optimizer": rate, "training": {**tuning, "max_steps": 4}},
            "names": {
                "data": {**data["names"], "max_length": 64},
                "optimizer": rate,
                "training": {**tuning, "max_steps": 6},
            },
            "answers": {
                "task": {"stride": 32},
                "data": {**data["answers"], "max_length": 128},
                "optimizer": rate,
                "training": {**tuning, "max_steps": 4},
            },
        },
    }
    file = folder / "recipe.json"
    file.write_text(json.dumps({**recipe, "checkpoint": {"folder": str(folder / "run")}}))
    return file


def read_rows(file: Path, number: int) -> list[dict]:
    with file.open() as lines:
        return [json.loads(line) for line, _ in zip(lines, range(number), strict=False)]


@pytest.mark.nightly
def test_killed_in_each_stage_it_resumes_under_other_layouts(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    reference = write_shipped_chain(tmp_path / "undisturbed")
    finished(reference, "--processes", "2")
    expected = losses(reference.parent / "run")
    assert [len(expected[name]) for name in OF_STAGES] == [4, 6, 4, 6, 4, 6, 4]
    recipe = write_shipped_chain(tmp_path)
    two = ("--processes", "2")
    layouts = [
        two,
        ("parallel.strategy=fsdp", *two),
        ("parallel.tensor=2", *two),
        (),
        ("stages.sentiment.parallel.strategy=zero1", *two),
        ("stages.sentiment.parallel.pipeline.stages=2", "stages.names.parallel.context=2", *two),
        ("parallel.strategy=hsdp", *two),
    ]
    for folder, layout in zip(OF_STAGES, layouts, strict=True):
        step = len(expected[folder])
        fault = warm.start(["die", "0", step, "run", recipe, *layout], faulty=True)
        ended = processes.finish(fault)
        assert ended.returncode not in (0, 2), ended.stderr
        assert (tmp_path / "run" / folder / "metrics.jsonl").exists(), ended.stderr
        assert not (tmp_path / "run" / folder / "model").exists()
    output = finished(recipe, "parallel.strategy=fsdp", "--processes", "2")
    assert "stage 7 of 7: answers" in output
    assert "stage 6 of 7" not in output
    for name, values in losses(tmp_path / "run").items():
        assert values == pytest.approx(expected[name], rel=2e-6), name
    assert (tmp_path / "run" / "model").resolve() == tmp_path / "run" / "07-answers" / "model"
    for folder, base in (("02-rows_1024", 1e4), ("03-rows_8192", 1.6e5), ("07-answers", 1.6e5)):
        written = json.loads((tmp_path / "run" / folder / "model" / "config.json").read_text())
        assert written["rope_parameters"]["full_attention"]["rope_theta"] == base, folder
