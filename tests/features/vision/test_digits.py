"""The images of `vit_sample`."""

from __future__ import annotations

import runpy
from collections import Counter

import numpy as np
import PIL
import pyarrow.parquet as pq
import pytest

from trainer.recipe.reading.shipped import own_recipes

DIGITS = own_recipes()["vit_sample"].parent / "digits"


@pytest.fixture(scope="module")
def splits():
    return {name: pq.read_table(DIGITS / f"{name}.parquet").to_pylist() for name in ("train", "validation")}


def test_size_and_shape(splits):
    assert sum(path.stat().st_size for path in DIGITS.iterdir() if path.is_file()) <= 300_000
    for rows in splits.values():
        assert {(len(row["image"]), *{len(line) for line in row["image"]}) for row in rows} == {(16, 16)}
        assert {row["label"] for row in rows} == set(range(10))
    images = Counter(str(row["image"]) for rows in splits.values() for row in rows)
    assert max(images.values()) == 1, "no image is there twice"


def test_the_readme_states_the_facts(splits):
    readme = (DIGITS / "README.md").read_text(encoding="utf-8")
    validation = splits["validation"]
    label, count = Counter(row["label"] for row in validation).most_common(1)[0]
    assert f"(`{label}`) is right in **{100 * count / len(validation):.1f} %**" in readme
    assert f"| {len(splits['train']):,} rows" in readme
    assert f"| {len(validation):,} rows" in readme


def test_the_script_makes_the_images_again(splits):
    if f"numpy {np.__version__}, Pillow {PIL.__version__}" not in (DIGITS / "README.md").read_text(encoding="utf-8"):
        pytest.skip("made with other versions")
    script = runpy.run_path(str(DIGITS / "make_digits.py"))
    for name, (first, number) in script["SPLITS"].items():
        assert len(splits[name]) == number
        for index in (0, number // 2, number - 1):
            pixels, label = script["image"](first + index)
            assert (pixels.tolist(), label) == (splits[name][index]["image"], splits[name][index]["label"])
