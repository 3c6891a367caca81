from __future__ import annotations

import yaml

from trainer.features.yaml_recipes.parser import parse_yaml
from trainer.features.yaml_recipes.writer import recipe_text
from trainer.recipe.reading.parser import Origin


def test_recipes_are_written_for_both_versions_of_yaml() -> None:
    values = {
        "name": "no", "task": {"text": ["a: b", "#1"], "no": "yes", "e": "1e-5", "x": None, "d": "2026-11-27"},
        "model": {"config": {"a": {"b": []}, "c": {}}, "x": 2e-05, "é": "\u2028\n\t'\""}, "b": True, "n": "007",
    }  # fmt: skip
    text = recipe_text(values, {"model.config.a": "note", "n": "of `a\nb`"}, "of a\u2028b\r\nc")
    assert parse_yaml(text, Origin("x"))[0].plain() == values
    assert yaml.safe_load(text) == values | {"model": values["model"] | {"x": "2e-05"}}  # the trap of YAML 1.1
    assert "  config:\n    a:  # note\n" in text
