"""The protocol of optimizers: engines and plans ask these questions, and know no optimizer by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.optimizers.parameters import RATE, Groups, TrainedParameters, divided
from trainer.engine.state import OPTIMIZER_PREFIX
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.boxes import TensorPart, tensor_part, whole_part
from trainer.parallel.shards.gathering import local_part
from trainer.recipe.schema import Recipe


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer of torch that works under every layout. A subclass has `build` and its differences.

    Attributes:
        updates_in_batches: whether it updates `batches` of tensors in fp32, which have temporary copies.
        whole_keys: the keys of state that is whole on every rank, under every placement of its parameter.
        state_dtypes: the types of state that is not at least fp32, by key.
        found_inf: torch's flag of a bad step, which changes nothing: a scalar on the device, 1.0 in a bad step. The
            host need not wait for it, and torch's fused kernels read it themselves. None: the step is good.
        scales_gradients: whether `step` multiplies the gradients by `factor`; else the engine does it before.
        factor: the factor of the gradients in the step, a scalar on the device; None: 1.
        tables: tensors that stay between steps beside the state, such as those of a kernel.
        num_steps: the number of steps before the current one.
        rate: the learning rate of the step, of parameters without one of their own.
    """

    updates_in_batches = False
    whole_keys: frozenset[str] = frozenset()
    state_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    found_inf: Tensor | None = None
    scales_gradients = False
    factor: Tensor | None = None
    tables: Sequence[Tensor] = ()
    num_steps = 0
    rate = 0.0

    @classmethod
    def build(cls, section: Any, trained: TrainedParameters) -> EngineOptimizer:
        """Return the optimizer of a recipe's section for the parameters of a model."""
        raise NotImplementedError

    @classmethod
    def require_package(cls) -> None:
        """Refuse an optimizer that needs a package that is not installed."""

    @classmethod
    def notes(cls, device: torch.device) -> list[str]:
        """Return notes for the start of a run on a device."""
        return []

    def begin(self, rate: float, num_steps: int, found_inf: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Set the learning rate, the flag and the factor of the step after `num_steps` steps, before `step`."""
        for group in self.param_groups:
            # A group with a rule of its own keeps its ratio to the schedule.
            group["lr"] = rate * group[RATE]
        self.num_steps, self.rate = num_steps, rate
        self.found_inf, self.factor = found_inf, factor

    def divide(self, key: str, has_key: Callable[[nn.Parameter], bool]) -> None:
        """Divide each group into the parameters with `key` and the others, for an engine that flattens groups."""
        self.param_groups: Groups = divided(self.param_groups, key, has_key)

    def show(self) -> bool:
        """Put the weights for evaluations, checkpoints and exports into the parameters; return whether any changed."""
        return False

    def hide(self) -> bool:
        """Put the weights of the training back, bit for bit; return whether any changed."""
        return False

    def scalars(self) -> dict[str, float]:
        """Return the numbers on the host that all parameters share; they count a bad step until `count_as`."""
        return {}

    def count_as(self, scalars: Mapping[str, float]) -> None:
        """Set the numbers that `scalars` returned, which leaves out a bad step after it."""

    def load(self, scalars: Mapping[str, float]) -> None:
        """Continue from numbers of `scalars`, and from tensors that were saved while weights were shown."""

    def parts(self, parameter: nn.Parameter, placement: ParameterPlacement, mesh: ParallelMesh) -> Iterator[TensorPart]:
        """Yield this rank's parts of the state of a parameter, without copies; none before its first step."""
        # `get`, because torch's state is a defaultdict: a look-up would create an empty state.
        for key, value in self.state.get(parameter, {}).items():
            name = f"{OPTIMIZER_PREFIX}{placement.name}.{key}"
            if key in self.whole_keys:
                yield whole_part(name, value, mesh)
            else:
                yield tensor_part(name, value, placement, mesh)

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole tensor of the state of a parameter after a step, by key.

        Args:
            shape: the shape of the whole parameter.
        """
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}

    def state_bytes(self, parameter: nn.Parameter, shape: tuple[int, ...], number: int) -> int:
        """Return the bytes of the state of a parameter on a rank with `number` of its elements, but for its steps."""
        return sum(
            # A whole tensor does not shrink with the number of ranks.
            4 * prod(whole) if key in self.whole_keys else self.state_dtypes.get(key, torch.float32).itemsize * number
            for key, whole in self.state_shapes(parameter, shape).items()
            if key != "step"
        )

    def refuse_other_state(
        self, parameter: nn.Parameter, placement: ParameterPlacement, saved: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Refuse a saved state of a parameter that is not one of this optimizer.

        Args:
            saved: the shape of each whole tensor of the saved state, by key.

        Raises:
            ValueError: a tensor is missing or unknown, or has another shape.
        """
        expected = self.state_shapes(parameter, placement.shape)
        for key in sorted(saved.keys() | expected.keys()):
            if saved.get(key) != expected.get(key):
                raise ValueError(
                    f"{OPTIMIZER_PREFIX}{placement.name}.{key} has the shape {saved.get(key)}, and must have"
                    f" {expected.get(key)} (None: it is absent)"
                )

    def allocate(
        self, parameter: nn.Parameter, placement: ParameterPlacement, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Make the state of a parameter of zeros, for a saved state that is read into its `parts`.

        Args:
            shapes: the shape of each whole tensor of the saved state, by key.

        Raises:
            ValueError: see `refuse_other_state`.
        """
        self.refuse_other_state(parameter, placement, shapes)
        self.state[parameter] = {
            key: self.blank(key, parameter)
            if shape == placement.shape and key not in self.whole_keys
            else torch.zeros(shape, dtype=torch.float32, device=local_part(parameter).device)
            for key, shape in shapes.items()
        }

    def blank(self, key: str, parameter: Tensor) -> Tensor:
        """Return zeros for a tensor of the state with the shape of its parameter."""
        if key in self.state_dtypes:  # codes, or the bits that rounding cuts off, in the order of the elements
            dtype = self.state_dtypes[key]
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        # Moments of weights in bf16 are fp32, those of weights in fp64 are fp64.
        return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


class OptimizerUpdate(EngineOptimizer):
    """A change of the update of other optimizers: a base class before theirs, so `super` calls their methods.

    A feature registers it under the key of a recipe that asks for it.
    """

    recipe: Recipe
    reads_gradients = True  # whether `step` reads gradients, which the engine must then have clipped
    weights_dtype = torch.float32  # of trained weights of matrix products

    @classmethod
    def masters(cls, recipe: Recipe) -> str:
        """Return the place of the bits that weights of another type than fp32 lack, for a table."""
        return "the weights"
