"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

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
    """The factor of the loss.

    It halves at each step with a non-finite global gradient norm, and doubles after `_GROWTH_INTERVAL` good steps. The
    norm is equal on all ranks, so they decide alike without communication.
    """

    scale: float = _INITIAL
    good_steps: int = 0  # since the last change
    skipped_steps: int = 0

    def good(self) -> None:
        """Count a step with finite gradients."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def overflow(self) -> None:
        """Count a step that is skipped because of non-finite gradients.

        Raises:
            NonFiniteError: the scale falls below 1.
        """
        self.skipped_steps += 1
        self.scale, self.good_steps = self.scale / 2.0, 0
        if self.scale < _SMALLEST:
            raise NonFiniteError(
                f"the loss scale of fp16 fell below {_SMALLEST:g} after {self.skipped_steps} skipped steps: the model"
                " itself leaves the range of fp16. Use `precision` bf16 or fp32, or lower `optimizer.learning_rate`"
            )

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, by name."""
        return {f"{_PREFIX}{key}": value for key, value in asdict(self).items()}

    def load_state(self, scalars: Mapping[str, float]) -> None:
        """Load a state that `state` returned."""
        self.scale = float(scalars[f"{_PREFIX}scale"])
        self.good_steps = int(scalars[f"{_PREFIX}good_steps"])
        self.skipped_steps = int(scalars[f"{_PREFIX}skipped_steps"])


def settle(result: StepResult, scaler: LossScaler | None) -> StepResult:
    """Update the scale after a step, and add the number of skipped steps to its result.

    Args:
        result: loss and norm, equal on all ranks. If they are not finite, the step changed no weights.
        scaler: the loss scaler of fp16; None in other precisions.

    Raises:
        NonFiniteError: the scale falls below 1.
    """
    if scaler is None:
        return result
    scaler.good() if result.is_finite else scaler.overflow()
    return replace(result, skipped_steps=scaler.skipped_steps)
