"""`trainer plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer.base.terminal import say, say_text
from trainer.cli.options import (
    JsonOption,
    LengthOption,
    OverridesArgument,
    RecipeArgument,
    count,
    devices,
    flag,
    print_json,
    value,
)

if TYPE_CHECKING:
    from trainer.tools.plan.machine_request import MachineRequest

_AUTO = "autox"  # before a device: the fewest of them
_RUN = "trainer.cli.plan.run"


def _measure(file: Path | None) -> None:
    if file is None:
        return
    from trainer.tools.plan.measuring import measure_machine

    figures = measure_machine(file)
    speeds = ", ".join(f"{number:,.3f} TFLOP/s in {name}" for name, number in figures["teraflops"].items())
    say(f"measured  {speeds}; {figures['memory_gb_per_second']:,.1f} GB/s of memory")
    say(f"wrote     {file}; plan for it with: trainer plan RECIPE --gpus {file}")
    raise typer.Exit


def _calibrate(context: typer.Context, run: Path | None) -> None:
    """Calibrate by a run, or leave that to `_rates`: click calls the callbacks in the order of the command line."""
    if run is not None and "rates" in context.params:
        _correct(run, context.params["rates"])
    context.meta[_RUN] = run


def _rates(context: typer.Context, rates: str | None) -> str | None:
    if (run := context.meta.get(_RUN)) is not None:
        _correct(run, rates)
    return rates


def _correct(run: Path, rates: str | None) -> None:
    from trainer.base.collector import importing
    from trainer.base.errors import UsageError
    from trainer.tools.plan.rates import NO_RATES, rates_file

    file = rates_file(rates)
    if file is None:
        raise UsageError(f"`--rates` is {NO_RATES}, but `--calibrate` writes a file of rates; name it, or leave it out")
    with importing():
        from trainer.tools.plan.calibrating import calibrate

    say(*calibrate(run, file))
    raise typer.Exit


def _plan_any(request: MachineRequest, everything: bool, as_json: bool) -> None:
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe
    from trainer.tools.plan.reachable import require_reachable
    from trainer.tools.plan.shapes import known_shapes

    resolved = load_recipe(request.recipe, request.overrides, needs_data=False)
    require_reachable(resolved.recipe.model, known_shapes())
    with importing():
        from trainer.tools.plan.machines import as_object, find_machines
        from trainer.tools.plan.plan_text import machines_text

    result = find_machines(request, resolved)
    if as_json:
        print_json(as_object(result))
    else:
        say_text(machines_text(result, everything, request.spot))


def plan(
    recipe: RecipeArgument,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="NxMEMORY",
            help="GPUs of each machine, such as 8x80GiB or 8xA100-80; autoxA100-80: the fewest that fit; any: all known"
            " GPUs by time and price.",
            show_default=False,
            autocompletion=devices,
        ),
    ],
    overrides: OverridesArgument = None,
    nodes: Annotated[int, count("Machines.")] = 1,
    length: LengthOption = None,
    link: Annotated[str | None, value("Link between the GPUs of a machine: nvlink or pcie.", "NAME")] = None,
    network: Annotated[str | None, value("Network of each machine, such as 100Gb or 8x400Gb.", "100Gb")] = None,
    host_memory: Annotated[str | None, value("Memory of each machine, for a verdict on it.", "512GiB")] = None,
    rows: Annotated[int | None, count("Rows of an epoch, for its hours.")] = None,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0, metavar="PRICE", help="Price of a GPU for an hour.")
    ] = None,
    timeline: Annotated[Path | None, value("Draw the pipeline's timeline; `-` draws it as text.", "FILE.svg")] = None,
    _measured: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE.json",
            is_eager=True,
            callback=_measure,
            help="Measure this machine, write its speeds for --gpus, and exit.",
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=_rates,
            help="Corrected rates that --calibrate wrote; `none` leaves them out, the default is a file of the cache.",
        ),
    ] = None,
    _calibrated: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            is_eager=True,
            callback=_calibrate,
            help="Show the plan of a run beside its measured steps, correct the rates of its device, and exit.",
        ),
    ] = None,
    search: Annotated[bool, flag("Plan other layouts, and show the fastest ones.", "--search")] = False,
    also: Annotated[Literal["precision"] | None, typer.Option(help="Let the search change fp32 to bf16, too.")] = None,
    largest: Annotated[
        Literal["batch", "length", "model"] | None,
        typer.Option(
            help="Plan the largest batch of one microbatch, the longest texts, or the largest model of the recipe's"
            " shape, that fit."
        ),
    ] = None,
    plans: Annotated[int, count("Plans of a search.")] = 60,
    write: Annotated[Path | None, value("Write a recipe that extends this one with the layout found.", "FILE")] = None,
    most_changes: Annotated[int, count("Changes to show if the recipe does not fit.", "--changes", least=0)] = 3,
    within: Annotated[str | None, value("With --gpus any: the longest time of the training.", "6h")] = None,
    at_most: Annotated[str | None, value("With --gpus any: the highest price of the training.", "50USD")] = None,
    prices: Annotated[Path | None, value("With --gpus any: prices of a GPU for an hour.", "FILE")] = None,
    spot: Annotated[
        str | None, value("With --gpus any: the time between interruptions of a machine, for spot prices.", "8h")
    ] = None,
    everything: Annotated[bool, flag("With --gpus any: show all that fit.", "--all")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show whether a recipe fits the memory of given GPUs, and the communication and time of a step.

    It needs the configuration of the model, and no data, weights or GPUs. If the recipe does not fit, changes that fit
    are shown.
    """
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe
    from trainer.tools.plan.hardware import parse_devices
    from trainer.tools.plan.machine_request import ANY, MachineLimits, MachineRequest, require_unused
    from trainer.tools.plan.rates import corrected
    from trainer.tools.plan.reachable import require_reachable
    from trainer.tools.plan.request import PlanRequest
    from trainer.tools.plan.shapes import known_shapes

    limits = MachineLimits(within, at_most, prices, spot, everything, rates, plans)
    if gpus.strip().lower() == ANY:
        require_unused({
            "--nodes": nodes > 1, "--link": link, "--network": network, "--host-memory": host_memory,
            "--price-per-gpu-hour": price is not None, "--timeline": timeline, "--search": search, "--also": also,
            "--largest": largest, "--write": write,
        })  # fmt: skip
        _plan_any(MachineRequest.of(recipe, tuple(overrides or ()), length, rows, limits), limits.everything, as_json)
        return
    limits.require_any(gpus)
    devices = corrected(parse_devices(gpus.removeprefix(_AUTO), link, network, host_memory), rates)
    request = PlanRequest(
        recipe, tuple(overrides or ()), devices, gpus.startswith(_AUTO), nodes, length, rows, price, timeline,
        search=search, any_precision=also is not None, largest=largest, most_plans=plans, write=write,
        most_changes=most_changes,
    )  # fmt: skip
    request.check()
    for word in request.replaced:
        say(f"note: --largest {largest} overrides {word}", err=True)
    resolved = load_recipe(recipe, request.overrides, needs_data=False, is_whole=True)
    require_reachable(resolved.recipe.model, known_shapes())

    with importing():
        from trainer.tools.plan.answer import answer, answer_chain
        from trainer.tools.plan.plan_text import draw_timeline

    answered = answer_chain(request, resolved.chain) if resolved.chain else answer(request, resolved)
    if as_json:
        print_json(answered.values)
    else:
        say_text(answered.text)
    if timeline is not None and answered.made is not None:
        say_text(draw_timeline(answered.made, timeline), err=as_json)
