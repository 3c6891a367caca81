"""Runs that did not keep their exported model."""

from __future__ import annotations

from pathlib import Path

from trainer.base.errors import UsageError

REFUSED = "model-refused.txt"
"""The file in a run's folder with the reason why its end did not keep the exported model."""


def require_not_refused(checkpoint: Path) -> None:
    """Refuse to export a checkpoint in the folder of a run that did not keep its own export.

    Raises:
        UsageError: the run has refused it.
    """
    file = checkpoint.parent.parent / REFUSED
    if file.is_file():
        raise UsageError(
            f"`--verify` is needed for this run, which did not keep its exported model ({file}); add --verify, which"
            " compares the folder with the trained model"
        )
