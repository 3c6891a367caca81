"""A run of the task `embedding`, from its files to a folder that sentence-transformers opens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sentence_transformers import SentenceTransformer

import trainer
from tests.helpers.families import CONFIGS
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.data.loader import EvalLoader
from trainer.data.sources import Split
from trainer.ranks.environment import LaunchEnvironment
from trainer.reading.loading import load_recipe
from trainer.training.exporting import export
from trainer.training.prepared import prepare_data
from trainer.training.run import run

NUM_TOKENS = 16


def write(folder: Path, **sections: Any) -> Path:
    """Write a recipe with pairs of texts that share words."""
    recipe = write_tiny_run(folder, **{"task": None, **sections})
    described = json.loads(recipe.read_text())
    described["task"] = {"type": "embedding", "texts": ["a", "b"], **(sections.get("task") or {})}
    recipe.write_text(json.dumps(described))
    rows = random.Random(0)
    for split, number in (("train", 40), ("validation", 17)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(number):
                words = rows.choices(WORDS, k=rows.randint(4, 20))
                row = {"a": " ".join(words), "b": " ".join(words[::2]), "score": rows.random()}
                file.write(json.dumps(row) + "\n")
    return recipe


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (TINY_BERT, {}),
        ({"model_type": "qwen3", **CONFIGS["qwen3"]}, {"pooling": "last", "normalize": False}),
        (TINY_BERT, {"pooling": "cls", "score": "score", "loss": "cosent", "metrics": ["spearman"]}),
    ],
    ids=["mean", "decoder", "cls"],
)
def test_sentence_transformers_gives_the_same_embeddings(tmp_path, model, task):
    recipe = load_recipe(str(write(tmp_path, model={"config": {**model, "initializer_range": 0.2}}, task=task)))
    assert run(recipe, LaunchEnvironment("none")) == ExitCode.DONE
    folder = tmp_path / "run" / "model"
    export(tmp_path / "run", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == NUM_TOKENS
    assert [type(module).__name__ for module in theirs][2:] == ["Normalize"] * task.get("normalize", True)
    first = {"name_or_path": str(folder), "config": None, "tokenizer": None}
    with trainer.assemble(write(tmp_path / "again", model=first, task=task)) as parts:
        split = parts.data.validation
        loader = EvalLoader(split, 5, 0, 1, parts.data.preparation.batching)
        found = [(batch.rows, parts.engine.answer(batch)["embeddings"]) for batch in loader]
        texts = [[row[name] for name in "ab"] for row in parts.data.evaluated.rows]
    ours = torch.cat([part for _, part in found])[torch.cat([rows for rows, _ in found]).argsort()]
    assert any(len(text.split()) > NUM_TOKENS for pair in texts for text in pair)
    expected = theirs.encode([text for pair in texts for text in pair], convert_to_tensor=True)
    torch.testing.assert_close(ours.flatten(0, 1), expected, atol=1e-5, rtol=1e-5)


def test_texts_of_one_column_get_their_embeddings(tmp_path):
    with trainer.assemble(write(tmp_path)) as parts:
        preparation, rows = parts.data.preparation, datasets.Dataset.from_dict({"a": ["word1 word2", "word3", "word1"]})
        task = parts.task.without_labels()
        encoded = preparation.encode(Split(rows, "`texts.csv`"), task, tmp_path / "cache")
        answers = [parts.engine.answer(batch) for batch in EvalLoader(encoded, 3, 0, 1, preparation.batching)]
        order = encoded.lengths.argsort(kind="stable")
        embeddings = torch.empty(3, 1, TINY_BERT["hidden_size"])
        embeddings[torch.from_numpy(order)] = answers[0]["embeddings"]
        found = task.readable({"embeddings": embeddings}, None)
    assert [len(row["embedding"]) for row in found] == [TINY_BERT["hidden_size"]] * 3
    assert sum(value**2 for value in found[0]["embedding"]) == pytest.approx(1, abs=1e-5)
    assert found[0]["embedding"] != pytest.approx(found[2]["embedding"], abs=1e-3)


def test_an_evaluation_depends_on_no_batch_size(tmp_path):
    found = []
    for size in (3, 17):
        recipe = write(tmp_path / str(size), evaluation={"batch_size": size})
        with trainer.assemble(recipe) as parts:
            found.append(parts.evaluate())
    assert set(found[0]) == {"loss", "recall_at_1", "mrr"}
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[0]["loss"] > 0


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    model = {"config": {"model_type": "t5", **CONFIGS["t5"]}}
    recipe = load_recipe(str(write(tmp_path, model=model))).recipe
    with pytest.raises(UsageError, match=r"embedding, which needs an encoder or a decoder, but .* type t5"):
        prepare_data(recipe)
