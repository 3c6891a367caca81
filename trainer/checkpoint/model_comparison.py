"""The comparison of a checkpoint with the model of a run that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.checkpoint.identity import is_partly_frozen
from trainer.checkpoint.reading import SavedBoxes
from trainer.checkpoint.tier import gather_shapes
from trainer.engine.engine import Engine
from trainer.engine.results import SKIPPED_STEPS
from trainer.engine.state import MODEL_PREFIX, optimizer_shapes
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.tensor.kinds import is_start


def compare_model(state: SavedBoxes, engine: Engine, mesh: ParallelMesh, identity: Mapping[str, Any]) -> list[str]:
    """Refuse another model, by names and shapes: `model.name_or_path` is not part of the identity.

    All ranks must call it.

    Returns:
        A note on the parameters without a state of the optimizer, after a step.
    """
    saved = {
        name.removeprefix(MODEL_PREFIX): shape for name, shape in state.shapes.items() if name.startswith(MODEL_PREFIX)
    }
    # Checkpoints of a partly frozen model lack the frozen weights.
    is_whole = not is_partly_frozen(identity)
    placements = engine.placements.values()
    own_trained = {p.name: p.shape for p in placements if p.trainable}
    own_saved = own_trained | {p.name: p.shape for p in placements if is_whole or is_start(p.name)}
    # Ranks of other stages hold other parameters, so the comparison on rank 0 needs those of all.
    placed, trained = gather_shapes(mesh, own_saved), gather_shapes(mesh, own_trained).keys()

    def compare() -> list[str]:
        for name in sorted(saved.keys() | placed.keys()):
            if saved.get(name) != placed.get(name):
                raise UsageError(
                    f"{state.folder} holds another model than `model` describes: {name} has the shape"
                    f" {saved.get(name)} there and {placed.get(name)} here (None: it is missing). Name another"
                    " `checkpoint.folder`, or restore `model`"
                )
        stepped = optimizer_shapes(state).keys()
        if unknown := stepped - trained:
            raise UsageError(
                f"{state.folder} was changed by another program: it has a state of the optimizer for"
                f" {min(unknown)}, which is not trained; remove it, or restore its files"
            )
        step = state.facts.progress.step
        # If every step was bad or skipped, the optimizer has no state yet.
        has_updates = step > max(state.facts.progress.bad_steps, int(state.scalars.get(SKIPPED_STEPS, 0)))
        keeps = stepped or (has_updates and engine.keeps_state())
        if not keeps or not (without := sorted(trained - stepped)):
            return []
        return [
            f"{listed(without, 3)} had no gradient before step {step}: the checkpoint has no state of"
            " the optimizer for it"
        ]

    return mesh.on_rank_zero(compare)
