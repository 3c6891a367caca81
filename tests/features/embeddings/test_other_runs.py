"""Runs of sparse embeddings and of vectors for each token, to folders that sentence-transformers opens."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

import trainer
from tests.features.embeddings.test_runs import files_of, write
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.data.loader import EvalLoader
from trainer.features.embeddings.opener import open_folder
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.run import run
from trainer.training.run_data import prepare_data
from trainer.use.export.exporting import export

MODEL = {"config": {**TINY_BERT, "initializer_range": 0.2}}
METRICS = ["recall_at_1", "recall_at_5", "mrr", "ndcg"]
KINDS: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "sparse_embedding": ({"query_flops": 0.1}, SparseEncoder, SparseInformationRetrievalEvaluator, "dot"),
    "multi_vector_embedding": (
        {"dimensions": 8, "query_length": 12},
        MultiVectorEncoder,
        MultiVectorInformationRetrievalEvaluator,
        "maxsim",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_gives_the_same_vectors_and_metrics(tmp_path: Path, kind: str):
    keys, model_class, evaluator, similarity = KINDS[kind]
    task = {"type": kind, "metrics": METRICS, "query_prompt": "word1 ", "document_prompt": "word2 ", **keys}
    recipe = load_recipe(str(write(tmp_path, model=MODEL, task=task)))
    assert run(recipe, LaunchEnvironment("none")) == ExitCode.DONE
    folder = tmp_path / "run" / "model"
    export(tmp_path / "run", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)

    first = {"name_or_path": str(folder), "config": None, "tokenizer": None}
    with trainer.assemble(write(tmp_path / "again", model=first, task=task)) as parts:
        rows, loader = (
            parts.data.evaluated.rows,
            EvalLoader(parts.data.validation, 5, 0, 1, parts.data.preparation.batching),
        )
        found = [(batch.rows, parts.engine.answer(batch)["embeddings"]) for batch in loader]
        request = {"folder": str(folder), **parts.task.exported.inputs(rows)}
        ours = torch.cat([part for _, part in found])[torch.cat([at for at, _ in found]).argsort()]
        shown = parts.task.readable({"embeddings": ours}, parts.data.evaluated)
    theirs = torch.from_numpy(open_folder(request)({})["embeddings"])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    query = shown[0]["embedding_a"]
    assert len(query) == (12 if kind == "multi_vector_embedding" else (ours[0, 0] > 0).sum())

    pairs = [(row["a"], row["b"]) for row in rows]
    right = {query: {other for one, other in pairs if one == query} for query, _ in pairs}
    corpus = {text: text for _, text in pairs}
    texts = (dict(zip(right, right, strict=True)), corpus, right)
    options = {"mrr_at_k": [len(corpus)], "precision_recall_at_k": [1, 5], "ndcg_at_k": [10], "write_csv": False}
    values = evaluator(*texts, **options)(model_class(str(folder), device="cpu"))
    expected = [f"{similarity}_{name}" for name in ("recall@1", "recall@5", f"mrr@{len(corpus)}", "ndcg@10")]
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations[-1].metrics
    for name, of_theirs in zip(METRICS, expected, strict=True):
        assert metrics[name] == pytest.approx(values[of_theirs], abs=1e-6)


def test_folders_of_other_modules_are_refused(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_BERT))
    modules = [{"type": f"sentence_transformers.models.{name}", "path": ""} for name in ("Transformer", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    for kind in KINDS:
        model = {"name_or_path": str(folder), "config": None}
        recipe = load_recipe(str(write(tmp_path / kind, model=model, task={"type": kind}))).recipe
        with pytest.raises(
            UsageError, match=rf"with the modules Transformer, Pooling, but `task.type` {kind} computes"
        ):
            prepare_data(recipe)


@pytest.mark.parametrize(
    ("expansion", "skipped", "message"),
    [
        ({"attend": False}, True, r"`attend` false, .* computes true; set it to true in sentence_bert_config.json of"),
        ({"length": 16}, True, r"`length` 16, but this recipe computes 12; set `task.query_length` to 16"),
        ({}, False, r"`skiplist_words` \[\], but .*; set `task.skip_punctuation` to false"),
        (None, True, r"`query_expansion` false, but .* computes true; set `task.query_expansion` to false"),
    ],
)
def test_settings_of_a_folder_are_refused_with_the_fix(tmp_path: Path, expansion: Any, skipped: bool, message: str):
    folder, punctuation = tmp_path / "model", [*string.punctuation] if skipped else []
    names = {"Transformer": "", "Dense": "1_Dense", "MultiVectorMask": "2_MultiVectorMask", "Normalize": "3_Normalize"}
    usual = {"strategy": "fixed", "attend": True, "length": 12}
    files = {
        "config.json": TINY_BERT,
        "modules.json": [{"type": f"sentence_transformers.{name}", "path": path} for name, path in names.items()],
        "sentence_bert_config.json": {"query_expansion": None if expansion is None else {**usual, **expansion}},
        "2_MultiVectorMask/config.json": {"skiplist_words": punctuation, "keep_only_token_ids": None},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": torch.zeros(8, TINY_BERT["hidden_size"])}, folder / "1_Dense" / "model.safetensors")
    task = {"type": "multi_vector_embedding", "dimensions": 8, "query_length": 12}
    recipe = load_recipe(str(write(tmp_path / "run", model={"name_or_path": str(folder), "config": None}, task=task)))
    with pytest.raises(UsageError, match=message):
        prepare_data(recipe.recipe)
