"""The parameters that an optimizer trains: their groups and properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.models.families.table import layers_of
from trainer.models.parameter_rules import ParameterRule
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import Placements
from trainer.parallel.tensor.kinds import ShardedLinear
from trainer.recipe.schema import OptimizerKeys, Recipe

Groups = list[dict[str, Any]]
"""Parameter groups of a torch optimizer."""
NormTypes = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
RATE = "rate"
"""The key of a parameter group: its learning rate, as a multiple of that of the optimizer."""
_LINEAR = (nn.Linear, Conv1D, ShardedLinear)


def no_decay_names(model: nn.Module) -> set[str]:
    """Return the parameters without weight decay: biases, and weights of normalisation layers.

    Classes of transformers with names that end in "Norm" count as normalisation layers, and so do modules of tasks with
    `has_weight_decay` false.
    """
    names = set()
    for module_name, module in model.named_modules():
        # Models have norms of their own, such as T5's or Llama's, that derive from no class of torch.
        is_norm = isinstance(module, NormTypes) or type(module).__name__.endswith("Norm")
        is_norm |= not getattr(module, "has_weight_decay", True)
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name == "bias" or name.endswith("_bias"):
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in the repeated layers.

    Raises:
        UsageError: the layers of the model are unknown, because its family is not in the table.
    """
    # By identity and not by name, because a tied weight has several names.
    inside = {
        module.weight
        for layer in layers_of(model, "`optimizer.name`").values()
        for module in layer.modules()
        if isinstance(module, _LINEAR)
    }
    return {name for name, parameter in model.named_parameters() if parameter in inside}


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a model that an optimizer trains."""

    named: Mapping[str, nn.Parameter]  # the parameters by name; frozen ones are left out
    no_decay: Set[str] = frozenset()
    # Returns the names of the weights of linear layers in the repeated layers. It fails for a model of an unknown
    # family, so only an optimizer that needs them calls it.
    matrices: Callable[[], Set[str]] = frozenset
    whole: WholeAccess = field(default_factory=lambda: WholeAccess({}))
    # learning rates and weight decays that differ from those of the optimizer, by name
    rules: Mapping[str, ParameterRule] = field(default_factory=dict)
    recipe: Recipe | None = None  # the recipe, which may ask for updates of features; None: it asks for none

    @classmethod
    def of(
        cls,
        models: Sequence[nn.Module],
        recipe: Recipe,
        placements: Placements,
        mesh: ParallelMesh,
        rules: Mapping[str, ParameterRule] = MappingProxyType({}),
    ) -> TrainedParameters:
        """Return those of a model, or of this rank's stages of it, by their names in `placements`.

        `rules` are those of the whole model.
        """
        named = {name: parameter for model in models for name, parameter in model.named_parameters()}
        return cls(
            named,
            {name for model in models for name in no_decay_names(model)},
            lambda: {name for model in models for name in matrix_names(model)},
            WholeAccess({parameter: placements[name] for name, parameter in named.items()}, mesh),
            {name: rules[placements[name].name] for name in named if rules},
            recipe,
        )

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    @property
    def fused(self) -> bool | None:
        """Whether fused kernels update all parameters in one pass over memory; None: torch decides."""
        return all(parameter.device.type in ("cpu", "cuda") for parameter in self.trainable.values()) or None

    def groups(self, section: OptimizerKeys, names: Set[str] | None = None) -> Groups:
        """Return the groups of parameters with the same learning rate and weight decay; none is empty.

        Args:
            names: the parameters to group; None: all that are not frozen.
        """
        groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
        # The order of the groups follows from recipe and model alone, so it is equal on all ranks.
        for decays in (True, False):
            for name, parameter in self.trainable.items():
                if (name not in self.no_decay) == decays and (names is None or name in names):
                    rule = self.rules.get(name)
                    rate, decay = (rule.rate, rule.weight_decay) if rule else (1.0, section.weight_decay)
                    groups.setdefault((decays, rate, decay), []).append(parameter)
        return [
            {"params": parameters, "weight_decay": decay if decays else 0.0, RATE: rate}
            for (decays, rate, decay), parameters in groups.items()
        ]


def divided(groups: Iterable[dict[str, Any]], key: str, has_key: Callable[[nn.Parameter], bool]) -> Groups:
    """Return the groups, each divided into the parameters with `key`, which their group gets, and the others."""
    return [
        {**group, "params": members, **({key: True} if chosen else {})}
        for group in groups
        for chosen in (True, False)
        if (members := [parameter for parameter in group["params"] if has_key(parameter) == chosen])
    ]
