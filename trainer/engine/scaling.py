"""Dynamic loss scaling for fp16: lifts gradients into its range, and skips the steps in which they leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from trainer.base.errors import NonFiniteError
from trainer.engine.engine import StepResult

_INITIAL, _SMALLEST = 2.0**16, 1.0
_GROWTH_INTERVAL = 2000
_PREFIX = "loss_scaler."


@dataclass
class LossScaler:
    """The factor of the loss, which follows what the gradients allow (Micikevicius et al. 2018, arXiv:1710.03740).

    It halves at each step whose global gradient norm is not finite, and doubles after `_GROWTH_INTERVAL` good steps.
    The norm is the same on every rank, so all ranks decide alike without a further message.
    """

    scale: float = _INITIAL
    good_steps: int = 0  # since the last change
    skipped_steps: int = 0

    def good(self) -> None:
        """Notes a step whose gradients were finite."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def overflow(self) -> None:
        """Notes a step that is skipped because its gradients were not finite.

        Raises:
            NonFiniteError: the scale would fall below 1: it is not the scale that makes them overflow.
        """
        self.skipped_steps += 1
        self.scale, self.good_steps = self.scale / 2.0, 0
        if self.scale < _SMALLEST:
            raise NonFiniteError(
                f"the loss scale of fp16 fell below {_SMALLEST:g} after {self.skipped_steps} skipped steps: the model"
                " itself leaves the range of fp16. Use `precision` bf16 or fp32, or lower `optimizer.learning_rate`"
            )

    def state(self) -> dict[str, float]:
        """For a checkpoint, by name."""
        return {f"{_PREFIX}{key}": value for key, value in asdict(self).items()}

    def load_state(self, scalars: Mapping[str, float]) -> None:
        """Goes on from what `state` gave."""
        self.scale = float(scalars[f"{_PREFIX}scale"])
        self.good_steps = int(scalars[f"{_PREFIX}good_steps"])
        self.skipped_steps = int(scalars[f"{_PREFIX}skipped_steps"])


def settle(result: StepResult, scaler: LossScaler | None) -> StepResult:
    """Lets the scale follow a step whose loss and norm are the same on every rank.

    Args:
        result: of the step; where it is not finite, weights and optimizer are as before it.
        scaler: under fp16.

    Returns:
        The result, with the steps skipped so far under fp16.

    Raises:
        NonFiniteError: the scale has collapsed.
    """
    if scaler is None:
        return result
    scaler.good() if result.is_finite else scaler.overflow()
    return replace(result, skipped_steps=scaler.skipped_steps)
