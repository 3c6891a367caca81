"""The command line: verbs, arguments and exit codes.

A verb imports heavy packages only when it needs them: `run` and `export` import torch, and `check` and `doctor` do for
data and models on this machine, after the recipe was found valid. `doctor` asks torch about GPUs in another process.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer import __version__
from trainer.base.errors import INTERRUPTED, ExitCode, RecipeError, TrainerError, UsageError
from trainer.base.text import for_terminal, without_secrets
from trainer.ranks.environment import forbid_telemetry

if TYPE_CHECKING:
    from trainer.recipe.drawing import StageContents
    from trainer.recipe.plan import PipelinePlan, RunPlan
    from trainer.recipe.reading.loading import ResolvedRecipe

Target = Literal["slurm", "kubernetes", "pytorchjob", "torchrun", "deepspeed", "accelerate"]
"""The targets of `launch-script`; a test compares them with its table."""

app = typer.Typer(
    help="Fine-tunes Hugging Face models from one JSON recipe, on one process or many.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help; the styled one takes longer to import than all else together
)
recipes_app = typer.Typer(help="List the shipped recipes.")
app.add_typer(recipes_app, name="recipes")

# An unknown option counts as an override, so that the error for `--learning_rate 2e-5` names the key to write.
OVERRIDES = {"ignore_unknown_options": True}
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as training.epochs=1.", show_default=False),
]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Ranks to start on this machine; default: one for each GPU, or one."),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code; `argv` holds the arguments after the program's name."""
    forbid_telemetry()
    arguments = _without_local_rank(sys.argv[1:] if argv is None else argv)
    try:
        typer.main.get_command(app).main(list(arguments), prog_name="trainer")
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except TrainerError as error:
        for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
            print(f"error: {for_terminal(without_secrets(problem))}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it, as in `trainer schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


def _without_local_rank(argv: Sequence[str]) -> Iterator[str]:
    """Drop the `--local_rank=N` of the deepspeed launcher; its environment variables hold the same number."""
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--local_rank", "--local-rank"):
            next(arguments, None)
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            yield argument


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainer {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=OVERRIDES)
def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    processes: RanksOption = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart failed ranks from the last checkpoint, N times at most."),
    ] = 0,
) -> None:
    """Train a recipe.

    Under torchrun, accelerate, deepspeed or srun it joins the ranks that it is given; alone it starts its own.
    """
    from trainer.ranks.environment import problems_name_the_machine
    from trainer.recipe.reading.loading import load_recipe

    with problems_name_the_machine():
        resolved = load_recipe(recipe, overrides or ())

    from trainer.launch.local import run_or_join

    raise typer.Exit(run_or_join(resolved, processes, max_restarts))


@app.command(context_settings=OVERRIDES)
def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks of the layout to check; none is started.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Check the recipe alone, without its data and model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the resolved recipe and where each value came from, and check its data and model.

    Also show its layout and batch arithmetic on N ranks. Data and model are checked if they are on this machine: the
    first rows of each split, the tokenizer, the names and sizes of the weights, and the layout of the model with the
    contents of each pipeline stage. This needs no GPU and no network, and trains nothing.
    """
    from trainer.recipe.local_parts import Hand
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    plan = plan_run(resolved.recipe, processes)
    hand = Hand.of(resolved.recipe)
    checked = None
    if not quick and not hand.is_empty:
        from trainer.training.checking import check_parts  # brings torch

        checked = check_parts(plan)
    stages, problems = (checked.stages, checked.problems) if checked else (None, ())
    notes = ("`--quick`: data and model are not checked",) if quick else checked.notes if checked else hand.notes
    if as_json:
        typer.echo(json.dumps({**_as_json(resolved, plan, stages), "problems": problems, "notes": notes}, indent=2))
    else:
        _show(resolved, plan, stages)
        for note in notes:
            typer.echo(f"note      {for_terminal(note)}")
        if checked is not None and not problems:
            typer.echo("checked   no problem was found")
    if problems:
        raise RecipeError(*problems)


def _measure(file: Path | None) -> None:
    if file is None:
        return
    from trainer.tools.plan.measuring import measure_machine

    figures = measure_machine(file)
    speeds = ", ".join(f"{number:,.3f} TFLOP/s in {name}" for name, number in figures["teraflops"].items())
    typer.echo(f"measured  {speeds}; {figures['memory_gb_per_second']:,.1f} GB/s of memory")
    typer.echo(f"wrote     {file}; plan for it with: trainer plan RECIPE --gpus {file}")
    raise typer.Exit


@app.command(context_settings=OVERRIDES)
def plan(
    recipe: RecipeArgument,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="NxMEMORY",
            help="GPUs of each machine, such as 8x80GiB or 8xA100-80 (an unknown name shows all names), or autoxA100-80"
            " for the fewest that are needed.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines.")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of each text; default: data.max_length.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="NAME", help="Link between the GPUs of a machine: nvlink or pcie.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="100Gb", help="Network of each machine, such as 100Gb or 8x400Gb.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="512GiB", help="Memory of each machine, for a verdict on it.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, metavar="N", help="Rows of an epoch, for its hours.")] = None,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0, metavar="PRICE", help="Price of a GPU for an hour.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the pipeline's timeline; `-` draws it as text.")
    ] = None,
    _measured: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE.json",
            is_eager=True,
            callback=_measure,
            help="Measure this machine for half a minute, write its speeds for --gpus, and exit.",
        ),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Plan other layouts, and show the fastest ones.")] = False,
    also: Annotated[Literal["precision"] | None, typer.Option(help="Let the search change fp32 to bf16, too.")] = None,
    largest: Annotated[
        Literal["batch", "length", "model"] | None,
        typer.Option(
            help="Plan the largest batch of one microbatch, the longest texts, or the largest model of the recipe's"
            " shape, that fit."
        ),
    ] = None,
    plans: Annotated[int, typer.Option(min=1, metavar="N", help="Plans of a search.")] = 60,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a recipe that extends this one with the layout found.")
    ] = None,
    most_changes: Annotated[
        int, typer.Option("--changes", min=0, metavar="N", help="Changes to show if the recipe does not fit.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show whether a recipe fits the memory of given GPUs, and the communication and time of a step.

    The engine itself runs one step of one rank without data, weights or GPUs; the model's configuration is enough. If
    the recipe does not fit, changes are planned until `--changes` of them fit. A search plans other layouts.
    """
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe
    from trainer.tools.plan.hardware import parse_devices

    is_auto = gpus.startswith("autox")
    devices = parse_devices(gpus.removeprefix("autox"), link, network, host_memory)
    words = tuple(overrides or ())
    if write is not None and not (search or largest or is_auto):
        raise UsageError("`--write` writes a layout that was found; add --search, --largest or --gpus autoxMEMORY")
    if largest is not None and (search or is_auto):
        raise UsageError("`--largest` takes the layout of the recipe; leave out --search, and give a number of GPUs")
    for option, given in (("--rows", rows), ("--price-per-gpu-hour", price), ("--timeline", timeline)):
        if search and given is not None:
            raise UsageError(
                f"`{option}` is {given}, but a search shows no single layout; plan the layout that it finds"
            )
    if also is not None and not search:
        raise UsageError(f"`--also` is {also}, but only a search changes it; add --search")
    sought = {"batch": ("training.global_batch_size", "training.micro_batch_size"), "length": ("data.max_length",)}
    for word in [word for word in words if word.partition("=")[0] in sought.get(largest or "", ())]:
        typer.echo(f"note: {word} gives way to --largest {largest}", err=True)
        words = tuple(other for other in words if other != word)
    resolved = load_recipe(recipe, words)

    with importing():
        from trainer.tools.plan.plan_lines import (
            cost_lines,
            draw_timeline,
            lines,
            search_as_object,
            search_lines,
        )
        from trainer.tools.plan.recipe_plan import as_object, changes_that_fit, cost_of, plan_recipe
        from trainer.tools.plan.searching import Search, fewest_devices, write_recipe

    chosen: tuple[str, ...] = ()
    if is_auto:
        devices, nodes, choice = fewest_devices(recipe, words, devices, length)
        chosen, made = choice.overrides, choice.made
    if search:
        found = Search(recipe, words, devices, nodes, length, plans, any_precision=also == "precision").fastest()
        if write is not None and found.choices:
            write_recipe(write, recipe, (*words, *found.choices[0].overrides))
        if as_json:
            typer.echo(json.dumps(search_as_object(found), indent=2))
        else:
            typer.echo(f"{nodes} x {devices.number} {devices.name}\n" + "\n".join(search_lines(found)))
        return
    if largest is not None:
        searched = Search(recipe, words, devices, nodes, None if largest == "length" else length)
        sizes = {"batch": searched.largest_batch, "length": searched.largest_length, "model": searched.largest_model}
        fitting = sizes[largest]()
        if fitting is None:
            raise UsageError(f"no {largest} fits on {nodes} x {devices.number} {devices.name}; plan without --largest")
        chosen, made = fitting.overrides, fitting.made
    elif not is_auto:
        made = plan_recipe(resolved, devices, nodes, length)
    if write is not None:
        write_recipe(write, recipe, (*words, *chosen))
    changes = None if made.fits or most_changes == 0 else changes_that_fit(recipe, words, made, nodes, most_changes)
    cost = cost_of(made, rows, price)
    if as_json:
        found_words = {"overrides": chosen, "training": cost and asdict(cost)}
        typer.echo(json.dumps({**as_object(made, changes or []), **found_words}, indent=2))
    else:
        if chosen:
            typer.echo(f"found     {nodes} x {devices.number} {devices.name}: {' '.join(chosen)}")
        typer.echo("\n".join([*lines(made, changes), *cost_lines(cost)]))
    if timeline is not None:
        typer.echo(draw_timeline(made, timeline), nl=False, err=as_json)


@app.command(context_settings=OVERRIDES)
def rehearse(
    recipe: RecipeArgument,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of the run; none needs to exist.")],
    overrides: OverridesArgument = None,
    rank: Annotated[int, typer.Option(metavar="R", help="The rank to build.")] = 0,
    local_ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks of each machine; default: the most up to 8 that divide all."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of each text; default: data.max_length.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of an epoch, to show those of the first step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what one rank of a large run holds, sends, reads and writes, without its hardware.

    The engine, optimizer and checkpoints of a run work on one rank of N, with tensors that have shapes and no memory.
    The model's configuration is enough; data and weights are not needed.
    """
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe

    resolved = load_recipe(recipe, overrides or ())

    with importing():
        from trainer.tools.plan import rehearsal

    found = rehearsal.rehearse(resolved, ranks, rank, local_ranks, length, rows)
    typer.echo(rehearsal.as_json(found) if as_json else "\n".join(rehearsal.lines(found)))


@app.command(context_settings=OVERRIDES)
def compare(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=V1,V2",
            help="Overrides; several values of a key are compared, each with all others.",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Layouts to compare, as overrides, a layout a line.")
    ] = None,
    processes: RanksOption = None,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Steps of each of the two turns of a layout.")] = 30,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the results; default: runs/NAME-compare."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device as in `trainer plan --gpus`, to plan the time of a step."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PEER",
            help="Train the same batches by `pytorch`, a plain loop, `transformers`, `accelerate`, `accelerate_fsdp2`"
            " or `deepspeed`.",
        ),
    ] = None,
) -> None:
    """Train a recipe under several layouts on this machine, and show the costs of each and whether it learns the same.

    Without other values or a file, these are the recipe's layout, every strategy that combines, two tensor ranks, two
    stages, recomputation and each precision. Each layout trains in turns in new processes, without checkpoints. One
    that fails is shown with its reason. After Ctrl-C, the same command goes on.
    """
    from trainer.tools.compare.compare import compare as compare_layouts

    raise typer.Exit(
        compare_layouts(recipe, overrides or (), layouts, processes, steps, output, hardware, peers or (), typer.echo)
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page; default: report.html in the first folder."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Draw curves in the terminal, and write no page.")] = False,
) -> None:
    """Write one HTML page with the curves of runs, the differences of their recipes, and the facts of each.

    The page needs no network. Runs may still train, or may have been killed.
    """
    if plain:
        from trainer.tools.report.plain import plain_lines
        from trainer.tools.report.report import read_runs

        for line in plain_lines(read_runs(runs), shutil.get_terminal_size().columns):
            typer.echo(line)
        return
    from trainer.tools.report.report import write_report

    typer.echo(write_report(runs, output))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder above the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run.")] = False,
) -> None:
    """List the runs in a folder: state, step, best evaluation, time and size on disk."""
    from trainer.tools.report.listing import find_runs, listing

    found = find_runs(folder)
    for line in [json.dumps(asdict(one)) for one in found] if as_json else listing(found):
        typer.echo(line)


@app.command(context_settings=OVERRIDES)
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check the needs of this recipe.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks of the recipe; default: those that `run` would start.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compute on every GPU, and sum over them by NCCL; takes memory there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine is fit to train, and name the fix of each problem.

    This changes nothing. The exit code is 1 if there is a problem, and 0 if there is none, or warnings only.
    """
    resolved = None
    if recipe is not None:
        from trainer.recipe.reading.loading import load_recipe

        resolved = load_recipe(recipe, overrides or ()).recipe

    from trainer.tools.doctor.examining import examine_this_machine
    from trainer.tools.doctor.finding_lines import as_object, lines

    results = examine_this_machine(resolved, processes, deep)
    if as_json:
        typer.echo(json.dumps(as_object(results), indent=2))
    else:
        typer.echo("\n".join(lines(results, shutil.get_terminal_size((120, 24)).columns)))
    if any(result.status == "problem" for result in results):
        raise typer.Exit(ExitCode.FAILED)


@app.command("launch-script", context_settings=OVERRIDES)
def launch_script(
    recipe: RecipeArgument,
    target: Annotated[Target, typer.Option("--on", help="Program that starts the ranks.", show_default=False)],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX", help="Machines; MIN:MAX: they may join and leave (torchrun).", show_default=False
        ),
    ],
    gpus: Annotated[
        int, typer.Option(min=1, metavar="M", help="GPUs of each machine, with a rank for each.", show_default=False)
    ],
    overrides: OverridesArgument = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write; it must be new.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the job; default: the recipe's.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU cores for each GPU; default: 8.")] = None,
    time: Annotated[str | None, typer.Option(metavar="4:00:00", help="Time limit (slurm).")] = None,
    partition: Annotated[str | None, typer.Option(help="To ask for (slurm).")] = None,
    account: Annotated[str | None, typer.Option(help="To charge (slurm).")] = None,
    container: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Image that holds trainer, such as trainer:cuda, or a .sif file."),
    ] = None,
    venv: Annotated[str | None, typer.Option(metavar="FOLDER", help="Virtual environment that holds trainer.")] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the machines, the first one first.")
    ] = None,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="PersistentVolumeClaim for runs; default: trainer-runs.")
    ] = None,
    folder_map: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="HERE=THERE", help="A folder of this machine, and where pods find it in /runs."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Times to start again after a failure; default: 0, or 10 for MIN:MAX."),
    ] = None,
) -> None:
    """Write the script that starts a recipe on several machines.

    The recipe is resolved and planned on N x M ranks first. Needs no cluster, no GPU and no network.
    """
    from trainer.tools.script import Options, write_launch_script

    options = Options(name, cpus, time, partition, account, container, venv, hosts, claim, folder_map or None, restarts)
    text, start = write_launch_script(recipe, overrides or (), target, nodes, gpus, options)
    if output is None:
        typer.echo(text, nl=False)
        return
    _write_new(output, text)
    if text.startswith("#!"):
        output.chmod(output.stat().st_mode | 0o111)
    typer.echo(f"wrote {output}; start it with: {start.format(file=shlex.quote(str(output)))}", err=True)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Its folder, or that of a run: then its newest whole one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="To write; empty, or not there yet.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        typer.Option(help="The type of the weights; a run stores fp32 unless the recipe sets `weights`."),
    ] = "fp32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter alone, in the format of PEFT; default: merged weights.")
    ] = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Needs nothing but the checkpoint: no GPU, no network, neither the recipe nor the model that it began with. A
    checkpoint of an adapter or of frozen weights needs that model too.
    """
    from trainer.training.export import export as export_checkpoint

    done = export_checkpoint(checkpoint, folder, dtype, adapter=adapter)
    for note in done.notes:
        typer.echo(f"note: {for_terminal(note)}", err=True)
    files = f"{len(done.weights)} files of weights" if len(done.weights) > 1 else done.weights[0]
    typer.echo(
        f"exported {done.checkpoint} (step {done.step:,}) to {done.folder}: {files}, {dtype}, "
        f"{done.num_bytes / 1e6:,.1f} MB"
    )


RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder of a run or of an exported model; of a run, best/ or else model/."),
]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="The recipe of a model that trainer did not export.")
]


@app.command(context_settings=OVERRIDES)
def evaluate(
    run: RunArgument,
    overrides: OverridesArgument = None,
    recipe: RecipeOption = None,
    processes: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute the metrics of a trained model.

    The rows are those of `data.validation`; set data.validation=FILE for others. The layout is that of the training,
    or ddp on one process and after DeepSpeed; keys of `parallel` set another.
    """
    resolved = _trained(run, recipe, overrides, processes, evaluates=True)

    from trainer.launch.local import run_or_join
    from trainer.training.evaluate import Evaluation

    raise typer.Exit(run_or_join(resolved, processes, job=Evaluation(as_json)))


@app.command(context_settings=OVERRIDES)
def predict(
    run: RunArgument,
    input_: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="FILE",
            help="Rows: JSON Lines, CSV, Parquet or CoNLL by the ending, or - for JSON Lines on stdin.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file to write, or - for JSON Lines on stdout.")
    ],
    overrides: OverridesArgument = None,
    recipe: RecipeOption = None,
    processes: RanksOption = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of one forward pass; default: evaluation.batch_size.")
    ] = None,
    chunk_rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rows in memory at once; a kill loses the work on one chunk.")
    ] = 10_000,
    keep: Annotated[
        Literal["all", "none"], typer.Option(help="Columns of the input that the output has, beside the predictions.")
    ] = "all",
    top: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Write the probabilities of the N most probable classes; default: of all."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Column of texts to embed, perhaps several times; default: the first one."),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Write the error of a bad row in its place, and go on.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
) -> None:
    """Write the predictions of a trained model, one row for each row of a file.

    After a kill, the same command goes on where it stopped. The columns are those of the recipe's task; it needs no
    labels.
    """
    from trainer.training.predict import STANDARD, Prediction, Request, spooled

    sizes = [] if batch_size is None else [f"evaluation.batch_size={batch_size}"]
    resolved = _trained(run, recipe, [*(overrides or ()), *sizes], processes, evaluates=False)

    from trainer.launch.local import run_or_join

    with spooled(input_) as file:
        shown = "stdin" if input_ == STANDARD else input_
        job = Prediction(
            Request(file, shown, output, chunk_rows, keep, top, overwrite, skip_bad_rows, tuple(column or ()))
        )
        code = run_or_join(resolved, processes, job=job)
    raise typer.Exit(code)


def _trained(
    run: Path, recipe: str | None, overrides: Sequence[str] | None, processes: int | None, evaluates: bool
) -> ResolvedRecipe:
    """Return the recipe of a trained model, and show the notes on it once."""
    from trainer.launch.local import number_of_ranks
    from trainer.ranks.environment import detect, problems_name_the_machine
    from trainer.recipe.reading.trained import load_trained

    with problems_name_the_machine():
        trained = load_trained(run, recipe, overrides or (), number_of_ranks(processes), evaluates)
    if detect().rank == 0:
        for note in trained.notes:
            typer.echo(note, err=True)
    return trained.resolved


@app.command()
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="TrainingArguments as JSON, a DeepSpeed JSON, an accelerate YAML."),
    ],
    source: Annotated[
        Literal["training-arguments", "deepspeed", "accelerate"] | None,
        typer.Option("--from", help="Tool that the file belongs to; default: its keys decide."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The recipe to write; it must be new.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks of that training; their batches together make a step.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Report also keys without an effect, such as defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print recipe and report as one JSON object.")] = False,
) -> None:
    """Turn the files of Trainer, DeepSpeed and accelerate into a recipe.

    The recipe goes to the standard output or into a new file. A report on each key goes to the standard error.
    """
    from trainer.tools.convert.convert import convert as convert_files
    from trainer.tools.convert.sources import Tool

    done = convert_files(files, Tool(source) if source else None, processes, output.parent if output else Path())
    if output is not None:
        _write_new(output, done.text())
    if as_json:
        typer.echo(json.dumps(done.as_json(), indent=2))
        return
    if output is None:
        typer.echo(done.text(), nl=False)
    typer.echo(done.report(everything), nl=False, err=True)
    typer.echo(f"next: trainer check {output or 'RECIPE'}", err=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trainer.base import extensions
    from trainer.recipe.registered import file_schema

    extensions.load()
    typer.echo(json.dumps(file_schema(), indent=2))


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    from trainer.base import extensions

    extensions.load()
    if context.invoked_subcommand is not None:
        return
    from trainer.recipe.reading.shipped import is_base, shipped_recipes, summary

    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    for name, path in sorted(shipped.items(), key=lambda item: is_base(item[1])):
        typer.echo(f"{name:<{width}}  {'(to extend) ' if is_base(path) else ''}{summary(path)}")


@recipes_app.command()
def show(name: Annotated[str, typer.Argument(help="As `trainer recipes` lists it.", show_default=False)]) -> None:
    """Print a shipped recipe."""
    from trainer.recipe.reading.shipped import shipped_recipes

    shipped = shipped_recipes()
    path = shipped.get(name.removesuffix(".json"))
    if path is None:
        near = get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(shipped)}"
        raise UsageError(f"no shipped recipe is called {name!r}; {hint}")
    typer.echo(path.read_text(encoding="utf-8"), nl=False)


def _write_new(path: Path, text: str) -> None:
    """Write a new file.

    Raises:
        UsageError: The file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"--output must name a new file, but {path} exists; name another") from error
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}; name another") from error


def _as_json(resolved: ResolvedRecipe, plan: RunPlan, stages: list[StageContents] | None) -> dict[str, object]:
    from trainer.recipe.deepspeed_config import deepspeed_config

    return {
        "file": str(resolved.file),
        "recipe": resolved.recipe.model_dump(mode="json"),
        "origins": {key: str(origin) for key, origin in resolved.origins.items()},
        "layout": plan.layout.sizes,
        "batch": asdict(plan.batch),
        "pipeline": _pipeline_as_json(plan.pipeline, stages) if plan.pipeline else None,
        "deepspeed": deepspeed_config(plan) or None,
    }


def _pipeline_as_json(pipeline: PipelinePlan, stages: list[StageContents] | None) -> dict[str, object]:
    return {
        "schedule": pipeline.schedule.name,
        "num_ranks": pipeline.num_ranks,
        "stages_per_rank": pipeline.stages_per_rank,
        "num_stages": pipeline.num_stages,
        "num_microbatches": pipeline.num_microbatches,
        "bubble": pipeline.bubble,
        "stages_of_ranks": [pipeline.stages_of(rank) for rank in range(pipeline.num_ranks)],
        "stages": [asdict(stage) for stage in stages] if stages else None,
    }


def _elastic_line(plan: RunPlan) -> str:
    """Return the numbers of ranks without spare ones; empty if nodes may not join and leave."""
    from trainer.recipe.elastic import fitting_sizes

    if plan.recipe.parallel.elastic == "none":
        return ""
    most = max(16, plan.layout.world_size)
    sizes = ", ".join(map(str, fitting_sizes(plan.recipe, most)))
    return f"elastic   {plan.recipe.parallel.elastic}: of up to {most} processes, all train if there are {sizes}"


def _show(resolved: ResolvedRecipe, plan: RunPlan, stages: list[StageContents] | None) -> None:
    from trainer.recipe.deepspeed_config import deepspeed_config
    from trainer.recipe.drawing import layout_lines, stage_lines

    rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in resolved.values.items()]
    key_width = max(len(key) for key, _ in rows)
    value_width = min(36, max(len(value) for _, value in rows))  # a longer one pushes its origin aside
    for key, value in rows:
        origin = typer.style(str(resolved.origins[key]), dim=True)  # echo drops styles where there is no terminal
        typer.echo(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")
    if table := layout_lines(plan):
        typer.echo("\n" + "\n".join(table))
    typer.echo(
        f"\nlayout    {plan.layout}\nbatch     {plan.batch}\nstrategy  {plan.strategy.name}: {plan.strategy.summary}"
    )
    if line := _elastic_line(plan):
        typer.echo(line)
    if plan.pipeline is not None:
        typer.echo("\n".join([f"pipeline  {plan.pipeline}", *(f"{'':10}{line}" for line in stage_lines(plan, stages))]))
    if config := deepspeed_config(plan):
        typer.echo(f"deepspeed {json.dumps(config, indent=2)}")
