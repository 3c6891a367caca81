"""Multiple choice as whole trainings: against a plain loop of transformers, and the exported folder."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultipleChoice

from tests.helpers.plain_loops import losses_of_both, mean_of_rows
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT, sgd_sections, tiny_recipe, tiny_training
from trainer.base.errors import RecipeError
from trainer.cli import main
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.reading.loading import load_recipe


def test_losses_equal_a_plain_loop():
    """Gradient descent on the mean loss of a batch; each row has its own choices only, without padding."""
    config = {**TINY_BERT, "initializer_range": 0.2}
    recipe = tiny_recipe(
        task={"type": "multiple_choice"},
        model={"config": config, "dropout": 0.0},
        training={"max_steps": 6, "global_batch_size": 12, "micro_batch_size": 5, "max_grad_norm": None},
        **sgd_sections(learning_rate=0.1),
    )
    model = AutoModelForMultipleChoice.from_config(
        AutoConfig.for_model(**config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )

    def losses_of(microbatch: Microbatch) -> Iterator[torch.Tensor]:
        inputs = microbatch.inputs
        for ids, mask, count, label in zip(
            inputs["input_ids"], inputs["attention_mask"], inputs["num_choices"], microbatch.labels, strict=True
        ):
            longest = int(mask[:count].sum(-1).max())
            row = {"input_ids": ids[None, :count, :longest], "attention_mask": mask[None, :count, :longest]}
            yield model(**row, labels=label[None]).loss

    with tiny_training(recipe) as training:
        losses_of_both(training, model, mean_of_rows(losses_of), 0.1, abs=1e-5)


def test_the_code_of_the_model_card_predicts_as_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    recipe = write_tiny_run(
        tmp_path, model={"config": {**TINY_BERT, "initializer_range": 0.5}}, training={"max_steps": 2}
    )
    described = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**described, "task": {"type": "multiple_choice"}}))
    words, rows = random.Random(0), []
    for number in range(20):
        choices = [words.choice(WORDS) for _ in range(2 + number % 3)]
        rows.append({"context": " ".join(words.choices(WORDS, k=4)), "choices": choices, "label": number % 2})
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["run", str(recipe)]) == 0
    folder, output = tmp_path / "run" / "model", tmp_path / "out.jsonl"
    assert main(["predict", str(folder), "--input", str(tmp_path / "train.jsonl"), "-o", str(output)]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["index"] for row in found}) > 1
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: multiple-choice" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for row in found:
        assert [len(row["probabilities"]), row["prediction"]] == [len(row["choices"]), row["choices"][row["index"]]]
        assert sum(row["probabilities"]) == pytest.approx(1, abs=1e-5)
        inputs = f"context, choices = {row['context']!r}, {row['choices']!r}"
        runnable = code.replace("path/to/this/folder", str(folder)).replace(
            'context, choices = "...", ["...", "..."]', inputs
        )
        capfd.readouterr()
        exec(runnable, {})
        assert capfd.readouterr().out.strip() == row["prediction"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('task.choices=["a","a"]', r'`task.choices` has "a" more than once'),
        ("task.label=topics", r'`task.label` is "topics", which is also `task.choices`'),
        ("task.question=sentence", r'`task.question` is "sentence", which is also `task.context`'),
        ("task.blank=_", r"`task.blank` applies to questions, but `task.question` is null"),
        ('task.question_texts={"a":"b"}', r"`task.question_texts` applies to questions"),
    ],
)
def test_keys_that_do_not_fit(override: str, problem: str):
    with pytest.raises(RecipeError, match=problem):
        load_recipe("choice_sample", [override])
