"""`trainer check`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.base.terminal import say, say_styled
from trainer.base.text import aligned, one_line
from trainer.cli.options import (
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    count,
    flag,
    print_json,
    show_error,
    without_repetitions,
)

if TYPE_CHECKING:
    from trainer.recipe.drawing import StageContents
    from trainer.recipe.plan import RunPlan
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.training.checking import CheckedParts


_WIDTH = 120


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    processes: Annotated[int, count("Ranks of the layout to check; none is started.")] = 1,
    everything: Annotated[
        bool, flag("Show the value of every key with its origin, and DeepSpeed's configuration.", "--all")
    ] = False,
    quick: Annotated[bool, flag("Check the recipe alone, without its data and model.", "--quick")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe, its data and its model; show the keys of its file and the numbers that follow from them.

    Data and model are checked if they are on this machine, also in the hub's cache: the first rows of each split, the
    tokenizer, the names and sizes of the weights, and the contents of each pipeline stage. The last line names the
    parts that are not. It needs no GPU and no network.
    """
    from trainer.recipe.reading.loading import load_recipe

    whole = load_recipe(recipe, overrides or (), is_whole=True)
    if whole.chain is None:
        found, code = _check(whole, processes, everything, quick, as_json)
    else:
        found, code = {"stages": {}, "works": dict(whole.chain.works)}, 0
        for name, work in whole.chain.works.items():
            say(*() if as_json else (f"stage     {name}: {work}",))
        for name, stage in whole.chain.stages.items():
            say(*() if as_json else ("", f"stage     {name}"))
            found["stages"][name], of_stage = _check(
                stage, processes, everything, quick, as_json, whole.chain.unchecked(name), f" (stage `{name}`)"
            )
            code = code or of_stage
    if as_json:
        print_json(found)
    if code:
        raise typer.Exit(code)


def _check(
    resolved: ResolvedRecipe,
    processes: int,
    everything: bool,
    quick: bool,
    as_json: bool,
    before: Sequence[str] = (),
    place: str = "",
) -> tuple[dict[str, Any], int]:
    """Check a training, and show it unless its object is asked for; return that, and the exit code.

    Args:
        before: parts that are not checked, because they are not made yet.
        place: words behind each problem, if there are several trainings.
    """
    from trainer.recipe.local_parts import LocalParts
    from trainer.recipe.plan import plan_run

    plan = plan_run(resolved.recipe, processes)
    checked = None
    unchecked: tuple[str, ...] = ("`--quick`: data and model",)
    if not quick:
        from trainer.tools.plan.shapes import shipped_models

        local = LocalParts.of(resolved.recipe)
        # A shape of the package stands for the configuration alone.
        is_shaped = bool(shipped_models(resolved.recipe))
        unchecked = tuple(part.replace("(configuration, ", "(") if is_shaped else part for part in local.unchecked)
        if is_shaped or not local.is_empty:
            from trainer.tools.check import check_local_parts  # brings torch

            checked = check_local_parts(plan)
    error = checked.problems.error if checked else None
    if error is not None:
        show_error(error, place)
    unchecked = (*unchecked, *before)
    if not as_json:
        _print_everything(resolved) if everything else _print_written(resolved)
        _print_plan(plan, checked.model.stages if checked else None, everything)
        if checked is not None:
            _print_checked(plan, checked)
        for part in unchecked or ("memory and time of a step: `trainer plan` computes them",):
            say(f"unchecked {part}")
    found = {**_as_object(resolved, plan, checked), "unchecked": unchecked} if as_json else {}
    return found, int(error.exit_code) if error is not None else 0


def _as_object(resolved: ResolvedRecipe, plan: RunPlan, checked: CheckedParts | None) -> dict[str, Any]:
    pipeline = plan.pipeline
    stages, groups = (checked.model.stages, checked.model.groups.table) if checked else (None, ())
    return {
        "file": str(resolved.file),
        "recipe": resolved.recipe.model_dump(mode="json"),
        "origins": {key: str(origin) for key, origin in resolved.origins.items()},
        "layout": plan.layout.sizes,
        "batch": asdict(plan.batch),
        "pipeline": pipeline
        and {
            "schedule": pipeline.schedule.name,
            "num_ranks": pipeline.num_ranks,
            "stages_per_rank": pipeline.stages_per_rank,
            "num_stages": pipeline.num_stages,
            "num_microbatches": pipeline.num_microbatches,
            "bubble": pipeline.bubble,
            "stages_of_ranks": [pipeline.stages_of(rank) for rank in range(pipeline.num_ranks)],
            "stages": [asdict(stage) for stage in stages] if stages else None,
        },
        "deepspeed": plan.engine_keys() or None,
        "groups": [dict(zip(groups[0], row, strict=True)) for row in groups[1:]],
        "problems": checked.problems.messages if checked else (),
        "notes": checked.notes if checked else (),
    }


def _print_written(resolved: ResolvedRecipe) -> None:
    """Print the keys of the recipe's own file and of the command line, a section on each line."""
    from trainer.recipe.reading.files import shown_path

    own = (shown_path(resolved.file), "command line")
    sections: dict[str, list[str]] = {"recipe": []}
    for key, value in resolved.values.items():
        if resolved.origins[key].source in own:
            section, _, name = key.partition(".") if "." in key else ("recipe", "", key)
            shown = json.dumps(value, ensure_ascii=False)
            sections.setdefault(section, []).append(f"{name}={shown}")
    for section, pairs in sections.items():
        text = f"{section:<9} {', '.join(pairs)}"
        lines = textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
        say(*lines)
    bases = {origin.source for origin in resolved.origins.values()} - {*own, "default"}
    number = sum(origin.source in bases for origin in resolved.origins.values())
    more = f"{number} keys of {', '.join(sorted(bases))}, and " if bases else ""
    say(f"others    {more}defaults: --all shows them")


def _print_everything(resolved: ResolvedRecipe) -> None:
    rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in resolved.values.items()]
    key_width = max(len(key) for key, _ in rows)
    value_width = min(36, max(len(value) for _, value in rows))  # a longer one pushes its origin aside
    for key, value in rows:
        origin = typer.style(one_line(str(resolved.origins[key])), dim=True)
        say_styled(f"{one_line(f'{key:<{key_width}}  {value:<{value_width}}')}  {origin}")


def _print_plan(plan: RunPlan, stages: list[StageContents] | None, everything: bool) -> None:
    from trainer.recipe.registered import asked_for

    axes = sum(size > 1 for size in plan.layout.sizes.values())
    if (everything or axes > 1) and (table := layout_lines(plan)):
        say("", *table)
    say("", f"layout    {plan.layout}", f"batch     {plan.batch}")
    experts = f"; a rank holds at most 1/{plan.layout.ep} of the experts" if plan.layout.ep > 1 else ""
    say(f"strategy  {plan.strategy.name}: {plan.strategy.summary}{experts}")
    for launch in asked_for("elastic", plan.recipe):
        say(f"elastic   {launch().summary(plan.recipe, plan.layout.world_size)}")
    if plan.pipeline is not None:
        say(f"pipeline  {plan.pipeline}", *(f"{'':10}{line}" for line in stage_lines(plan, stages)))
    if everything and (config := plan.engine_keys()):
        say(f"{plan.strategy.package} {json.dumps(config, indent=2)}")


def _print_checked(plan: RunPlan, checked: CheckedParts) -> None:
    from trainer.tools.check import num_checked_rows

    if rows := num_checked_rows(plan, checked.data):
        say(f"steps     {plan.total_steps(rows):,}, {plan.steps_per_epoch(rows):,} per epoch of {rows:,} rows")
    if groups := checked.model.groups.table:
        say("", *aligned(groups), "")
    for note in without_repetitions(checked.notes):
        say(f"note      {note}")
    if not checked.problems.messages:
        say(f"checked   no problem was found{' in the other parts' if checked.local.unchecked else ''}")


def layout_lines(plan: RunPlan) -> list[str]:
    """Return the lines of a table of the ranks; empty for one process."""
    from trainer.recipe.drawing import layout_table

    table, folded = layout_table(plan)
    return aligned(table) + ["(consecutive ranks differ in the rightmost column)"] * (folded > 1)


def stage_lines(plan: RunPlan, stages: Sequence[StageContents] | None) -> list[str]:
    """Return a line for each pipeline stage, with sizes in fp32.

    Args:
        stages: The contents of each stage; None if the model is not loaded.
    """
    from trainer.recipe.drawing import layers_text

    if plan.pipeline is None:
        return []
    if stages is None:
        return ["layers are balanced over the stages when the model is loaded"]
    layout, cuts = plan.layout, plan.strategy.cuts_parameters
    # Expert ranks are data ranks: FSDP shards experts and all other parameters over as many.
    shards = layout.dp_shard * layout.ep if cuts else 1
    scope = "a rank"
    if layout.tp > 1:
        scope = "before tensor and data-parallel sharding" if shards > 1 else "before tensor sharding"
        shards = 1
    if layout.ep > 1 and not cuts:
        scope = "before experts are divided" if layout.tp == 1 else f"{scope}, and before experts are divided"
    rows = [
        (
            f"stage {number}",
            layers_text(stage.layers),
            f"{stage.num_parameters:,} parameters",
            f"{4 * -(-stage.num_parameters // shards) / 2**20:,.1f} MiB",
        )
        for number, stage in enumerate(stages)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{name:<{widths[0]}}  {layers:<{widths[1]}}  {count:>{widths[2]}}  {size:>{widths[3]}} {scope}"
        for name, layers, count, size in rows
    ]
