"""Labels, losses and metrics of each task. Knows no model family, no data source and no layout."""

from trainer.tasks.metrics.table import merit
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task

__all__ = ["Task", "build_task", "merit"]
