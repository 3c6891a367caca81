"""The run of stages, one after another, by local ranks or in the ranks of a launcher."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import ExitCode, UsageError
from trainer.base.terminal import say
from trainer.checkpoint.identity import differences
from trainer.features.stages import evidence
from trainer.features.stages.stage import Stage, StageTrees
from trainer.features.stages.work import do_work
from trainer.launch.local import plan_start, run_or_join
from trainer.launch.rank_job import set_threads
from trainer.observe.metrics_file import METRICS_FILE_NAME, STAGE_FILE_NAME
from trainer.ranks.environment import LaunchEnvironment, detect
from trainer.ranks.stopping import StopRequest, stop_before_training
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import ResolvedRecipe

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
        self._recipes = recipes
        self.stages: Mapping[str, ResolvedRecipe] = {
            stage.name: recipes[stage.name] for stage in chosen if stage.work is None
        }
        self.works: Mapping[str, str] = {
            stage.name: f"{stage.work.describe(recipes[stage.name].recipe)}, in {stage.folder}"
            for stage in chosen
            if stage.work is not None
        }

    def unchecked(self, name: str) -> tuple[str, ...]:
        """Return the parts that a check cannot see: the model of a parent that is not trained yet."""
        (stage,) = (stage for stage in self._chosen if stage.name == name)
        unmade = [f"the result of the stage {work.name}" for work in stage.works if not evidence.run_of(work.folder)]
        if stage.parent is not None and not stage.parent.has_model:
            unmade = [f"weights and tokenizer of the stage {stage.parent.name}"]
        return tuple(f"{part}, which is not done yet" for part in unmade)

    def run(self, processes: int | None, max_restarts: int, job: Any) -> int:
        """Do the stages that are not done, and return the exit code of the last one that ran.

        Raises:
            UsageError: a stage that is done has changed, or began from another run than that of its parent; the folder
                holds other runs.
            TrainerError: as `run_or_join`.
        """
        with stop_before_training():
            environment = detect()
            pending = self._pending()
            folder = self._whole.recipe.checkpoint.folder
            if not pending and environment.rank == 0:
                say(f"nothing to do: {', '.join(stage.name for stage in self._chosen)} in {folder} are done")
            if environment.has_ranks:
                return self._join(environment, pending, processes, max_restarts, job)
            for stage in pending:
                self._begin(stage)
                resolved, number = self._startable(stage), stage.processes or processes
                if stage.work is not None:
                    do_work(stage.work, resolved, stage.folder, stage.processes)
                elif code := run_or_join(resolved, number, max_restarts, job):
                    return code
                evidence.finish(stage.folder, facts_of(stage, resolved))
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
        for stage in (one for one in pending if one.work is None):
            plan_start(self._trees.resolved(stage), stage.processes or processes, max_restarts)
        set_threads(environment)
        is_first = environment.rank == 0
        meeting = self._meet(environment, pending, job)
        from trainer.training.run import train

        for stage in pending:
            if is_first:
                self._begin(stage)
            resolved = self._startable(stage)
            own = _of_stage(meeting, stage, environment)
            if stage.work is not None:
                work = partial(do_work, stage.work, resolved, stage.folder, stage.processes) if is_first else int
                # No collective, so the other ranks wait as long as the first one works.
                work() if own is None else own.together(work, math.inf)
            else:
                with StopRequest() as stop:
                    end = train(resolved, environment, stop, own, callbacks=job.callbacks)
                if end.exit_code:
                    return end.exit_code
            if is_first:
                evidence.finish(stage.folder, facts_of(stage, resolved))
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
        self._require_own_folder()
        pending: list[Stage] = []
        for stage in self._chosen:
            written, began = evidence.read(stage.folder), _starts(stage, pending)
            if None in began.values():
                missing = next(name for name, run in began.items() if run is None)
                raise UsageError(
                    f"`stage` is {stage.name}, which starts from {missing}, but that is not done; leave `stage` out"
                )
            if written and written["began_from"] != began:
                raise UsageError(
                    f"the stage {stage.name} in {stage.folder} {_other_start(written['began_from'], began)}; remove"
                    f" {stage.folder}, or name another `checkpoint.folder`"
                )
            if not (self._resumes and "run" in written):
                pending.append(stage)
                continue
            facts = facts_of(stage, self._recipes[stage.name])
            if changed := differences(written.get("training", {}), facts):
                raise UsageError(
                    f"the stage {stage.name} is done, but its {'work' if stage.work else 'training'} has changed:"
                    f" {changed}; restore the values, or remove {stage.folder} and the folders of the stages after it"
                )
        return pending

    def _require_own_folder(self) -> None:
        """Refuse a folder with another run, or with stages that the recipe does not list."""
        folder = Path(self._whole.recipe.checkpoint.folder)
        if (folder / METRICS_FILE_NAME).exists():
            raise UsageError(
                f"`checkpoint.folder` is {folder}, which holds a run of a recipe without `stages`; name another folder"
            )
        own = [stage.folder for stage in self._listed]
        for found in sorted(folder.glob(f"[0-9]*-*/{STAGE_FILE_NAME}")):
            if found.parent not in own:
                raise UsageError(
                    f"`checkpoint.folder` is {folder}, where {found.parent.name} is a stage that the recipe does not"
                    " list; restore its name and its place, remove its folder, or name another `checkpoint.folder`"
                )

    def _begin(self, stage: Stage) -> None:
        """Show that a stage begins, and write the run that it begins from."""
        say(f"stage {stage.number} of {len(self._listed)}: {stage.name}, in {stage.folder}")
        if self._resumes or not evidence.read(stage.folder):
            evidence.begin(stage.folder, _starts(stage))

    def _startable(self, stage: Stage) -> ResolvedRecipe:
        """Return the recipe of a stage that begins now; no stand-in has the place of a model that was removed.

        Raises:
            UsageError: the stage before is done, but its model is not there.
        """
        before = stage.parent
        if before is not None and not before.has_model:
            raise UsageError(
                f"the stage {stage.name} starts from the model of {before.name}, which is done, but"
                f" {before.model_folder} does not exist; restore it, or remove {before.folder} and the folders of the"
                " stages after it"
            )
        return self._trees.resolved(stage)

    def _link(self) -> None:
        """Link the model and the checkpoints of the last stage, so that the folder is used as that of a run."""
        last, folder = self._listed[-1], Path(self._whole.recipe.checkpoint.folder)
        if evidence.run_of(last.folder) is None:
            return
        for name in _LINKS:
            link = folder / name
            with suppress(OSError):  # a file system without links: commands take the folder of the stage
                if link.is_symlink():
                    link.unlink()
                if (last.folder / name).exists() and not link.exists():
                    os.symlink(os.path.join(last.folder.name, name), link)


def _other_start(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the difference of two starts of a stage, each the runs that it began from by the names of stages."""
    if before.keys() == now.keys():
        return (
            f"began from another run of {next(name for name in now if now[name] != before[name])} than the present one"
        )
    names = [" and ".join(runs) or "no stage" for runs in (before, now)]
    return "began from {}, but the recipe now starts it from {}".format(*names)


def _starts(stage: Stage, pending: Sequence[Stage] = ()) -> dict[str, str | None]:
    """Return the runs that a stage starts from by their stages: its parent, and all works before it.

    Those of `pending` stages are empty: they come first. None: there is no run.
    """
    before = [*stage.works, *([stage.parent] if stage.parent else [])]
    return {one.name: "" if one in pending else evidence.run_of(one.folder) for one in before}


def facts_of(stage: Stage, resolved: ResolvedRecipe) -> dict[str, Any]:
    """Return the facts of a stage, with its own keys of the model also where a stand-in has others."""
    recipe = resolved.recipe
    if stage.work is not None:
        return evidence.facts_of_work(stage.work.model_dump(mode="json"), recipe)
    if stage.parent is None:
        return evidence.facts_of(recipe)
    model = stage.own_model.plain()
    own = {
        "config": model.get("config"),
        "new_tokens": model.get("new_tokens"),
        "new_head": bool(model.get("new_head")),
    }
    return evidence.facts_of(recipe.model_copy(update={"model": recipe.model.model_copy(update=own)}))


def _of_stage(meeting: Rendezvous | None, stage: Stage, environment: LaunchEnvironment) -> Rendezvous | None:
    """Return the rendezvous of a stage, in which no value of another stage is."""
    if meeting is None:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from trainer.ranks.joining import Rendezvous as Meeting

    return Meeting(PrefixStore(f"stage/{stage.name}", meeting.store), environment, meeting.hosts_store)
