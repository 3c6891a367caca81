"""Fingerprints of a training: their numbers, by hand and under other layouts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.features.fingerprints.recorded import record
from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.base.errors import RecipeError
from trainer.features.fingerprints.numbers import Tokens, coefficients, of_part
from trainer.features.fingerprints.recorder import STEPS
from trainer.parallel.shards.boxes import Box, TensorPart
from trainer.recipe.reading.loading import load_recipe


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    file = folder / "fingerprints" / f"rank-{rank:05d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def outputs(line: dict[str, Any], place: str) -> dict[str, dict[int, list[float]]]:
    return {name: {int(row): numbers for row, numbers in rows.items()} for name, _, _, _, rows in line[place]}


class TestNumbers:
    def test_coefficients_are_independent_with_variance_1(self):
        found = coefficients("element", torch.arange(100_000))
        covariance = found.T @ found / len(found)
        assert torch.allclose(covariance, torch.eye(4, dtype=torch.float64), atol=0.02)
        assert found.mean(0).abs().max() < 0.02

    def test_parts_add_up_to_the_whole(self):
        whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
        boxes = [Box((0, 0), whole[:2, :4]), Box((2, 0), whole[2:, :4]), Box((0, 4), whole[:, 4:])]
        found, *of_boxes = (of_part(TensorPart("w", (5, 6), part)) for part in ((Box((0, 0), whole),), *zip(boxes)))
        assert list(map(math.fsum, zip(*of_boxes, strict=True))) == pytest.approx(found, rel=1e-12)
        assert found[0] == 30
        assert found[1] == pytest.approx(whole.double().square().sum().item())
        assert found[2:] == pytest.approx(
            (whole.double().flatten() @ coefficients("element", torch.arange(30))).tolist()
        )

    def test_a_change_is_that_of_the_difference(self):
        before, after = torch.rand(3, 2), torch.rand(3, 2)
        found = of_part(TensorPart("w", (3, 2), (Box((0, 0), after),)), {0: before})
        expected = of_part(TensorPart("w", (3, 2), (Box((0, 0), after.double() - before.double()),)))
        assert found == pytest.approx(expected)

    def test_padding_adds_nothing(self):
        x = torch.randn(2, 3, 4)
        is_token = torch.tensor([[True, True, False], [True, True, True]])
        rows, positions = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2])
        features = torch.arange(4)
        padded = Tokens(is_token.flatten(), rows, positions, 2).numbers(x, features)
        alone = Tokens(torch.ones(2, dtype=torch.bool), rows[:2], positions[:2], 1).numbers(x[:1, :2], features)
        assert torch.allclose(padded[:1], alone)
        assert padded[:, 0].tolist() == [8, 12]


def test_outputs_and_gradients_are_those_of_hooks(tmp_path: Path):
    """A second training with plain hooks has the same sums of squares, row by row."""
    sections = {"training": {"global_batch_size": 6, "micro_batch_size": 6}}
    record(tmp_path, sections, steps=1)
    seen: dict[str, Tensor] = {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        seen["logits"] = output.detach()
        output.register_hook(lambda gradient: seen.__setitem__("gradient", gradient))

    with tiny_training(tiny_recipe(**sections)) as training:
        model: Any = training.model
        model.classifier.register_forward_hook(keep)
        (batch,) = islice(training.loader, 1)
        result = training.engine.train_step(batch)
        rows = batch.microbatches[0].rows.tolist()
    _, start, step = lines(tmp_path)
    assert step["loss"] == result.loss
    assert step["grad_norm"] == result.grad_norm
    for place, key in (("forward", "logits"), ("backward", "gradient")):
        found = outputs(step, place)["classifier"]
        expected = seen[key].double().square().sum(1).tolist()
        assert [found[row][1] for row in rows] == pytest.approx(expected, rel=1e-9)
    # The norm of all gradients is that of the step, which has another implementation.
    assert math.sqrt(sum(numbers[1] for _, _, numbers in step["gradients"])) == pytest.approx(
        result.grad_norm, rel=1e-6
    )
    assert {name for name, _, _ in step["update"]} == {name for name, _, _ in start["weights"]}
    order = [name for name, *_ in step["forward"]]
    assert (
        order.index("bert.embeddings.word_embeddings") < order.index("bert.encoder.layer.1") < order.index("classifier")
    )


def test_recomputation_and_accumulation_record_each_output_once(tmp_path: Path):
    shape = {"global_batch_size": 7}
    record(tmp_path / "one", {"training": {**shape, "micro_batch_size": 7}}, steps=1)
    record(
        tmp_path / "other",
        {"training": {**shape, "micro_batch_size": 2}, "activation_checkpointing": "full"},
        steps=1,
    )
    one, other = (lines(tmp_path / name)[2] for name in ("one", "other"))
    for place in ("forward", "backward"):
        expected, found = outputs(one, place), outputs(other, place)
        # The last microbatch has one row, so this output, which all rows share, looks like that of a row.
        assert found.keys() - expected.keys() <= {"bert.embeddings.position_embeddings"}
        for name, rows in expected.items():
            assert found[name].keys() == rows.keys() == set(range(7))
            for row, numbers in rows.items():
                assert found[name][row][1] == pytest.approx(numbers[1], rel=1e-4, abs=1e-18), (name, row)


def test_recording_changes_no_bit_and_ends_after_its_steps(tmp_path: Path):
    sections = {"training": {"max_steps": STEPS + 3}}
    record(tmp_path, sections, steps=STEPS + 3)
    _, _, *steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    with tiny_training(tiny_recipe(**sections)) as training:
        expected = [(result.loss, result.grad_norm) for result in training.steps(STEPS)]
    assert [(line["loss"], line["grad_norm"]) for line in steps] == expected


def test_parts_of_ranks_are_whole_together(tmp_path: Path, ranks: RankPools):
    ranks(2).run(record, tmp_path, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 6}}, 1)
    sizes: dict[str, float] = {}
    for rank in range(2):
        for name, place, numbers in lines(tmp_path, rank)[2]["gradients"]:
            assert place == f"dp_shard={rank}"
            sizes[name] = sizes.get(name, 0) + numbers[0]
    assert sizes["classifier.weight"] == 3 * 32
    rows = [outputs(lines(tmp_path, rank)[2], "forward")["classifier"].keys() for rank in range(2)]
    assert [sorted(of_rank) for of_rank in rows] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize(
    "word", ["compile=true", "cuda_graphs=true", "training.layout_invariant_dropout=false", "parallel.strategy=dp"]
)
def test_keys_that_hide_outputs_are_refused(word: str):
    with pytest.raises(RecipeError, match=r"logging\.fingerprints"):
        load_recipe("bert_sample", ["logging.fingerprints=true", word])


@pytest.mark.slow
def test_runs_without_the_key_import_nothing_of_it():
    program = (
        "import sys, trainer.training.run, trainer.recipe.registered as r\n"
        "from trainer.recipe.reading.loading import load_recipe\n"
        "assert not r.asked_for('run', load_recipe('bert_sample').recipe)\n"
        "print([m for m in sys.modules if 'fingerprints' in m])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "['trainer.features.fingerprints', 'trainer.features.fingerprints.section']"
