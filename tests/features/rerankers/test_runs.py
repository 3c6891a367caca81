"""A run of the task `reranker`, from its files to a folder that sentence-transformers opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.cli import main
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.run import run
from trainer.use.export.exporting import export


def write(folder: Path, task: dict[str, Any] | None = None, **sections: Any) -> Path:
    """Write a recipe with lists of documents, some of them longer than the maximum of 16 tokens."""
    model = {"config": {**TINY_BERT, "initializer_range": 0.2}}
    recipe = write_tiny_run(folder, **{"task": None, "model": model, **sections})
    described = json.loads(recipe.read_text())
    keys = {"type": "reranker", "label": "label", "loss": "list_net", "metrics": ["ndcg_at_10", "mrr_at_10", "map"]}
    described["task"] = {**keys, **(task or {})}
    described["training"]["max_steps"] = 4
    recipe.write_text(json.dumps(described))
    for split, number in (("train", 20), ("validation", 9)):
        rows = [
            {
                "query": f"word{row % 7}",
                "documents": [f"word{row + place} " * (1 + 5 * place) for place in range(2 + row % 3)],
                "label": [float(place == row % 2) for place in range(2 + row % 3)],
            }
            for row in range(number)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("activation", [None, "identity"])
def test_sentence_transformers_gives_the_same_scores_and_metrics(tmp_path, capfd, activation):
    recipe = write(tmp_path, {"activation": activation})
    assert run(load_recipe(str(recipe)), LaunchEnvironment("none")) == ExitCode.DONE
    folder = tmp_path / "run" / "model"
    export(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "config_sentence_transformers.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    theirs = CrossEncoder(str(folder), device="cpu")
    assert type(theirs.activation_fn) is (torch.nn.Identity if activation else torch.nn.Sigmoid)
    output = tmp_path / "scores.jsonl"
    command = ["predict", str(tmp_path / "run"), "--input", str(tmp_path / "validation.jsonl"), "-o", str(output)]
    assert main(command) == ExitCode.DONE, capfd.readouterr().err
    for row in rows_of(output):
        expected = theirs.predict([(row["query"], text) for text in row["documents"]])
        assert row["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
    samples: dict[str, dict[str, Any]] = {}
    for row in rows_of(tmp_path / "validation.jsonl"):
        sample = samples.setdefault(row["query"], {"query": row["query"], "positive": [], "negative": []})
        for text, label in zip(row["documents"], row["label"], strict=True):
            sample["positive" if label else "negative"].append(text)
    expected = CrossEncoderRerankingEvaluator(list(samples.values()), write_csv=False)(theirs)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations[-1].metrics
    names = {"ndcg_at_10": "ndcg@10", "mrr_at_10": "mrr@10", "map": "map"}
    assert {name: found[name] for name in names} == pytest.approx({name: expected[of] for name, of in names.items()})


def test_the_activation_of_a_folder_is_kept(tmp_path):
    recipe = write(tmp_path)
    assert run(load_recipe(str(recipe)), LaunchEnvironment("none")) == ExitCode.DONE
    theirs = CrossEncoder(str(tmp_path / "run" / "model"), device="cpu", activation_fn=torch.nn.Identity())
    theirs.save_pretrained(str(tmp_path / "theirs"))
    model = {"name_or_path": str(tmp_path / "theirs"), "config": None, "tokenizer": None}
    again = write(tmp_path / "again", model=model)
    assert run(load_recipe(str(again)), LaunchEnvironment("none")) == ExitCode.DONE
    kept = CrossEncoder(str(tmp_path / "again" / "run" / "model"), device="cpu")
    assert isinstance(kept.activation_fn, torch.nn.Identity)
    other = write(tmp_path / "other", {"activation": "sigmoid"}, model=model)
    with pytest.raises(UsageError, match=r"with the activation identity, but `task.activation` is \"sigmoid\""):
        run(load_recipe(str(other)), LaunchEnvironment("none"))
