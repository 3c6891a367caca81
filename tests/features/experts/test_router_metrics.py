"""The load of experts in the metrics of a run and in `trainer why`; runs that stop, resume and export their biases."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.features.experts.router_cases import MODELS
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe
from tests.observe.samples import run_info, step_record
from trainer.cli import main
from trainer.features.experts.balance import Load
from trainer.observe.metrics_file import METRICS_FILE_NAME, MetricsFile
from trainer.tools.run_metrics import read_metrics


def test_numbers_of_a_load_by_hand() -> None:
    load = Load(
        # 8 tokens with 2 experts each
        counts=torch.tensor([[8.0, 4.0, 4.0, 0.0], [4.0, 4.0, 4.0, 4.0]], dtype=torch.float64),
        probabilities=torch.tensor([8.0, 4.0, 2.0, 2.0], dtype=torch.float64),
        squares=torch.tensor([32.0]),
        entropies=torch.tensor([8 * log(4) / 2, 8 * log(4)]),
        num_tokens=8,
    )
    assert load.numbers(2) == pytest.approx(
        {
            "expert_load_max": 2.0,
            "expert_load_min": 0.0,
            "experts_unused": 0.25,
            "router_entropy": 0.75,
            "router_entropy_min": 0.5,
            # 4 * (12 * 8 + 8 * 4 + 8 * 2 + 4 * 2) / 16^2
            "router_loss": 4 * 152 / 256,
            "router_z_loss": 2.0,
            "expert_rank_load_max": 1.5,
        }
    )
    assert "expert_rank_load_max" not in load.numbers(1)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [dict(step.more) for step in read_metrics(folder / METRICS_FILE_NAME).steps]


_TEXTS = {"type": "causal_lm", "text": "text", "metrics": ["perplexity"]}


def written(folder: Path, kind: str, **keys: Any) -> str:
    config = {"model_type": kind, **MODELS[kind], "vocab_size": 120, "bos_token_id": 1, "eos_token_id": 2}
    sections: dict[str, Any] = {"evaluation": {"every": None, "verify_export": 0}, "training": {"max_steps": 4}}
    recipe = write_tiny_run(folder, model={"config": config}, task={**_TEXTS, **keys}, **sections)
    tree = json.loads(recipe.read_text())
    tree["task"] = {**_TEXTS, **keys}
    recipe.write_text(json.dumps(tree))
    return str(recipe)


@pytest.mark.slow
def test_biases_are_resumed_and_exported(tmp_path: Path) -> None:
    keys = {"router_bias_rate": 0.05, "router_loss": 0.01}
    whole, cut = (written(tmp_path / name, "deepseek_v3", **keys) for name in ("whole", "cut"))
    assert main(["run", whole]) == 0
    assert main(["run", cut, "training.stop_at_step=2"]) == 75
    assert main(["run", cut, "training.micro_batch_size=2", "activation_checkpointing=full"]) == 0
    expected, found = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("whole", "cut"))
    biases = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert expected.keys() == found.keys()
    for name in biases:
        assert expected[name].any()
        torch.testing.assert_close(found[name], expected[name])
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "cut" / "run"), str(exported)]) == 0
    again = load_file(exported / "model.safetensors")
    assert all(torch.equal(again[name], found[name]) for name in biases)
    for own, other in zip(metrics_of(tmp_path / "cut" / "run"), metrics_of(tmp_path / "whole" / "run"), strict=True):
        assert own == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_a_run_without_keys_has_the_load_of_its_experts(tmp_path: Path) -> None:
    assert main(["run", written(tmp_path, "mixtral")]) == 0
    found = metrics_of(tmp_path / "run")
    assert len(found) == 4
    assert all(1 <= numbers["expert_load_max"] <= 3 for numbers in found)  # 6 experts, 2 for each token
    assert all(0 < numbers["router_entropy_min"] <= numbers["router_entropy"] <= 1 for numbers in found)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"experts_unused": 0.75, "expert_load_max": 3.0}, "the routers collapse: in a layer, 75%"),
        ({"experts_unused": 0.0, "expert_rank_load_max": 1.75}, "the experts of one rank get 1.8 times"),
        ({"experts_unused": 0.1, "expert_load_max": 1.5, "router_entropy_min": 0.5}, None),
    ],
)  # fmt: skip
def test_why_names_collapse(
    numbers: dict[str, float], text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = json.loads(tiny_recipe(evaluation={"every": None}).model_dump_json())
    file = MetricsFile()
    file.start(run_info(tmp_path, recipe=recipe, world_size=1))
    for step in (1, 2):
        file.step(step_record(step, seconds={"step": 2.0}, more=numbers))
    file.close()
    assert main(["why", str(tmp_path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note for note in notes if "expert" in note] == [note for note in notes if text and note.startswith(text)]
    assert text is None or any(note.startswith(text) for note in notes)
