"""Rows to leave out: by number, known again by their digest; the validation split stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.base.errors import DataError, RecipeError
from trainer.data.hashing import row_digest
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.training.run_data import read_splits

ROWS = [{"text": f"text {number}", "label": number % 2} for number in range(10)]


def recipe_of(folder: Path, lists: dict[str, str], *overrides: str) -> Recipe:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in lists.items():
        (folder / name).write_text(text)
    named = json.dumps([str(folder / name) for name in lists])
    data = [f"data.train={folder / 'rows.jsonl'}", "data.validation=0.2", f"data.leave_out={named}"]
    return load_recipe("bert_sample", [*data, *overrides]).recipe


def texts(folder: Path, **lists: str) -> tuple[list[str], list[str]]:
    recipe = recipe_of(folder, {f"{name}.csv": text for name, text in lists.items()})
    splits = read_splits(recipe, build_task(recipe.task), None, None, None)
    assert splits.validation is not None
    return list(splits.train.rows["text"]), list(splits.validation.rows["text"])


def test_named_rows_are_left_out_and_the_held_out_rows_stay(tmp_path: Path):
    whole, held = texts(tmp_path, none="row\n")
    train, validation = texts(tmp_path, some="split,row,finding\ntraining,2,x\ntraining,2,y\nvalidation,1,x\n")
    assert train == whole[:1] + whole[2:]
    assert validation == held


def test_a_second_file_counts_the_rows_that_the_first_leaves(tmp_path: Path):
    whole, _ = texts(tmp_path, none="row\n")
    assert texts(tmp_path, a="row\n1\n", b="row\n1\n")[0] == whole[2:]


def test_a_row_that_has_changed_is_refused(tmp_path: Path):
    whole, _ = texts(tmp_path, none="row\n")
    number = int(whole[0].split()[1])
    digest = row_digest(ROWS[number])
    assert texts(tmp_path, good=f"row,digest\n1,{digest}\n")[0] == whole[1:]
    with pytest.raises(DataError, match=r"row 2 of .* is another one"):
        texts(tmp_path, bad=f"row,digest\n2,{digest}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number\n1\n", "a column `row`"),
        ("row\n99\n", "has 8 rows"),
        ("row\n0\n", "below 1"),
        ("row\nx\n", "cannot be read"),
        ("row\n" + "\n".join(map(str, range(1, 9))), "must leave a row"),
    ],
)
def test_other_lists_are_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(DataError, match=message):
        texts(tmp_path, bad=text)


def test_a_stream_has_no_numbers(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"`data.leave_out` names rows by their numbers"):
        recipe_of(tmp_path, {"a.csv": "row\n1\n"}, "data.streaming=true", "data.validation=null")
