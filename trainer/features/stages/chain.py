"""The run of stages, one after another, by local ranks or in the ranks of a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import ExitCode, UsageError
from trainer.base.terminal import say
from trainer.checkpoint.identity import differences
from trainer.features.stages import evidence
from trainer.features.stages.stage import Stage, StageTrees
from trainer.launch.local import plan_start, run_or_join
from trainer.launch.rank_job import set_threads
from trainer.ranks.environment import LaunchEnvironment, detect
from trainer.ranks.stopping import StopRequest, stop_before_training
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import ResolvedRecipe
from trainer.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous

_LINKS = ("model", "best", "checkpoints")


class StageChain:
    """The stages of a recipe.

    Args:
        whole: the recipe, with `stages`.
        listed: all stages.
        chosen: those to take.
        recipes: the recipes of all stages by name, with stand-ins for models that are not trained yet.
    """

    def __init__(
        self,
        whole: ResolvedRecipe,
        trees: StageTrees,
        listed: Sequence[Stage],
        chosen: Sequence[Stage],
        recipes: Mapping[str, ResolvedRecipe],
    ) -> None:
        self._whole, self._trees = whole, trees
        self._listed, self._chosen = listed, chosen
        self._resumes = whole.recipe.checkpoint.resume == "auto"
        self.stages: Mapping[str, ResolvedRecipe] = {stage.name: recipes[stage.name] for stage in chosen}

    def unchecked(self, name: str) -> tuple[str, ...]:
        """Return the parts that a check cannot see: the model of a parent that is not trained yet."""
        (stage,) = (stage for stage in self._chosen if stage.name == name)
        if stage.parent is None or stage.parent.has_model:
            return ()
        return (f"weights and tokenizer of the stage {stage.parent.name}, which is not trained yet",)

    def run(self, processes: int | None, max_restarts: int, job: Any) -> int:
        """Do the stages that are not done, and return the exit code of the last one that ran.

        Raises:
            UsageError: a stage that is done has changed, or began from another run than that of its parent.
            TrainerError: as `run_or_join`.
        """
        with stop_before_training():
            environment = detect()
            pending = self._pending()
            if environment.has_ranks:
                return self._join(environment, pending, processes, max_restarts, job)
            for stage in pending:
                self._begin(stage)
                resolved = self._trees.resolved(stage)
                if code := run_or_join(resolved, stage.processes or processes, max_restarts, job):
                    return code
                evidence.finish(stage.folder, facts_recipe(stage, resolved))
            self._link()
        return ExitCode.DONE

    def _join(
        self,
        environment: LaunchEnvironment,
        pending: Sequence[Stage],
        processes: int | None,
        max_restarts: int,
        job: Any,
    ) -> int:
        """Do stages as a rank of a launcher; the ranks meet once."""
        if environment.elastic_nodes is not None:
            raise UsageError("`stages` need a fixed number of nodes, but torchrun has --nnodes MIN:MAX; use one number")
        for stage in pending:
            plan_start(self._trees.resolved(stage), stage.processes or processes, max_restarts)
        set_threads(environment)
        is_first = environment.rank == 0
        meeting = self._meet(environment, pending, job)
        from trainer.training.run import train

        for stage in pending:
            if is_first:
                self._begin(stage)
            resolved = self._trees.resolved(stage)
            own = _of_stage(meeting, stage, environment)
            with StopRequest() as stop:
                end = train(resolved, environment, stop, own, callbacks=job.callbacks)
            if end.exit_code:
                return end.exit_code
            if is_first:
                evidence.finish(stage.folder, facts_recipe(stage, resolved))
        if is_first:
            self._link()
        return ExitCode.DONE

    def _meet(self, environment: LaunchEnvironment, pending: Sequence[Stage], job: Any) -> Rendezvous | None:
        """Meet the other ranks, and check that all do the same stages; None without others.

        Raises:
            UsageError: they differ.
        """
        from trainer.training.process_group import meet_ranks

        first = self._trees.resolved((*pending, self._listed[-1])[0]).recipe
        plan = plan_run(first, environment.world_size, environment.local_world_size)
        meeting = meet_ranks(self._whole, plan, environment, callbacks=job.callbacks)
        names = " ".join(stage.name for stage in pending)
        if meeting is not None and not meeting.all_same(names, plan.recipe.parallel.join_timeout.seconds):
            raise UsageError(
                f"all ranks must see the same folder {self._whole.recipe.checkpoint.folder}, but they found other"
                " stages done; use a file system that the nodes share"
            )
        return meeting

    def _pending(self) -> list[Stage]:
        """Return the chosen stages that are not done, in their order.

        Raises:
            UsageError: see `run`.
        """
        pending: list[Stage] = []
        for stage in self._chosen:
            written = evidence.read(stage.folder)
            parent = evidence.read(stage.parent.folder).get("run") if stage.parent else None
            if stage.parent is not None and parent is None and stage.parent not in pending:
                raise UsageError(
                    f"`stage` is {stage.name}, which starts from {stage.parent.name}, but that is not trained; leave"
                    " `stage` out"
                )
            if stage.parent in pending:
                parent = None
            if written and stage.parent is not None and written.get("began_from") != parent:
                raise UsageError(
                    f"the stage {stage.name} in {stage.folder} began from another run of {stage.parent.name} than the"
                    f" present one; remove {stage.folder}, or name another `checkpoint.folder`"
                )
            if not (self._resumes and "run" in written):
                pending.append(stage)
                continue
            facts = evidence.facts_of(facts_recipe(stage, self.stages[stage.name]))
            if changed := differences(written["training"], facts):
                raise UsageError(
                    f"the stage {stage.name} is done, but its training has changed: {changed}; restore the values, or"
                    f" remove {stage.folder} and the folders of the stages after it"
                )
        return pending

    def _begin(self, stage: Stage) -> None:
        """Show that a stage begins, and write the run that it begins from."""
        say(f"stage {stage.number} of {len(self._listed)}: {stage.name}, in {stage.folder}")
        parent = evidence.read(stage.parent.folder).get("run") if stage.parent else None
        if self._resumes or not evidence.read(stage.folder):
            evidence.begin(stage.folder, parent)

    def _link(self) -> None:
        """Link the model and the checkpoints of the last stage, so that the folder is used as that of a run."""
        last, folder = self._listed[-1], Path(self._whole.recipe.checkpoint.folder)
        if "run" not in evidence.read(last.folder):
            return
        for name in _LINKS:
            link = folder / name
            with suppress(OSError):  # a file system without links: commands take the folder of the stage
                if link.is_symlink():
                    link.unlink()
                if (last.folder / name).exists() and not link.exists():
                    os.symlink(os.path.join(last.folder.name, name), link)


def facts_recipe(stage: Stage, resolved: ResolvedRecipe) -> Recipe:
    """Return the recipe of a stage with its own keys of the model, also where a stand-in has others."""
    recipe = resolved.recipe
    if stage.parent is None:
        return recipe
    own = {key: stage.own_model.get(key) for key in ("config", "new_tokens")}
    own["new_head"] = bool(stage.own_model.get("new_head"))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=own)})


def _of_stage(meeting: Rendezvous | None, stage: Stage, environment: LaunchEnvironment) -> Rendezvous | None:
    """Return the rendezvous of a stage, in which no value of another stage is."""
    if meeting is None:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from trainer.ranks.joining import Rendezvous as Meeting

    return Meeting(PrefixStore(f"stage/{stage.name}", meeting.store), environment, meeting.hosts_store)
