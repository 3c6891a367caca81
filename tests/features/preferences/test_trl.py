"""Preferences and rewards against the trainers of TRL: the same rows, losses and weights on one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from tests.helpers.trl import ROWS, SIZES, WORDS, differences, ours, save_decoder, settings, theirs

RATES = {"ipo": 0.01, "orpo": 0.03, "simpo": 0.03}
"""Rates at which the training does not diverge, so that differences of rounding do not grow; else 0.3."""
LENGTHS = {"dpo": 9, "kto": 9}
"""`max_length` that cuts rows; else 48."""
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo", "beta": 0.3},
    "conservative": {"type": "dpo", "beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"type": "ipo", "beta": 0.4},
    "simpo": {"type": "simpo", "beta": 2.0, "gamma": 0.7},
    "orpo": {"type": "orpo", "beta": 0.2},
    "kto": {"type": "kto", "beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny decoder with its tokenizer, and rows of texts."""
    place = tmp_path_factory.mktemp("trl")
    tokenizer = save_decoder(place)
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def answer() -> str:
        return " " + text(1, 5)

    rows: list[dict[str, Any]] = [
        {"prompt": text(2, 6), "chosen": answer(), "rejected": answer(), "margin": draw.random()} for _ in range(ROWS)
    ]
    datasets.Dataset.from_list(rows).to_json(place / "pairs.jsonl")
    single = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0} for index, row in enumerate(rows)
    ]
    datasets.Dataset.from_list(single).to_json(place / "single.jsonl")
    config = transformers.LlamaConfig(**SIZES, num_labels=1, problem_type="regression")
    transformers.LlamaForSequenceClassification(config).save_pretrained(place / "reward")
    tokenizer.save_pretrained(place / "reward")
    return place


def trained_by_trl(folder: Path, name: str, rate: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    loss, length = CASES[name], {"max_length": LENGTHS.get(name, 48)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    match loss["type"]:
        case "dpo" | "ipo":
            from trl import DPOConfig, DPOTrainer

            keys: dict[str, Any] = {"loss_type": {"dpo": "sigmoid", "ipo": "ipo"}[loss["type"]]}
            if wrong := loss.get("label_smoothing"):  # a mixture of two losses of TRL, which has it no more by itself
                keys = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - wrong), 2 * wrong - 1]}
                keys["label_smoothing"] = wrong
            config: Any = DPOConfig(**settings(folder, rate, beta=loss["beta"], **keys, **length))
            return theirs(folder, DPOTrainer, config, model, "pairs.jsonl")
        case "simpo":
            from trl.experimental.cpo import CPOConfig, CPOTrainer

            keys = {"loss_type": "simpo", "beta": loss["beta"], "simpo_gamma": loss["gamma"], "cpo_alpha": 0.0}
            return theirs(folder, CPOTrainer, CPOConfig(**settings(folder, rate, **keys)), model, "pairs.jsonl")
        case "orpo":
            from trl.experimental.orpo import ORPOConfig, ORPOTrainer

            config = ORPOConfig(**settings(folder, rate, rows=1, beta=loss["beta"]))
            return theirs(folder, ORPOTrainer, config, model, "pairs.jsonl")
    from trl import KTOConfig, KTOTrainer

    weights = {key: loss[key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    return theirs(folder, KTOTrainer, KTOConfig(**settings(folder, rate, **weights, **length)), model, "single.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_training_is_that_of_trl(folder: Path, name: str):
    rate = RATES.get(name, 0.3)
    pytest.importorskip("trl")
    expected = trained_by_trl(folder, name, rate)
    file = "single.jsonl" if name == "kto" else "pairs.jsonl"
    task, length = {"type": "preference", "loss": CASES[name]}, LENGTHS.get(name, 48)
    *found, _ = ours(folder, task, file, rate, folder, length=length)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 1e-6
    assert weights <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("has_margin", [False, True])
def test_a_reward_model_is_that_of_trl_and_its_folder_gives_the_same_rewards(folder: Path, has_margin: bool):
    pytest.importorskip("trl")
    from trl import RewardConfig, RewardTrainer

    place = folder / "reward"
    auto = transformers.AutoModelForSequenceClassification
    rows = datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train")
    file = "pairs.jsonl" if has_margin else "plain.jsonl"
    (rows if has_margin else rows.remove_columns("margin")).to_json(folder / file)
    coefficient = 0.05 if has_margin else 0.0
    config = RewardConfig(**settings(folder, 0.02, center_rewards_coefficient=coefficient or None))
    model = auto.from_pretrained(place, attn_implementation="eager")
    expected = theirs(folder, RewardTrainer, config, model, file)
    task = {"type": "reward_model", "margin": "margin" if has_margin else None, "center_coefficient": coefficient}
    *found, parts = ours(folder, task, file, 0.02, place)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 1e-6
    assert weights <= 1e-6
    parts.export(folder / "exported")
    exported = auto.from_pretrained(folder / "exported", attn_implementation="eager").eval()
    (batch,) = list(parts.train_loader)[:1]
    (microbatch,) = batch.microbatches
    with torch.no_grad():
        inputs = {name: tensor.flatten(0, 1) for name, tensor in microbatch.inputs.items()}
        rewards = exported(**inputs).logits.view(-1, 2)
    assert torch.allclose(parts.engine.eval_step(microbatch).predictions["rewards"], rewards, atol=1e-6)
