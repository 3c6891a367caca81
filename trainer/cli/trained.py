"""The recipe of a trained model, for `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from trainer.recipe.reading.trained import Trained


def trained_recipe(
    run: Path, recipe: str | None, overrides: Sequence[str], processes: int | None, evaluates: bool
) -> Trained:
    """Return a trained model with its recipe, and show the notes on it once."""
    from trainer.launch.local import number_of_ranks
    from trainer.ranks.environment import detect, problems_name_the_machine
    from trainer.recipe.reading.trained import load_trained

    with problems_name_the_machine():
        trained = load_trained(run, recipe, overrides, number_of_ranks(processes), evaluates)
    if detect().rank == 0:
        for note in trained.notes:
            typer.echo(note, err=True)
    return trained
