"""`trainer check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.base.errors import RecipeError
from trainer.base.text import aligned, for_terminal
from trainer.cli.options import JsonOption, OverridesArgument, RecipeArgument, print_json

if TYPE_CHECKING:
    from trainer.recipe.drawing import StageContents
    from trainer.recipe.plan import RunPlan
    from trainer.recipe.reading.loading import ResolvedRecipe


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks of the layout to check; none is started.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Check the recipe alone, without its data and model.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the resolved recipe and where each value came from, and check its data and model.

    Also show its layout and batch arithmetic on N ranks. Data and model are checked if they are on this machine: the
    first rows of each split, the tokenizer, the names and sizes of the weights, and the layout of the model with the
    contents of each pipeline stage. This needs no GPU and no network, and trains nothing.
    """
    from trainer.recipe.local_parts import LocalParts
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    plan = plan_run(resolved.recipe, processes)
    local = LocalParts.of(resolved.recipe)
    checked = None
    if not quick and not local.is_empty:
        from trainer.tools.check import check_parts  # brings torch

        checked = check_parts(plan)
    problems = checked.problems if checked else ()
    stages, groups = (checked.model.stages, checked.model.groups.table) if checked and checked.model else (None, ())
    notes = ("`--quick`: data and model are not checked",) if quick else checked.notes if checked else local.notes
    if as_json:
        objects = [dict(zip(groups[0], row, strict=True)) for row in groups[1:]]
        found = {"groups": objects, "problems": problems, "notes": notes}
        print_json({**_as_object(resolved, plan, stages), **found})
    else:
        _print_recipe(resolved)
        _print_plan(plan, stages)
        if groups:
            typer.echo("\n" + "\n".join(aligned(groups)) + "\n")
        for note in notes:
            typer.echo(f"note      {for_terminal(note)}")
        if checked is not None and not problems:
            typer.echo("checked   no problem was found")
    if problems:
        raise RecipeError(*problems)


def _as_object(resolved: ResolvedRecipe, plan: RunPlan, stages: list[StageContents] | None) -> dict[str, Any]:
    from trainer.recipe.deepspeed_config import deepspeed_config

    pipeline = plan.pipeline
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
        "deepspeed": deepspeed_config(plan) or None,
    }


def _print_recipe(resolved: ResolvedRecipe) -> None:
    rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in resolved.values.items()]
    key_width = max(len(key) for key, _ in rows)
    value_width = min(36, max(len(value) for _, value in rows))  # a longer one pushes its origin aside
    for key, value in rows:
        origin = typer.style(str(resolved.origins[key]), dim=True)  # echo drops styles where there is no terminal
        typer.echo(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")


def _print_plan(plan: RunPlan, stages: list[StageContents] | None) -> None:
    from trainer.recipe.deepspeed_config import deepspeed_config
    from trainer.recipe.drawing import layout_lines, stage_lines
    from trainer.recipe.elastic import fitting_sizes

    if table := layout_lines(plan):
        typer.echo("\n" + "\n".join(table))
    typer.echo(
        f"\nlayout    {plan.layout}\nbatch     {plan.batch}\nstrategy  {plan.strategy.name}: {plan.strategy.summary}"
    )
    if (elastic := plan.recipe.parallel.elastic) != "none":
        most = max(16, plan.layout.world_size)
        sizes = ", ".join(map(str, fitting_sizes(plan.recipe, most)))
        typer.echo(f"elastic   {elastic}: of up to {most} processes, all train if there are {sizes}")
    if plan.pipeline is not None:
        typer.echo("\n".join([f"pipeline  {plan.pipeline}", *(f"{'':10}{line}" for line in stage_lines(plan, stages))]))
    if config := deepspeed_config(plan):
        typer.echo(f"deepspeed {json.dumps(config, indent=2)}")
