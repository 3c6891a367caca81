"""`trainer launch-script`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.cli.options import OverridesArgument, RecipeArgument

Target = Literal[
    "slurm", "kubernetes", "jobset", "trainjob", "pytorchjob", "skypilot", "ray", "torchrun", "deepspeed", "accelerate"
]
"""The targets of `launch-script`; a test compares them with its table."""


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
    queue: Annotated[str | None, typer.Option(help="Local queue of Kueue, which admits the job as a whole.")] = None,
    accelerator: Annotated[str | None, typer.Option(metavar="H100", help="GPU to ask for (skypilot).")] = None,
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

    The recipe is planned on N x M ranks first. Needs no cluster and no network.
    """
    from trainer.base.disk import write_new
    from trainer.tools.script import Options, write_launch_script

    options = Options(
        *(name, cpus, time, partition, account, container, venv, hosts, claim, folder_map or None, restarts),
        queue=queue,
        accelerator=accelerator,
    )
    text, start = write_launch_script(recipe, overrides or (), target, nodes, gpus, options)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_new(output, text, "--output")
    if text.startswith("#!"):
        output.chmod(output.stat().st_mode | 0o111)
    typer.echo(f"wrote {output}; start it with: {start.format(file=shlex.quote(str(output.absolute())))}", err=True)
