"""`trainer schema`."""

from __future__ import annotations

from trainer.cli.options import print_json


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trainer.base import extensions
    from trainer.recipe.registered import file_schema

    extensions.load()
    print_json(file_schema())
