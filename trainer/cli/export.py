"""`trainer export`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.base.extensions import registered
from trainer.base.terminal import say
from trainer.base.text import without_secrets
from trainer.cli.options import OverridesArgument, count, flag

_FORMATS = ("safetensors", *(row.name for row in registered("export")))


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Its folder, or that of a run: then its newest whole one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="To write; empty, or not there yet.")],
    overrides: OverridesArgument = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        typer.Option(help="The type of the weights; a run stores fp32 unless the recipe sets `weights`."),
    ] = "fp32",
    adapter: Annotated[
        bool, flag("Write the adapter alone, in the format of PEFT; default: merged weights.", "--adapter")
    ] = False,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help=f"The format of the model: {', '.join(_FORMATS)}."),
    ] = "safetensors",
    verify: Annotated[
        bool, flag("Compare the folder, opened by another process, with the trained model.", "--verify")
    ] = False,
    rows: Annotated[int, count("Rows of the validation split for --verify.")] = 64,
    calibrate: Annotated[
        bool,
        flag("Divide the logits of classes by the temperature that fits the validation split best.", "--calibrate"),
    ] = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Needs nothing but the checkpoint. Adapters and frozen weights need the model that they began with too, --verify and
    --calibrate the validation split.
    """
    from trainer.base.errors import UsageError
    from trainer.tools.calibrating import Calibration, calibration_lines
    from trainer.tools.certify.verifying import Verification
    from trainer.use.export.exporting import export as export_checkpoint

    if str(folder).startswith("-"):
        raise UsageError(f"`{folder}` is no option of `trainer export`; write the folder after the run: RUN FOLDER")
    if overrides and not (verify or calibrate):
        raise UsageError(
            f"`{overrides[0]}` names rows of the validation split, which only --verify and --calibrate read; add one of"
            " them, or remove it"
        )
    command = without_secrets(shlex.join(["trainer", *sys.argv[1:]]))
    verification = Verification(rows, tuple(overrides or ()), command) if verify else None
    asked = Calibration(tuple(overrides or ()), verification) if calibrate else verification
    done = export_checkpoint(checkpoint, folder, dtype, adapter=adapter, verification=asked, to=to)
    for note in done.notes:
        say(f"note: {note}", err=True)
    files = f"{len(done.weights)} files of weights" if len(done.weights) > 1 else done.weights[0]
    say(
        f"exported {done.checkpoint} (step {done.step:,}) to {done.folder}: {files}, {dtype}, "
        f"{done.num_bytes / 1e6:,.1f} MB"
    )
    if calibrate:
        say(*calibration_lines(done.folder))
    if done.certificate is not None:
        say(*filter(None, done.certificate.lines()))
