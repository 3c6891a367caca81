"""Parity of distillation: a student learns the same from a teacher under every layout, as from a plain loop."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, TINY_DECODERS, TINY_VIT, Curve, tiny_training, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import FEW_ROWS, TOLERANCES, assert_same_curve
from tests.parity.test_tasks import LAYOUTS, assert_same_training, recipe_of, train
from trainer.parallel.microbatch import IGNORED_LABEL

TEMPERATURE, WEIGHT = 2.0, 0.7
WIDER = {"hidden_size": 48, "initializer_range": 0.2}
TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence_classification": ("AutoModelForSequenceClassification", {**TINY_BERT, **WIDER}),
    "weighted_classification": ("AutoModelForSequenceClassification", {**TINY_BERT, **WIDER}),
    "token_classification": ("AutoModelForTokenClassification", {**TINY_BERT, **WIDER}),
    "image_classification": ("AutoModelForImageClassification", {**TINY_VIT, **WIDER}),
    "masked_lm": ("AutoModelForMaskedLM", {**TINY_BERT, **WIDER}),
    "causal_lm": ("AutoModelForCausalLM", {**TINY_DECODERS["llama"], **WIDER}),
}
# Parity of all layouts; the other tasks differ in no seam from these.
WITH_LAYOUTS = ("weighted_classification", "token_classification", "causal_lm")
REPEATED = {
    "weighted_classification": (
        "ddp", "zero3-tensor", "context", "ring", "pipeline", "tensor-context", "fsdp-tensor-pipeline", "zero2",
        "zero1-tensor", "hsdp", "fsdp-accumulated",
    ),
    "causal_lm": ("ddp", "context", "tensor-context", "zero1-tensor", "hsdp", "fsdp-tensor-pipeline"),
}  # fmt: skip
"""Layouts that give the teacher's classes or tokens to ranks as another layout, or the other task, does."""
FURTHER_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2": (2, {"parallel": {"strategy": "zero2"}}),
    "zero1-tensor": (4, {"parallel": {"strategy": "zero1", "tensor": 2}}),
    "hsdp": (4, {"parallel": {"strategy": "hsdp", "shard": 2}}),
}
IN_16_BITS = {
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "zero3": {"parallel": {"strategy": "zero3"}},
    "tensor": {"parallel": {"tensor": 2, "sequence": True}},
    "stages": {"parallel": {"pipeline": {"stages": 2}}},
}
SLOW_IN_16_BITS = {("bf16", "tensor"), ("fp16", "stages")}
ORDER = ("c", "a", "b")  # of the teacher's classes; the student's are a, b and c


def save_teacher(task: str, folder: Path) -> Path:
    """Write a teacher with dropout in its configuration, and with the classes in another order."""
    head, keys = TEACHERS[task]
    config = transformers.AutoConfig.for_model(**keys)
    if "Classification" in head:
        config.num_labels = len(ORDER)
        config.id2label, config.label2id = dict(enumerate(ORDER)), {name: i for i, name in enumerate(ORDER)}
    torch.manual_seed(1)
    model = getattr(transformers, head).from_config(config)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("teachers")
    return {task: save_teacher(task, root / task) for task in TEACHERS}


def taught_by(folder: Path) -> dict[str, Any]:
    return {"distillation": {"teacher": str(folder), "temperature": TEMPERATURE, "weight": WEIGHT}}


@cache
def reference(task: str, folder: Path) -> tuple[Curve, Curve]:
    return once(f"parity of distillation, {task}", lambda: train(task, taught_by(folder)))


def plain_loss(task: str, logits: Tensor, taught: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The loss of Hinton et al. 2015 in plain torch, with the mean over all labels of the global batch."""
    if "Classification" in TEACHERS[task][0]:
        taught = taught[..., [ORDER.index(name) for name in "abc"]]
    kept = labels != IGNORED_LABEL
    logits, taught, labels = logits[kept], taught[kept], labels[kept]
    of_rows = torch.ones(len(labels)) if weights is None else weights[labels]
    smoothing = 0.0 if weights is None else 0.1
    hard = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
    soft = F.kl_div((logits / TEMPERATURE).log_softmax(-1), (taught / TEMPERATURE).softmax(-1), reduction="none").sum(
        -1
    )
    return ((1 - WEIGHT) * hard + WEIGHT * TEMPERATURE**2 * (soft * of_rows).sum()) / of_rows.sum()


@pytest.mark.parametrize("task", TEACHERS)
def test_it_is_a_plain_loop(teachers: dict[str, Path], task: str):
    auto_class = getattr(transformers, TEACHERS[task][0])
    recipe = recipe_of(task, training={"max_steps": 4, "max_grad_norm": None}, **taught_by(teachers[task]))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dropout": 0.0})})
    weights = torch.tensor([0.005, 0.03, 0.07]) if task == "weighted_classification" else None
    with tiny_training(recipe) as training:
        student = auto_class.from_config(training.model.config)
        student.load_state_dict(training.model.state_dict())
        batches = list(islice(training.loader, 4))
        found = training.steps(4)
        rates = [result.learning_rate for result in found]
    teacher = auto_class.from_pretrained(teachers[task]).eval()
    named = dict(student.named_parameters())
    plain = {name for name, p in named.items() if name.endswith("bias") or "orm" in name}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if name not in plain], "weight_decay": 0.01},
            {"params": [p for name, p in named.items() if name in plain], "weight_decay": 0.0},
        ]
    )
    for batch, rate, result in zip(batches, rates, found, strict=True):
        (rows,) = batch.microbatches
        inputs = {name: tensor for name, tensor in rows.inputs.items() if name not in ("word_numbers", "row_numbers")}
        with torch.no_grad():
            taught = teacher(**inputs).logits
        loss = plain_loss(task, student(**inputs).logits, taught, rows.labels, weights)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "causal_lm" else pytest.mark.nightly) for task in TEACHERS]
)
def test_accumulation_on_one_process_changes_nothing(teachers: dict[str, Path], task: str):
    recipe = recipe_of(task, training={"micro_batch_size": 5}, **taught_by(teachers[task]))
    found = train_tiny(recipe, num_rows=FEW_ROWS)
    assert_same_curve(found, reference(task, teachers[task])[0])


def cases() -> list[Any]:
    return [
        pytest.param(
            task,
            name,
            marks=pytest.mark.nightly
            if task == "token_classification" or name in REPEATED.get(task, ())
            else ()
            if task == "causal_lm" and name == "tensor-sequence-accumulated"
            else pytest.mark.slow,
        )
        for task in WITH_LAYOUTS
        for name in (*LAYOUTS, *FURTHER_LAYOUTS)
    ]


@pytest.mark.parametrize(("task", "layout"), cases())
def test_any_layout_is_one_process(ranks: RankPools, teachers: dict[str, Path], task: str, layout: str):
    world_size, keys = {**LAYOUTS, **FURTHER_LAYOUTS}[layout]
    for found in ranks(world_size).run(train, task, {**keys, **taught_by(teachers[task])}):
        assert_same_training(found, reference(task, teachers[task]))


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param(
            precision,
            layout,
            marks=pytest.mark.slow if (precision, layout) in SLOW_IN_16_BITS else pytest.mark.nightly,
        )
        for precision in ("bf16", "fp16")
        for layout in IN_16_BITS
    ],
)
def test_16_bits_on_two_ranks_train_as_one_process(
    ranks: RankPools, teachers: dict[str, Path], precision: str, layout: str
):
    keys = {"precision": precision, **taught_by(teachers["causal_lm"])}
    expected = train_tiny(recipe_of("causal_lm", **keys), num_steps=3)
    for found in ranks(2).run(train_tiny, recipe_of("causal_lm", **keys, **IN_16_BITS[layout]), num_steps=3):
        assert_same_curve(found, expected, TOLERANCES[precision])
