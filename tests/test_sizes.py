"""The sizes for pretraining of `docs/sizes.md`, against transformers' classes and the numbers of their papers."""

from __future__ import annotations

import pytest

from docs.sizes import counted, planned, recipe_of, sizes
from trainer.recipe.schema import Recipe

SOME = ("BERT tiny", "Ettin 17M", "ModernBERT base")


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(sizes()), marks=pytest.mark.slow)], ids=["some", "all"])
def test_parameters_are_those_of_the_class_and_of_the_paper(names: tuple[str, ...]):
    for name in names:
        size = sizes()[name]
        assert counted(size) == (size["parameters"], size["without_embeddings"]), name
        # Papers round, and some leave out the head.
        assert size["parameters"] == pytest.approx(1e6 * size["millions"], rel=0.03), name


def test_each_size_is_a_recipe():
    for size in sizes().values():
        recipe = Recipe.model_validate(recipe_of(size))
        assert recipe.model.config == size["config"]


@pytest.mark.nightly
def test_a_stored_speed_is_that_of_a_plan():
    size = sizes()["BERT tiny"]
    # Further plans may count better; `python -m docs.sizes` stores their speeds.
    assert planned(size) == pytest.approx(size["tokens_per_second"], rel=0.05)
