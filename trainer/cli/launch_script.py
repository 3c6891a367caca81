"""`trainer launch-script`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.base.terminal import say, say_text
from trainer.cli.options import OverridesArgument, RecipeArgument, count, output_option, value

Target = Literal[
    "slurm", "kubernetes", "jobset", "trainjob", "pytorchjob", "skypilot", "ray", "hf-jobs", "torchrun", "deepspeed",
    "accelerate",
]  # fmt: skip
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
    output: Annotated[Path | None, output_option("The file to write; it must be new.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the job; default: the recipe's.")] = None,
    cpus: Annotated[int | None, count("CPU cores for each GPU; default: 8.")] = None,
    time: Annotated[str | None, value("Time limit (slurm, hf-jobs).", "4:00:00|4h")] = None,
    partition: Annotated[str | None, typer.Option(help="To ask for (slurm).")] = None,
    account: Annotated[str | None, typer.Option(help="To charge (slurm).")] = None,
    container: Annotated[
        str | None, value("Image that holds trainer, such as trainer:cuda, or a .sif file.", "IMAGE")
    ] = None,
    venv: Annotated[str | None, value("Virtual environment that holds trainer.", "FOLDER")] = None,
    hosts: Annotated[str | None, value("Names of the machines, the first one first.", "A,B,...")] = None,
    claim: Annotated[
        str | None,
        value("PersistentVolumeClaim for runs, or bucket of the hub (hf-jobs); default: trainer-runs.", "NAME"),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Local queue of Kueue, which admits the job as a whole.")] = None,
    accelerator: Annotated[
        str | None, value("GPU to ask for (skypilot, hf-jobs); skypilot takes the cheapest of several.", "H100,...")
    ] = None,
    folder_map: Annotated[
        list[str] | None, value("A folder of this machine, and where pods find it in /runs.", "HERE=THERE", "--map")
    ] = None,
    restarts: Annotated[
        int | None, count("Times to start again after a failure; default: 0, or 10 for MIN:MAX.", least=0)
    ] = None,
) -> None:
    """Write the script that starts a recipe on several machines.

    The recipe is planned on N x M ranks first. Needs no cluster and no network.
    """
    from trainer.tools.script import Options, write_launch_script
    from trainer.tools.writing import write_new

    options = Options(
        *(name, cpus, time, partition, account, container, venv, hosts, claim, folder_map or None, restarts),
        queue=queue,
        accelerator=accelerator,
    )
    text, start = write_launch_script(recipe, overrides or (), target, nodes, gpus, options)
    if output is None:
        say_text(text)
        return
    write_new(output, text, "--output")
    if text.startswith("#!"):
        output.chmod(output.stat().st_mode | 0o111)
    say(f"wrote {output}; start it with: {start.format(file=shlex.quote(str(output.absolute())))}", err=True)
