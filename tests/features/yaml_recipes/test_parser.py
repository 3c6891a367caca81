from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.base.errors import RecipeError
from trainer.features.yaml_recipes.parser import parse_yaml
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.parser import Origin

HERE = Origin("r.yaml")

CORE = {
    "1e-5": 1e-5, "1E5": 1e5, "+3": 3, "-7": -7, ".5": 0.5, "1.": 1.0, "0": 0, "0o17": 15, "0x1F": 31, "1_000": "1_000",
    "true": True, "FALSE": False, "no": "no", "Yes": "Yes", "on": "on", "n": "n", "~": None, "null": None, "": None,
    "2026-11-27": "2026-11-27", "12:30:45": "12:30:45", "'007'": "007", '"1e-5"': "1e-5", "1.2.3": "1.2.3", "=": "=",
}  # fmt: skip
"""Scalars, and their values by the core schema of YAML 1.2."""


@pytest.mark.parametrize("text", CORE)
def test_scalars_follow_yaml_1_2(text: str) -> None:
    tree, problems = parse_yaml(f"a: {text}", HERE)
    value = tree.plain()["a"]
    assert (value, type(value), problems) == (CORE[text], type(CORE[text]), [])


def test_the_loader_of_yaml_1_1_reads_them_otherwise() -> None:
    read = yaml.safe_load("[no, 1e-5, 2026-11-27, 12:30:45, 010]")
    assert read == [False, "1e-5", date(2026, 11, 27), 45045, 8]


def test_every_key_and_value_knows_its_line_and_column() -> None:
    tree, _ = parse_yaml("# é\na: 1\nb:\n  - true\n  - {c: x}\n", HERE)
    a, b = tree.members["a"], tree.members["b"]
    assert (str(a.key_origin), str(a.origin)) == ("r.yaml:2:1", "r.yaml:2:4")
    assert isinstance(b.value, list)
    assert [str(item.origin) for item in b.value] == ["r.yaml:4:5", "r.yaml:5:5"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc-: #", max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_yaml_and_json_read_alike(value: object) -> None:
    for text in (json.dumps(value), yaml.safe_dump(value)):
        tree, problems = parse_yaml(text, HERE)
        assert (tree.plain(), problems) == (value, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:1:1: empty"),
        (
            "a: [1",
            "r.yaml:1:6: a comma or `]` is missing here; add it, or put a text with a bracket or brace in quotes",
        ),
        ("a: 1\n b: 2", "r.yaml:2:3: a colon with a blank after it makes a key, and none can stand here; put the text"),
        ("a: 1\n---\nb: 2", "r.yaml:2:1: the file must hold one document of YAML; remove other text, and lines with"),
        ("a: *b", "r.yaml:1:4: `*b` names no anchor; put a text that begins with * in quotes"),
        ("a:\n\tb: 1", "r.yaml:2:1: a tab cannot indent a line; use blanks"),
        ("a: @b", "r.yaml:1:4: a text cannot begin with @; put it in quotes"),
        ("a: !<b", "r.yaml:1:7: a text cannot begin with !; put it in quotes"),
        ("a: !b!c d", "r.yaml:1:4: a text cannot begin with !; put it in quotes"),
        ("%YAML x\n---\na: 1", "r.yaml:1:7: a line cannot begin with %; remove it"),
        ("%TAG ! \n---\na: 1", "r.yaml:1:8: a line cannot begin with %; remove it"),
        (
            "a: |0\n  b",
            "r.yaml:1:5: a text that begins with | or > begins on the next line; write it there, or put it in",
        ),
        ("a: 'b", "r.yaml:1:6: a text in quotes has no end; close its quotes"),
        ("a: 'it's'", "r.yaml:1:8: the keys of a section must be indented alike, and a value ends before this"),
        ("a: 1\n- 2", "r.yaml:2:1: the items of a list must be indented alike, below their key"),
        ("a: b\nc", "r.yaml:2:2: a key needs a colon with a blank after it"),
        ("a: &b 1\nc: &b 2", "r.yaml:2:4: the anchor `&b` is there twice; rename one"),
        ('a: "\\q"', r"r.yaml:1:6: a text in double quotes cannot hold \q; use single quotes"),
        ("a: - b", "r.yaml:1:4: an item of a list cannot stand here"),
        ("a: [1,,2]", "r.yaml:1:7: a value is missing here; write it, or null, or put a text in quotes"),
        ("a: !!int 3", "r.yaml:1:4: the tag tag:yaml.org,2002:int is not allowed; write the value without it"),
        ("a: !!python/object/apply:os.system [x]", "r.yaml:1:4: the tag tag:yaml.org,2002:python/object/apply..."),
        ("a: \x01", "r.yaml:1:4: the character U+0001 is not allowed in YAML"),
        ("? [a]\n: 1", "r.yaml:1:3: a key must be text; put it in quotes"),
        ("a: " + "[" * 5000, "r.yaml:1:67: nested deeper than the limit of 64 levels"),
        ("a: &a [*a]", "r.yaml:1:4: nested deeper than the limit of 64 levels"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
            "aliases repeat more than the limit of 100,000 values",
        ),
    ],
)
def test_a_syntax_error_has_its_line_and_problem(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, HERE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "r.yaml:2:1: `a` is a duplicate key in one object; first at r.yaml:1:1"),
        ("a: {b: [.nan]}", "r.yaml:1:9: `a.b[0]` must be a finite number, but is .nan"),
        ("a: 1e999", "r.yaml:1:4: `a` must be a finite number, but is 1e999"),
        ("a: 010", 'r.yaml:1:4: `a` must not begin with 0, as octal numbers do, but is 010; write 10 or "010"'),
        (f"a: {'9' * 101}", "r.yaml:1:4: `a` must be a number of at most 100 characters, but is 999"),
        ('a: "\\ud800"', 'r.yaml:1:4: `a` holds "\\ud800", which is not valid Unicode'),
        ("b: &b {c: 1}\na: {<<: *b}", "r.yaml:2:5: `a.<<` merges the keys of an anchor, which recipes do not support"),
    ],
)
def test_recoverable_errors_are_reported_with_the_rest(text: str, message: str) -> None:
    _, problems = parse_yaml(text, HERE)
    assert [str(problem)[: len(message)] for problem in problems] == [message]


def test_aliases_repeat_their_anchor() -> None:
    assert parse_yaml("a: &a [1]\nb: {c: *a}", HERE)[0].plain() == {"a": [1], "b": {"c": [1]}}


def test_recipes_in_json_and_yaml_extend_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text("extends: bert_sample\noptimizer: {learning_rate: 1e-5}\n")
    Path("middle.json").write_text('{"extends": "base.yml", "training": {"epochs": 2}}')
    Path("top.yaml").write_text("extends: middle.json  # both\nname: top\ntraining:\n  seed: 3\n")
    resolved = load_recipe("top.yaml")
    assert (resolved.recipe.optimizer.learning_rate, resolved.recipe.training.epochs) == (1e-5, 2)
    assert str(resolved.origins["training.seed"]) == "top.yaml:4:9"
    assert str(resolved.origins["optimizer.learning_rate"]) == "base.yml:2:28"
    with pytest.raises(RecipeError, match=r"did you mean top\.yaml\?"):
        load_recipe("top.json")
    Path("top.yaml").write_text("extends: bert_sample\ndata: {group_by_length: off}\ntraining: {seed: 010}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml")
    assert [problem.split("; ")[-1] for problem in caught.value.problems] == [
        "write false without quotes",
        'write 10 or "010"',
    ]
