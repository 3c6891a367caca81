"""A run of the task `embedding`, from its files to a folder that sentence-transformers opens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

import trainer
from tests.helpers.families import CONFIGS
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.data.loader import EvalLoader
from trainer.data.sources import Split
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.assembly import assemble
from trainer.training.process_group import open_mesh
from trainer.training.run import run
from trainer.training.run_data import prepare_data
from trainer.use.export.exporting import export

NUM_TOKENS = 16
PROMPTS = ("word1 ", "word2 word3 ")


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
                file.write(f"{json.dumps(row)}\n" * rows.choice((1, 1, 2)))  # some pairs repeat
    return recipe


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (TINY_BERT, {"learn_temperature": True}),
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
    if "score" in task:
        scored = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
        columns = ([row[key] for row in scored] for key in ("a", "b", "score"))
        values = EmbeddingSimilarityEvaluator(*columns, main_similarity="cosine", write_csv=False)(theirs)
        metrics = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations[-1].metrics
        for name in task["metrics"]:
            assert metrics[name] == pytest.approx(values[f"{name}_cosine"], abs=1e-6)


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


def write_triplets(folder: Path, batch_size: int, model: dict[str, Any]) -> tuple[Path, list[dict[str, str]]]:
    """Write a recipe with texts that repeat: hard negatives are right answers of other rows, and queries repeat."""
    texts = [f"{'word1 ' * (row % 5)}word{row}" for row in range(24)]
    triplets = [{"a": f"word{row + 30} {texts[row]}", "b": texts[row], "c": texts[row - 1]} for row in range(24)]
    triplets += [triplets[3], {**triplets[3], "b": texts[20]}, {**triplets[5], "b": texts[0], "c": texts[8]}]
    metrics = ["recall_at_1", "recall_at_5", "recall_at_10", "mrr"]
    training = {"global_batch_size": 12, "micro_batch_size": 2}
    task = {"texts": ["a", "b", "c"], "metrics": metrics, "query_prompt": PROMPTS[0], "document_prompt": PROMPTS[1]}
    evaluation = {"batch_size": batch_size}
    recipe = write(folder, task=task, model=model, training=training, evaluation=evaluation)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in triplets))
    return recipe, triplets


def evaluate(recipe: str) -> dict[str, float]:
    """Evaluate the model at its start, on this rank and the others."""
    resolved = load_recipe(recipe).recipe
    plan = plan_run(resolved, dist.get_world_size() if dist.is_initialized() else 1)
    return assemble(plan, open_mesh(plan.layout, torch.device("cpu")), prepare_data(resolved)).evaluate()


def test_retrieval_is_that_of_sentence_transformers(ranks, tmp_path):
    """Under any evaluation batch size and number of ranks; each distinct text is one candidate."""
    recipe, triplets = write_triplets(tmp_path, 32, {"config": {**TINY_BERT, "initializer_range": 0.3}})
    assert run(load_recipe(str(recipe), ["training.max_steps=1"]), LaunchEnvironment("none")) == ExitCode.DONE
    folder = str(tmp_path / "run" / "model")
    right = {row["a"]: {other["b"] for other in triplets if other["a"] == row["a"]} for row in triplets}
    corpus = {row[name]: row[name] for row in triplets for name in "bc"}
    texts, options = (dict(zip(right, right, strict=True)), corpus, right), {"mrr_at_k": [len(corpus)]}
    options |= {"precision_recall_at_k": [1, 5, 10], "write_csv": False}
    model = SentenceTransformer(folder, device="cpu")
    theirs = InformationRetrievalEvaluator(*texts, query_prompt=PROMPTS[0], corpus_prompt=PROMPTS[1], **options)(model)
    assert InformationRetrievalEvaluator(*texts, **options)(model) == theirs  # by the prompts of the folder
    expected = {f"recall_at_{k}": theirs[f"cosine_recall@{k}"] for k in (1, 5, 10)}
    expected |= {"mrr": theirs[f"cosine_mrr@{len(corpus)}"]}
    assert 0.05 < expected["recall_at_1"] < 0.9
    losses = []
    for size, world in ((24, 1), (5, 1), (5, 3)):
        again = str(write_triplets(tmp_path / f"{size} {world}", size, {"name_or_path": folder, "config": None})[0])
        for found in [evaluate(again)] if world == 1 else ranks(world).run(evaluate, again):
            losses.append(found.pop("loss"))
            assert found == pytest.approx(expected, abs=1e-12)
    assert losses == pytest.approx(losses[:1] * 5, abs=1e-6)
    assert losses[0] > 0


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    model = {"config": {"model_type": "t5", **CONFIGS["t5"]}}
    recipe = load_recipe(str(write(tmp_path, model=model))).recipe
    with pytest.raises(UsageError, match=r"embedding, which needs an encoder or a decoder, but .* type t5"):
        prepare_data(recipe)
