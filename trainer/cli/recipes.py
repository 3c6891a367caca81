"""`trainer recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.base import extensions
from trainer.base.errors import UsageError
from trainer.base.terminal import say, say_json

app = typer.Typer(help="List the shipped recipes.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    extensions.load()
    if context.invoked_subcommand is not None:
        return
    from trainer.recipe.reading.shipped import is_base, missing_base, shipped_recipes, summary

    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    for name, path in sorted(shipped.items(), key=lambda item: is_base(item[1])):
        text = f"(to extend) {summary(path)}" if is_base(path) else summary(path)
        if (base := missing_base(path)) is not None:  # of a feature that is not here
            text = f"(unavailable) it extends {base!r}, which is not installed"
        say(f"{name:<{width}}  {text}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="As `trainer recipes` lists it.", show_default=False)]) -> None:
    """Print a shipped recipe."""
    from trainer.recipe.reading.shipped import meant, shipped_recipes, without_ending

    shipped = shipped_recipes()
    path = shipped.get(without_ending(name))
    if path is None:
        raise UsageError(f"no shipped recipe is called {name!r}; {meant(name)}")
    say_json(path.read_text(encoding="utf-8"), end="")
