"""The floating-point operations of a step, counted by hand from the sizes of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import SMALL_BERT, recipe_of
from trainer.recipe.plan import plan_run
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.ledger import Totals
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.timing import step_time
from trainer.tools.plan.work import RECOMPUTED

LENGTH, ROWS = 32, 16
ATTENTION = 2 * ROWS * LENGTH**2  # one product of queries and keys or of probabilities and values, times the width
KERNEL, WITHOUT_DROPOUT = 3, 1
"""The products of attention that the backward pass of our kernel computes again, and that of torch's."""


def products_of(config: dict[str, Any], num_layers: int) -> int:
    """Return the FLOPs of the forward products of all layers but those of attention's queries and keys."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden * config.get("num_key_value_heads", config["num_attention_heads"]) // config["num_attention_heads"]
    matrices = 2 if config["model_type"] == "bert" else 3  # of the feed-forward part
    return 2 * ROWS * LENGTH * num_layers * (2 * hidden**2 + 2 * hidden * keys + matrices * hidden * inner)


def totals_of(keys: dict[str, Any], fused: bool = True) -> Totals:
    """Return the totals of a step on a GPU."""
    return plan_step(plan_run(recipe_of(keys), 1), 0, LENGTH, True, fused).totals


def of_bert() -> int:
    """Return the FLOPs of BERT's forward pass: layers, attention, and pooler and classes of the first tokens."""
    hidden, layers = SMALL_BERT["hidden_size"], SMALL_BERT["num_hidden_layers"]
    head = 2 * ROWS * hidden * (hidden + 2)
    return products_of(SMALL_BERT, layers) + layers * 2 * ATTENTION * hidden + head


BERT = {"model": {"config": SMALL_BERT, "tokenizer": "none"}}
ONE = {"training": {"max_steps": 4, "global_batch_size": ROWS, "micro_batch_size": ROWS}}


@pytest.mark.parametrize(
    ("keys", "fused", "again"),
    [
        ({}, False, 0),
        ({}, True, KERNEL),
        (ONE, True, KERNEL),
        ({"model": {**BERT["model"], "dropout": 0.0}}, True, WITHOUT_DROPOUT),
    ],
    ids=["eager", "kernel", "kernel, one microbatch", "torch's kernel"],
)
def test_bert_has_three_times_the_products_of_its_forward_pass(keys, fused, again):
    """The backward pass of a product is two products; kernels of attention compute more than the model needs."""
    totals = totals_of({**BERT, **keys}, fused)
    assert totals.model_flops == 3 * of_bert()
    of_kernels = SMALL_BERT["num_hidden_layers"] * again * ATTENTION * SMALL_BERT["hidden_size"]
    assert sum(totals.flops.values()) == 3 * of_bert() + of_kernels


@pytest.mark.parametrize(
    "keys",
    [{"activation_checkpointing": "full"}, {"optimizer": {"name": "muon", "learning_rate": 0.1}}],
    ids=["recomputed", "muon"],
)
def test_recomputation_and_the_optimizer_are_no_work_of_the_model(keys):
    totals = totals_of({**BERT, **keys})
    assert totals.model_flops == 3 * of_bert()
    assert sum(totals.flops.values()) > 1.1 * totals.model_flops


LLAMA: dict[str, Any] = {**TINY_DECODERS["llama"], "vocab_size": 211}


@pytest.mark.parametrize(
    ("chunk", "precision", "again"),
    [(None, "fp32", 0), ("auto", "fp32", 0), (20, "fp32", 0), (20, "fp16", 1)],
    ids=["torch's loss", "whole logits", "chunks", "chunks in fp16"],
)
def test_llama_has_three_times_the_products_of_its_forward_pass(chunk, precision, again):
    """The gradient of a head that computes chunks of logits in fp16 needs them again: a fourth product of the head."""
    task = {**TINY_TASKS["causal_lm"].keys, "logits_chunk": chunk}
    totals = totals_of({"task": task, "model": {"config": LLAMA, "tokenizer": "none"}, "precision": precision})
    layers, hidden = LLAMA["num_hidden_layers"], LLAMA["hidden_size"]
    head = 2 * ROWS * LENGTH * hidden * LLAMA["vocab_size"]
    forward = products_of(LLAMA, layers) + layers * 2 * ATTENTION * hidden + head
    assert totals.model_flops == 3 * forward
    recomputed = sum(amount.flops for kind, amount in totals.work.items() if kind.phase == RECOMPUTED)
    assert recomputed == again * head
    of_kernels = layers * WITHOUT_DROPOUT * ATTENTION * hidden
    assert sum(totals.flops.values()) == 3 * forward + recomputed + of_kernels


def test_utilisation_is_a_share_of_the_peak():
    plan = plan_run(recipe_of({**BERT, **ONE, "precision": "bf16"}), 1)
    machine = parse_devices("H200").machine
    assert machine
    steps = plan_steps(plan, LENGTH, cuda=True)
    time = step_time(plan, steps, machine, LENGTH)
    peak = machine.peak("bf16")
    assert time.mfu * time.likely * peak == pytest.approx(3 * of_bert())
    assert time.hfu * time.likely * peak == pytest.approx(sum(steps[0].totals.flops.values()))


def test_a_masked_model_multiplies_labelled_tokens_in_16_bits():
    hidden, vocabulary = SMALL_BERT["hidden_size"], SMALL_BERT["vocab_size"]

    def flops(share: float) -> dict[torch.dtype, int]:
        task = {"type": "masked_lm", "text": "text", "mask_probability": share, "logits_chunk": 64}
        return {**totals_of({"task": task, "precision": "bf16", **BERT, **ONE}).flops}

    few, many = flops(0.25), flops(0.5)
    # Sums over chunks are in fp32; their products are not.
    assert {*few} == {torch.bfloat16}
    more = ROWS * LENGTH // 4
    assert many[torch.bfloat16] - few[torch.bfloat16] == 3 * 2 * more * hidden * (hidden + vocabulary)
