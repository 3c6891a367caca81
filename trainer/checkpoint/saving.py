"""The saver of a run: it saves the state to tiers of checkpoints, and resumes from the newest one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.format import Facts, snapshot
from trainer.checkpoint.identity import FROZEN_WEIGHTS, differences, is_partly_frozen
from trainer.checkpoint.tier import Found, Tier
from trainer.engine.engine import Engine
from trainer.engine.state import EngineState
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.schema.fields import Interval

if TYPE_CHECKING:
    from trainer.checkpoint.reading import SavedBoxes


@dataclass(frozen=True)
class Saved:
    """The contents of every checkpoint of a run, except its state.

    `identity` is the result of the function of that name. `origin` describes the run that saves it, for information.
    `model_files` are the configuration and the tokenizer by file name, for an export without the original model.
    `total_steps` returns the steps of the training with other values of keys such as `epochs`.
    """

    identity: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    total_steps: Callable[..., int] | None = None


class Saver:
    """The saver of the engine's state and the run's progress, which also restores them.

    Args:
        tiers: the places of checkpoints, the fastest first.
        progress: the counters of the run; `resume` sets them.
    """

    def __init__(
        self, tiers: Sequence[Tier], engine: Engine, mesh: ParallelMesh, saved: Saved, progress: Progress | None = None
    ) -> None:
        self.tiers = tiers
        self.progress = Progress() if progress is None else progress
        self._engine = engine
        self._mesh = mesh
        self._saved = saved
        self._frozen: str | None = None  # the digest, computed once

    @property
    def has_checkpoint(self) -> bool:
        """Whether this run has loaded or completed a checkpoint."""
        return any(tier.last is not None for tier in self.tiers)

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint that this run has loaded or completed where it lasts."""
        return next((tier.last for tier in self.tiers if tier.is_lasting and tier.last is not None), None)

    @property
    def between(self) -> Interval | None:
        """How often to call `save_in_memory`; None: never."""
        return next((tier.every for tier in self.tiers if tier.every is not None), None)

    @property
    def destinations(self) -> list[str]:
        """The places to which `deliver` uploads."""
        return [tier.destination for tier in self.tiers if tier.destination]

    def resume(self, mode: Literal["auto", "never"]) -> list[str]:
        """Resume from the newest complete checkpoint, if there is one, of any layout.

        Returns:
            Notes for the user, for example on checkpoints that were skipped.

        Raises:
            StoppedError: rank 0 has to stop.
            UsageError: the checkpoint is of another training or model, `mode` is "never" and a checkpoint exists, or
                a place cannot be used.
        """
        # The slowest first: copies fill an empty folder on the disk, and memory reads its key from that folder.
        notes = [note for tier in reversed(self.tiers) for note in tier.open(mode == "auto")]
        candidates = [(tier, candidate) for tier in self.tiers for candidate in tier.checkpoints()]
        candidates.sort(key=lambda pair: pair[1].step, reverse=True)  # of equal steps, the faster tier stays first
        step = None
        for tier, candidate in candidates:
            state, problems = self._read(tier, candidate)
            if state is None:
                notes.append(f"skipped {candidate.name}: {problems[0]}")
                continue
            notes += [f"skipped a part of {candidate.name}: {problem}" for problem in problems]
            if mode == "never":
                raise UsageError(
                    f"`checkpoint.resume` is never, but {candidate.name} exists; name another `checkpoint.folder`, or"
                    " remove `checkpoints` there"
                )
            # The checks follow the verification, since the facts of a damaged checkpoint say nothing.
            from trainer.checkpoint.model_comparison import compare_model  # a new run compares nothing

            notes += self._compare_training(state)
            notes += compare_model(state, self._engine, self._mesh, self._saved.identity)
            try:
                tier.load(state, self._engine)
            except ValueError as error:
                raise UsageError(
                    f"{candidate.name} was changed by another program: {error}; remove it, or restore its files"
                ) from error
            # In place, because the assembly and the batches of the run hold the same counters.
            self.progress.become(state.facts.progress)
            step = candidate.step
            break
        for tier in self.tiers:
            notes += tier.begin(step, self._engine.state)
        return notes

    def save(self) -> None:
        """Copy the state and start to write it where it lasts, after all earlier checkpoints are complete.

        Raises:
            TrainerError: this checkpoint or the previous one cannot be written.
        """
        self.finish()
        self._save(lasting=True)

    def save_in_memory(self) -> None:
        """Copy the state and start to write it to places that need not last; a failed write is a note.

        Raises:
            UsageError: a host has too little memory.
        """
        self._save(lasting=False)

    def _save(self, lasting: bool) -> None:
        for tier in self.tiers:
            if tier.is_lasting == lasting:
                tier.save(self.progress.step, self._snapshot)

    def begin_poll(self) -> Callable[[], None]:
        """Start to compare the status of all ranks, and return a function that completes a written checkpoint.

        Call this before a step and the function after it, on all ranks; then no rank waits.
        """
        # All ranks begin these collectives in the order of the tiers, and wait for none of them here.
        settles = [tier.begin_poll() for tier in self.tiers]

        def settle() -> None:
            for finish in settles:
                finish()

        return settle

    def finish(self) -> None:
        """Wait until the current checkpoints are complete; all ranks must call it.

        Raises:
            TrainerError: the checkpoint cannot be written.
        """
        for tier in self.tiers:
            tier.finish()

    def close(self) -> None:
        """Free the places that do not last at the end of a run, with its state where it lasts; on all ranks."""
        self.finish()
        # Checkpoints in memory only: the state goes to the disk before their memory is freed.
        if self.has_checkpoint and self.last is None:
            self.save()
            self.finish()
        for tier in self.tiers:
            tier.close()

    def deliver(self, model: Path | None) -> None:
        """Wait until all copies are uploaded, with the final model if there is one; all ranks must call it.

        Raises:
            TrainerError: they could not be uploaded.
        """
        for tier in self.tiers:
            tier.deliver(model)

    def _snapshot(self) -> tuple[Facts, dict[str, Tensor]]:
        """Return copies of this rank's part of the state. All ranks must call it."""
        state = self._engine.state()
        shapes = {part.name: part.shape for part in state.parts}
        # A copy of the counters: they go on while a thread writes.
        facts = Facts(replace(self.progress), self._identity(state), self._saved.origin, shapes, state.scalars)
        return facts, snapshot(state.parts)

    def _read(self, tier: Tier, candidate: Found) -> tuple[SavedBoxes | None, list[str]]:
        """Return a checkpoint with the problems of its parts; None if it is damaged.

        Nothing is lost if a place that does not last is skipped, so another training is no error there.
        """
        state, problems = tier.read(candidate)
        if state is None or tier.is_lasting:
            return state, problems
        present = self._identity()
        with suppress(UsageError):  # of a difference that changes steps which are done
            present = self._reconciled(state)[0]
        others = differences(state.facts.identity, present)
        return (None, [f"it belongs to another training: {others}"]) if others else (state, problems)

    def _identity(self, state: EngineState | None = None) -> Mapping[str, Any]:
        """Return the identity, with a digest of frozen weights that the state leaves out. All ranks must call it."""
        present = self._saved.identity
        if not is_partly_frozen(present):
            return present
        # Frozen weights never change, so one digest serves all checkpoints.
        if self._frozen is None:
            from trainer.parallel.shards.digest import joined, own_digest

            self._frozen = joined(self._mesh.all_gather(own_digest((state or self._engine.state()).frozen())))
        return {**present, "model": {**present["model"], FROZEN_WEIGHTS: self._frozen}}

    def _reconciled(self, state: SavedBoxes) -> tuple[Mapping[str, Any], list[str]]:
        """Return the identity without differences to a checkpoint that change nothing, and notes on them."""
        present, notes = self._identity(), list[str]()
        if differences(state.facts.identity, present) and (reconcile := sole("resumption")):
            present, notes = reconcile(state, present, self._saved.total_steps)
        return present, notes

    def _compare_training(self, state: SavedBoxes) -> list[str]:
        """Refuse another training, and return notes on differences that change nothing."""
        present, notes = self._reconciled(state)
        if others := differences(state.facts.identity, present):
            fix = "Give the run another `name` or `checkpoint.folder`, or restore the values"
            raise UsageError(f"{state.folder} belongs to another training: {others}. {fix}")
        return notes


class IdleSaver(Saver):
    """A saver that writes no checkpoint, for measurements."""

    def _save(self, lasting: bool) -> None:
        pass
