"""Watch the losses of a run, and rewind it when one jumps.

Rewinding puts weights and optimizer back to a checkpoint. The count of steps, the position in the data and the learning
rate go on from the jump, so the rows of the steps since the checkpoint are left out, and no step has its number twice.
The losses and the steps that are left out are counters of a checkpoint: a resumed run decides as an undisturbed one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import cast

from trainer.base.errors import NonFiniteError
from trainer.checkpoint.tier import Found, Tier
from trainer.features.spikes.section import SpikeKeys
from trainer.observe.meter import Meter
from trainer.observe.records import LoggedRecord
from trainer.training.assembly import Assembly
from trainer.training.loop import Loop
from trainer.training.run_tool import RunTool

_LOSSES, _LEFT_OUT = "spikes.losses", "spikes.left_out"
_LEAST_DEVIATION = 0.01  # of the median: a flat curve has hardly any deviation


def limit_of(losses: Sequence[float], factor: float) -> float:
    """Return the largest regular loss after these: median + factor * max(median absolute deviation, 1 % of it)."""
    middle = median(losses)
    deviation = median(abs(loss - middle) for loss in losses)
    return middle + factor * max(deviation, _LEAST_DEVIATION * abs(middle))


class SpikeWatch(RunTool):
    """The watch of a run with `training.on_spike`.

    It waits for the loss of each step, so that all layouts decide after the same step.
    """

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        self._keys = cast(SpikeKeys, parts.recipe.training)
        numbers = parts.progress.of_tools
        self._losses = deque(numbers.get(_LOSSES, ()), maxlen=self._keys.spike_window)
        self._left_out = [int(step) for step in numbers.get(_LEFT_OUT, ())]  # first and last step of each rewind

    def after_step(self, loop: Loop) -> None:
        try:
            loss, failure = loop.result().loss, None
        except NonFiniteError as error:  # more of them than `training.max_bad_steps`
            if self._keys.on_spike == "note":
                raise
            loss, failure = math.nan, error
        is_judged = len(self._losses) == self._keys.spike_window
        limit = limit_of(self._losses, self._keys.spike_factor) if is_judged else math.inf
        if failure is not None or loss > limit:
            why = f"is {loss:.4g}" if failure else f"jumps to {loss:.4g}, above {limit:.4g}"
            self._answer(loop, loss, f"step {loop.progress.step}: the loss {why}", failure)
        elif math.isfinite(loss):  # a step that was skipped as a bad one is no measure
            self._losses.append(loss)
        # New lists: a thread may still write those of the last checkpoint.
        loop.progress.of_tools = {_LOSSES: [*self._losses], _LEFT_OUT: [*map(float, self._left_out)]}

    def _answer(self, loop: Loop, loss: float, problem: str, failure: NonFiniteError | None) -> None:
        step, numbers = loop.progress.step, {} if math.isnan(loss) else {"spike_loss": loss}
        if self._keys.on_spike == "rewind":
            if len(self._left_out) >= 2 * self._keys.max_rewinds:
                raise NonFiniteError(
                    f"training must go on without jumps of the loss after `training.max_rewinds`"
                    f" {self._keys.max_rewinds}, but {problem}; lower `optimizer.learning_rate`, lengthen"
                    " `schedule.warmup`, or look at the rows of these steps"
                )
            if (found := self._load(loop)) is not None:
                self._left_out += [found + 1, step]
                numbers["rewound_to_step"] = found
                problem += f"; weights and optimizer are those of step {found}, and the rows of the steps"
                problem += f" {found + 1} to {step} are left out ({len(self._left_out) // 2} of at most"
                problem += f" {self._keys.max_rewinds} rewinds)"
            elif failure is not None:
                raise failure
            else:
                problem += f"; there is no checkpoint of step {step - 2} or before, so training goes on"
        loop.observers.note(problem)
        loop.report(lambda: loop.observers.logged(LoggedRecord(step, numbers)))

    def _load(self, loop: Loop) -> int | None:
        """Load the newest checkpoint that is sound, and return its step; None if there is none."""
        loop.saver.finish()
        for tier, found in self._sound(loop):
            state, _ = tier.read(found)
            if state is None:  # damaged
                continue
            last = tier.last
            # The engine counts on from here: the step keys its dropout and gives its learning rate.
            state.facts.progress.step = loop.progress.step
            tier.load(state, loop.engine)
            tier.last = last  # the newest checkpoint of this run stays
            return found.step
        return None

    def _sound(self, loop: Loop) -> Iterator[tuple[Tier, Found]]:
        """Yield the checkpoints before a step with a regular loss, the newest first; of equal ones, the fastest."""
        every: list[tuple[Tier, Found]] = [(tier, found) for tier in loop.saver.tiers for found in tier.checkpoints()]
        ranges = [*zip(self._left_out[::2], self._left_out[1::2], strict=True)]
        for tier, found in sorted(every, key=lambda pair: -pair[1].step):
            # The weights of a step are judged by the loss of the next one.
            is_judged = found.step <= loop.progress.step - 2
            # A checkpoint of steps that were left out, or the one before the jump itself, is no place to return to.
            if is_judged and not any(first <= found.step < last for first, last in ranges):
                yield tier, found
