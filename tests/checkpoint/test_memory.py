"""Peak memory of saving and resuming: no rank holds the full state. `SHOW_MEMORY=1 python -m pytest -s` prints it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.memory import needs_peak, peak_growth
from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.recipe.schema import Recipe

MODEL = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 64,
}
STATE_BYTES = 132.7e6  # weights and two moments in fp32
LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "fsdp", "tensor": 2},
    {"strategy": "ddp"},
]


def save_or_resume(recipe: Recipe, folder: Path, resume: bool) -> int:
    """Save or resume. Return by how many bytes the memory of this rank grew at its peak."""
    with tiny_training(recipe) as training:
        saver = Saver(CheckpointStore(folder, 1), training.engine, training.mesh, Saved({}), asynchronous=False)
        if not resume:
            training.steps(1)
            training.mesh.on_rank_zero(saver._store.open)
            saver.progress = Progress(1, 12)
        return peak_growth(lambda: saver.resume("auto") if resume else saver.save())


@pytest.mark.alone
@pytest.mark.slow
@needs_peak
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_each_rank_writes_and_reads_its_share(ranks: RankPools, tmp_path, parallel):
    recipe = tiny_recipe(model={"config": MODEL}, parallel=parallel, training={"micro_batch_size": 3})
    saving = ranks(4).run(save_or_resume, recipe, tmp_path, False)
    sizes = [file.stat().st_size for file in sorted(tmp_path.rglob("*.safetensors"))]
    resuming = ranks(4).run(save_or_resume, recipe, tmp_path, True)
    if os.environ.get("SHOW_MEMORY"):
        for what, values in (("files", sizes), ("peak of saving", saving), ("peak of resuming", resuming)):
            print(f"{parallel} {what}: {', '.join(f'{value / 1e6:.1f}' for value in values)} MB")
    assert sum(sizes) == pytest.approx(STATE_BYTES, rel=0.01)
    assert max(sizes) < 1.02 * STATE_BYTES / 4
    assert max(saving) < 0.5 * STATE_BYTES
    # With ddp, each rank needs all moments (two thirds of the state), and reads them one file at a time.
    assert max(resuming) < (2 / 3 + 0.28 if parallel["strategy"] == "ddp" else 0.5) * STATE_BYTES
