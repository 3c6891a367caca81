"""The audit of a recipe or of a run, by the path that names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.recipe.reading.loading import load_recipe
from trainer.tools.audit.data_audit import audit_data
from trainer.tools.audit.findings import AuditResult
from trainer.tools.audit.run_audit import audit_run


def audit(source: str, overrides: Sequence[str] = (), write: Path | None = None) -> AuditResult:
    """Audit the data of a recipe, or the rows of a run.

    Args:
        source: the name or file of a recipe, or the folder of a run.
        overrides: `key=value` overrides of the recipe.
        write: the file for the rows, for the command that leaves them out.

    Raises:
        TrainerError: recipe or data cannot be read, or the run has no record of its rows.
    """
    if Path(source).is_dir():
        return audit_run(Path(source), overrides, write)
    return audit_data(load_recipe(source, overrides).recipe)
