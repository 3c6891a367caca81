"""The gain of pretraining: one epoch of `ner_sample` from pretrained and from random weights, with the same seeds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import trainer
from trainer.recipe.reading.loading import load_recipe

SEEDS, MARGIN = (42, 43, 44), 0.2
"""The seeds and the margin of docs/pretraining.md, in F1."""
RATE = 5e-4  # the best one of five for random weights; the chain has the best one of three


def fine_tuned(name: str, folder: Path, keys: list[str]) -> float:
    return trainer.run(trainer.load_recipe(name, [*keys, f"checkpoint.folder={folder}"])).metrics["f1"]


def test_both_are_the_same_fine_tuning():
    chain = load_recipe("pretraining_sample", ["stage=names"], needs_data=False).recipe
    alone = load_recipe("ner_sample", ["training.epochs=1"]).recipe
    for section in ("task", "data", "training", "optimizer", "schedule", "precision"):
        assert getattr(chain, section) == getattr(alone, section), section
    assert alone.model.dropout is None, "the default of BERT, which the stage names: it is 0 in the folder before"
    assert chain.model.dropout == 0.1


@pytest.mark.nightly
def test_pretrained_weights_beat_random_ones(tmp_path: Path):
    pretrained, random = [], []
    for seed in SEEDS:
        keys = [f"training.seed={seed}", f"stages.names.training.seed={seed}"]
        pretrained.append(fine_tuned("pretraining_sample", tmp_path / f"chain-{seed}", keys))
        own = ["training.epochs=1", f"optimizer.learning_rate={RATE}", keys[0]]
        random.append(fine_tuned("ner_sample", tmp_path / f"alone-{seed}", own))
    assert fmean(pretrained) > fmean(random) + MARGIN, (pretrained, random)
    assert min(pretrained) > max(random), (pretrained, random)
