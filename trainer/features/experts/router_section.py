"""The keys of the routers of mixtures of experts, for every task."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema.task_keys import TaskKeys


class RouterKeys(TaskKeys):
    """The losses and the balance of routers."""

    router_loss: Annotated[float, Field(gt=0)] | None = None
    """Coefficient of the load balancing loss of experts over the global batch, such as 0.001; null: none."""
    router_z_loss: Annotated[float, Field(gt=0)] | None = None
    """Coefficient of the mean squared logsumexp of routers, such as 0.001 (Zoph et al. 2022); null: none."""
    router_bias_rate: Annotated[float, Field(gt=0)] | None = None
    """Step of DeepSeek-V3's biases of experts, such as 0.001 (Wang et al. 2024); null: none."""
