"""The program: its verbs, the errors that it shows, and its exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer

from trainer import __version__
from trainer.base.errors import INTERRUPTED, ExitCode, TrainerError, UsageError
from trainer.base.terminal import say
from trainer.cli.hub_retries import shorten_retries
from trainer.ranks.environment import forbid_telemetry

# Texts, so that a verb imports no other one; each is a module of this package and its function.
_VERBS = (
    "init", "run", "check", "audit", "preview", "plan", "rehearse", "compare", "certify", "reproduce", "suite",
    "search", "report", "why", "runs", "doctor", "launch_script", "export", "push", "evaluate", "predict", "mine",
    "tokenizer", "encode", "convert", "schema", "recipes",
)  # fmt: skip
_OTHER_WORDS = ("train", "fit", "finetune", "fine-tune")
"""Words of other tools for `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code; `argv` holds the arguments after the program's name."""
    try:
        return answer(list(_without_local_rank(sys.argv[1:] if argv is None else argv)))
    except TrainerError as error:
        import_module("trainer.cli.once").show_error_once(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it, as in `trainer schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


def answer(arguments: list[str]) -> int:
    """Run the verb of some arguments, and return its exit code.

    Raises:
        TrainerError: an error that the user can fix.
    """
    forbid_telemetry()
    shorten_retries()
    if arguments[:1] and arguments[0] in _OTHER_WORDS:
        raise UsageError(f"`{arguments[0]}` is no command; to train a recipe: trainer run RECIPE")
    _require_values(arguments)
    named = tuple(verb for verb in _VERBS if verb.replace("_", "-") in arguments[:1])
    try:
        command(named or _VERBS).main(arguments, prog_name="trainer")
    except SystemExit as end:
        sys.stdout.flush()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return ExitCode.DONE


@cache
def command(verbs: Sequence[str] = _VERBS) -> Any:
    """Return the command of some verbs; building it takes longer than reading a recipe."""
    app = typer.Typer(
        help="Fine-tunes Hugging Face models from one recipe, on one process or many.",
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help; the styled one takes longer to import than all else together
    )
    app.callback()(_program)
    for verb in verbs:
        module = import_module(f"trainer.cli.{verb}")
        if verb == "recipes":
            app.add_typer(module.app, name=verb)
            continue
        function = getattr(module, verb)
        # An unknown option counts as an override, so that the error for `--learning_rate 2e-5` names the key to write.
        settings = {"ignore_unknown_options": "overrides" in signature(function).parameters}
        summary = re.split(r"(?:[;:.] |[.]$)", " ".join((function.__doc__ or "").split()), maxsplit=1)[0]
        app.command(context_settings=settings, short_help=f"{summary}.")(function)  # without it, click cuts sentences
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
        say(f"trainer {__version__}")
        raise typer.Exit


def _program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
