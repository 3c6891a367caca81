from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.checkpoint.counters import Progress
from trainer.observe.records import BestMetric
from trainer.tasks.exported import CardForm
from trainer.training.model_card import write_card

ORIGIN: dict[str, Any] = {
    "recipe": {
        "name": "mrpc",
        "task": {"type": "sequence_classification", "metrics": ["accuracy"]},
        "model": {"name_or_path": "google-bert/bert-base-uncased"},
        "data": {"source": "hub", "name": "nyu-mll/glue"},
        "parallel": {"strategy": "fsdp"},
        "precision": "bf16",
    },
    "layout": {"dp_replicate": 1, "dp_shard": 2, "tp": 4, "pp": 1},
    "versions": {"torch": "2.13.0", "trainer": "0.1.0"},
}
PROGRESS = Progress(1200, 9600, 123456, BestMetric("accuracy", 0.8765, 900))


def card(
    folder: Path, origin: Any = ORIGIN, progress: Progress = PROGRESS, form: CardForm | None = None
) -> tuple[dict[str, Any], str]:
    """Its head as the hub reads it, and the rest."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "dtype": "float32"}))
    write_card(folder, origin, progress, form=form)
    empty, head, rest = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(head), rest


def changed(section: str, **keys: Any) -> dict[str, Any]:
    recipe = ORIGIN["recipe"]
    return {**ORIGIN, "recipe": {**recipe, section: {**recipe[section], **keys}}}


def test_the_head_is_valid_metadata_of_the_hub(tmp_path):
    assert card(tmp_path)[0] == {
        "library_name": "transformers",
        "base_model": "google-bert/bert-base-uncased",
        "datasets": ["nyu-mll/glue"],
        "pipeline_tag": "text-classification",
        "tags": ["sequence-classification"],
    }


def test_a_folder_without_the_whole_weights_has_texts_of_its_own(tmp_path):
    form = CardForm("A part of a `ARCHITECTURE` in `DTYPE`", "ARCHITECTURE.from_pretrained(BASE)", "other")
    origin = changed("model", name_or_path="me/DTYPE-bert", revision="v1")
    head, rest = card(tmp_path, origin, form=form)
    assert head["library_name"] == "other"
    assert "\nA part of a `BertForMaskedLM` in `float32`, trained with `trainer`.\n" in rest
    assert 'BertForMaskedLM.from_pretrained("me/DTYPE-bert", revision="v1")' in rest
    assert (
        'from_pretrained("path/to/the/base/model")' in card(tmp_path, changed("model", name_or_path="/x"), form=form)[1]
    )


def test_words_in_values_stay(tmp_path):
    form = CardForm("A", "predict(PROMPT, FIRST_TOKEN)", None)
    _, rest = card(tmp_path, changed("task", prefix="FIRST_TOKEN BASE "), form=form)
    assert 'predict("FIRST_TOKEN BASE ...", None)' in rest


def test_names_task_steps_metrics_and_data(tmp_path):
    _, rest = card(tmp_path)
    for words in (
        "# mrpc",
        "`BertForMaskedLM` in `float32`",
        "1,200 optimizer steps, 9,600 rows, 123,456 tokens",
        "accuracy 0.8765 at step 900",
        "dp_shard 2 x tp 4, `fsdp`, `bf16`",
        'pipeline("text-classification", "path/to/this/folder")',
        "- torch 2.13.0",
    ):
        assert words in rest
    recipe = rest.split("```json\n")[1].split("\n```")[0]
    assert json.loads(recipe) == ORIGIN["recipe"]


def test_without_an_evaluation_or_other_ranks(tmp_path):
    _, rest = card(tmp_path, {**ORIGIN, "layout": {"dp_shard": 1, "tp": 1}}, Progress(3, 24))
    assert "best evaluation: none" in rest
    assert "layout: one process, `fsdp`" in rest
    assert "3 optimizer steps, 24 rows\n" in rest


@pytest.mark.parametrize("name", [None, "/home/ada/bert", "no such name", "../bert", "a/b/c"])
def test_a_base_model_that_the_hub_does_not_know_is_not_named(tmp_path, name):
    head, _ = card(tmp_path, changed("model", name_or_path=name))
    assert "base_model" not in head


@pytest.mark.parametrize("keys", [{"source": "files"}, {"name": "/home/ada/data"}])
def test_local_data_are_no_data_set_of_the_hub(tmp_path, keys):
    assert "datasets" not in card(tmp_path, changed("data", **keys))[0]


def test_no_text_of_a_recipe_leaves_its_place(tmp_path):
    odd = 'a: "b"\n---\n# other\n```\n<script>'
    head, rest = card(tmp_path, {**ORIGIN, "recipe": {**ORIGIN["recipe"], "name": odd, "task": {"type": odd}}})
    assert head == {key: card(tmp_path)[0][key] for key in ("library_name", "base_model", "datasets")}
    assert "\n---\n" not in rest
    assert "\n# other" not in rest
    assert rest.count("\n```") == 4


@pytest.mark.parametrize("origin", [{}, {"recipe": None, "layout": [], "versions": "2"}, {"recipe": {"model": 3}}])
def test_values_that_a_checkpoint_lacks_are_omitted(tmp_path, origin):
    head, rest = card(tmp_path, origin)
    assert head["library_name"] == "transformers"
    assert 'BertForMaskedLM.from_pretrained("path/to/this/folder")' in rest


def test_a_hostile_checkpoint_writes_no_html_links_or_escapes(tmp_path):
    evil = "<img src=x>`[a](http://x)\n# b\x1b[2J\x7f"
    recipe = {"name": evil, "parallel": {"strategy": evil}, "precision": evil, "data": {evil: evil}}
    origin = {"recipe": recipe, "layout": {evil: evil}, "versions": {evil: evil}}
    _, rest = card(tmp_path, origin, Progress(1, 1, 1, BestMetric(evil, 0.5, 1)))
    assert not {"\x1b", "\x7f"} & set(rest)
    outside = "".join(rest.split("```")[::2])
    assert "<" not in outside
    assert outside.count("[a]") == outside.count("\\[a]")
    assert "\n# b" not in outside
