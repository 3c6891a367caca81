"""The interface to launches that nodes join and leave; a registered feature plans and trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Parallel, Recipe


class ElasticLaunch(ABC):
    """The layouts of a recipe on a number of ranks that changes, and their training.

    Attributes:
        train: The text "module:name" of a function as `run` of `training/run.py`.
    """

    train: ClassVar[str]

    @abstractmethod
    def fitted(self, parallel: Parallel, num_ranks: int) -> Parallel:
        """Return the section of a recipe for this number of ranks."""

    @abstractmethod
    def summary(self, recipe: Recipe, num_ranks: int) -> str:
        """Return the text of `trainer check` for a layout of `num_ranks` ranks."""

    @abstractmethod
    def check(self, recipe: Recipe, environment: LaunchEnvironment) -> None:
        """Refuse a recipe that cannot train under an elastic launch.

        Raises:
            TrainerError: the recipe or the launch is not ready for it.
        """


def elastic_launch(nodes: tuple[int, int]) -> ElasticLaunch:
    """Return the registered feature, for a launch on a least and a most number of nodes.

    Raises:
        UsageError: there is none.
    """
    feature: type[ElasticLaunch] | None = sole("elastic")
    if feature is None:
        least, most = nodes
        raise UsageError(
            f"torchrun's --nnodes {least}:{most} lets nodes join and leave, but no installed feature supports that;"
            f" use --nnodes {most}"
        )
    return feature()
