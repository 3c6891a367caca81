from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.recipe.reading.overrides import override_layer


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-4", 1e-4),
        ("a.b=null", None),
        ("a.b=true", True),
        ('a.b=["x"]', ["x"]),
        ('a.b={"c": 1}', {"c": 1}),
        ("a.b=100 steps", "100 steps"),
        ("a.b=google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ('a.b="7"', "7"),
        ("a.b=", ""),
        ("a.b=x=y", "x=y"),
        ("a.b=[console", "[console"),
        ("a.b=01", "01"),
    ],
)
def test_a_value_is_json_where_it_parses_and_text_elsewhere(override: str, value: Any) -> None:
    layer, problems = override_layer([override])
    assert layer.plain() == {"a": {"b": value}}
    assert problems == []


def test_overrides_of_one_section_come_together() -> None:
    layer, problems = override_layer(["a.b=1", "a.c.d=2", "e=3"])
    assert layer.plain() == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert problems == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.epochs"], "`training.epochs` is not an override; write key=value, such as training.epochs=1"),
        (["=1"], "`=1` has an empty part in its key; write key=value, such as training.epochs=1"),
        (["a..b=1"], "`a..b=1` has an empty part in its key; write key=value, such as training.epochs=1"),
        (["a=1", "a=2"], "`a=2` is the second override of this key; keep one"),
        (["a.b=1", "a=2"], "`a=2` is the second override of this key; keep one"),
        (["a=1", "a.b=2"], "`a.b=2` conflicts with another override, which sets `a` to 1"),
        (["extends=x"], "`extends=x` is valid only in a recipe file"),
        (["--lr=1"], "`--lr=1` is not an option; as a key it is `optimizer.learning_rate` here"),
        (["--frobnicate"], "`--frobnicate` is neither an option nor an override key=value"),
        (["a=NaN"], "`a` must be a finite number, but is NaN"),
        (['a={"b": 1, "b": 2}'], "`a.b` is a duplicate key in one object; first at command line"),
        (["a=\udcff"], "`a=?` is not valid Unicode (unpaired surrogate)"),
        (["a." * 64 + "a=1"], "`aaa` is nested deeper than the limit of 64 levels"),
    ],
)
def test_ill_formed_overrides_show_the_correct_form(overrides: list[str], message: str) -> None:
    _, (problem,) = override_layer(overrides)
    if message.startswith("`aaa`"):  # the argument itself is shortened
        assert str(problem).endswith(message.removeprefix("`aaa`"))
    else:
        assert str(problem) == f"command line: {message}"


def test_overrides_are_reported_together(problems: Callable[..., list[str]], minimal: dict[str, Any]) -> None:
    reported = problems(minimal, "training.epochs=many", "lr=1", "training.seed", "training.keep=1")
    assert reported == [
        "command line: `training.seed` is not an override; write key=value, such as training.epochs=1",
        'command line: `training.epochs` must be an integer of at least 1, or a number above 0, but is "many"',
        "command line: `training.keep` is not a key; did you mean `checkpoint.keep`?",
        "command line: `lr` is `optimizer.learning_rate` here",
    ]
