"""`trainer rehearse`."""

from __future__ import annotations

from typing import Annotated

from trainer.base.terminal import say_text
from trainer.cli.options import JsonOption, LengthOption, OverridesArgument, RecipeArgument, count, print_json, value


def rehearse(
    recipe: RecipeArgument,
    ranks: Annotated[int, count("Ranks of the run; none needs to exist.")],
    overrides: OverridesArgument = None,
    rank: Annotated[int, value("The rank to build.", "R")] = 0,
    local_ranks: Annotated[
        int | None, count("Ranks of each machine; default: the most up to 8 that divide all.")
    ] = None,
    length: LengthOption = None,
    rows: Annotated[int | None, count("Rows of an epoch, to show those of the first step.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what one rank of a large run holds, sends, reads and writes, without its hardware.

    It needs the configuration of the model, and no data or weights.
    """
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe

    resolved = load_recipe(recipe, overrides or (), needs_data=False)

    with importing():
        from trainer.tools.plan import rehearsal
        from trainer.tools.plan.plan_text import text_of

    found = rehearsal.rehearse(resolved, ranks, rank, local_ranks, length, rows)
    if as_json:
        print_json(rehearsal.as_object(found))
    else:
        say_text(text_of("rehearsal", found=found))
