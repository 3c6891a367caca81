"""The program: its verbs, the errors that it shows, and its exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import signature
from typing import Annotated, Any

import typer

from trainer import __version__
from trainer.base.errors import INTERRUPTED, ExitCode, TrainerError, UsageError
from trainer.cli import (
    check,
    compare,
    convert,
    doctor,
    evaluate,
    export,
    init,
    launch_script,
    mine,
    plan,
    predict,
    preview,
    push,
    recipes,
    rehearse,
    report,
    run,
    runs,
    schema,
    search,
    why,
)
from trainer.cli.options import show_error
from trainer.ranks.environment import forbid_telemetry

_VERBS = (
    init.init, run.run, check.check, preview.preview, plan.plan, rehearse.rehearse, compare.compare, search.search,
    report.report, why.why, runs.runs, doctor.doctor, launch_script.launch_script, export.export, push.push,
    evaluate.evaluate, predict.predict, mine.mine, convert.convert, schema.schema,
)  # fmt: skip
_OTHER_WORDS = ("train", "fit", "finetune", "fine-tune")
"""Words of other tools for `run`."""
app = typer.Typer(
    help="Fine-tunes Hugging Face models from one recipe, on one process or many.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help; the styled one takes longer to import than all else together
)
for _verb in _VERBS:
    # An unknown option counts as an override, so that the error for `--learning_rate 2e-5` names the key to write.
    app.command(context_settings={"ignore_unknown_options": "overrides" in signature(_verb).parameters})(_verb)
app.add_typer(recipes.app, name="recipes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code; `argv` holds the arguments after the program's name."""
    forbid_telemetry()
    arguments = list(_without_local_rank(sys.argv[1:] if argv is None else argv))
    try:
        if arguments[:1] and arguments[0] in _OTHER_WORDS:
            raise UsageError(f"`{arguments[0]}` is no command; to train a recipe: trainer run RECIPE")
        _require_values(arguments)
        _command().main(arguments, prog_name="trainer")
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except TrainerError as error:
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it, as in `trainer schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


@cache
def _command() -> Any:
    """Return the command of all verbs; building it takes longer than reading a recipe."""
    return typer.main.get_command(app)


def _require_values(arguments: Sequence[str]) -> None:
    """Refuse a blank argument and an option without its value: a path of no characters is the current folder."""
    for place, argument in enumerate(arguments):
        if re.fullmatch(r"\s*|--[\w-]+=\s*", argument):
            before = f" after `{arguments[place - 1]}`" if place else ""
            shown = f"`{argument}` has no value" if argument.strip() else f"the argument{before} is blank"
            raise UsageError(f"{shown}; set the variable that was empty, or leave the argument out")


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
