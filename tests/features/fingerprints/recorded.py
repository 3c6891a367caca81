"""A tiny training with fingerprints, on the ranks of the caller."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tests.helpers.training import TinyTraining, tiny_recipe, tiny_training
from trainer.features.fingerprints.recorder import Fingerprints

Fault = Callable[[TinyTraining], Any]


def record(folder: Path, sections: dict[str, Any], steps: int = 2, fault: Fault | None = None, **options: Any) -> None:
    """Train `steps` steps of a tiny recipe, and record them in a folder.

    Args:
        fault: changes the training before its first step.
        options: those of `build_tiny`.
    """
    logging = {"logging": {"every": "1 step", "to": ["jsonl"], "fingerprints": True}}
    recipe = tiny_recipe(**sections, **logging, checkpoint={"folder": str(folder)})
    with tiny_training(recipe, **options) as training:
        if fault is not None:
            fault(training)
        with Fingerprints(cast(Any, None), cast(Any, None)) as tool:
            tool.begin(training.parts, cast(Any, None), False)
            for batch in islice(training.loader, steps):
                training.engine.train_step(batch)
