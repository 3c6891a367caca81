from __future__ import annotations

from pathlib import Path

import pytest

from trainer.recipe.plan import plan_run
from trainer.recipe.reading import shipped
from trainer.recipe.reading.files import read_file
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.shipped import is_base, shipped_recipes, summary

RECIPES = [name for name, path in shipped_recipes().items() if not is_base(path)]
BASES = [name for name, path in shipped_recipes().items() if is_base(path)]


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_resolves_on_one_and_two_ranks(name: str) -> None:
    resolved = load_recipe(name, is_whole=True)
    assert resolved.recipe.name == name
    for one in resolved.chain.stages.values() if resolved.chain else [resolved]:
        for ranks in (1, 2):
            assert plan_run(one.recipe, ranks).batch.global_batch_size == one.recipe.training.global_batch_size


@pytest.mark.parametrize("base", BASES)
def test_every_base_is_extended(base: str) -> None:
    extended = [read_file(path)[0].members.get("extends") for path in shipped_recipes().values()]
    assert any(node is not None and node.value in (base, f"{base}.json") for node in extended)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_has_a_description(name: str) -> None:
    assert summary(shipped_recipes()[name])[-1] in ".?"


def test_recipes_are_read_by_users_who_have_not_seen_the_others() -> None:
    """The hub recipes stand on one base, in names as the hub writes them."""
    for name in ("bert_base_mrpc", "bert_base_sst2", "bert_large_mnli"):
        assert name in RECIPES
        resolved = load_recipe(name)
        assert resolved.origins["optimizer.learning_rate"].source.endswith("bert_base.json")
        assert resolved.values["data.name"] == "nyu-mll/glue"


def test_an_installed_package_brings_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped_recipes").mkdir()
    (tmp_path / "shipped_recipes" / "one.json").write_text("{}")
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path)
    assert list(shipped_recipes()) == ["one"]


def test_a_recipe_without_a_comment_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"name": "x"}')
    assert summary(path) == ""
    path.write_text("// One\n// two (v. 2). Three.\n{}")
    assert summary(path) == "One two (v. 2)."
