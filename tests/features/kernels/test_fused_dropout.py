"""The dropout kernel: its code for GPUs, its plan, and all its tests in Triton's interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.interpreting import needs_triton, run_interpreted
from tests.tools.plan.measured import SMALL_BERT, recipe_of
from trainer.features.kernels import fused_dropout
from trainer.recipe.plan import plan_run
from trainer.tools.plan.ledger import ACTIVATIONS
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.step_plan import StepPlan


@needs_triton
@pytest.mark.slow
def test_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_dropout.py"))


@needs_triton
def test_its_code_reads_vectors_shares_no_memory_and_rounds_each_operation():
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer.features.kernels import dropout_kernels

    kernel = dropout_kernels.dropout_kernel
    constants = {"token_rows": None, "token_positions": None, "second_size": 1, "START": 0, "WORDS": 256}
    types = {"x": "*bf16", "output": "*fp32", "residual": "*fp32", "row_keys": "*i64", "kept_scale": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    place = kernel.arg_names.index
    aligned = {(place(name),): [["tt.divisibility", 16]] for name in ("x", "output", "residual", "num_columns")}
    source = ASTSource(kernel, signature, {(place(name),): one for name, one in constants.items()}, aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=fused_dropout._options(256))
    code = compiled.asm["ptx"].split()
    assert {"ld.global.v2.b32", "ld.global.v4.b32", "st.global.v4.b32", "cvt.rn.bf16.f32"} <= set(code)
    assert [
        part for part in code if re.match(r"(ld|st)\.shared|(ld|st)\.global\.b16|fma|\w+\.ftz|bar|shfl", part)
    ] == []
    assert compiled.metadata.shared == 0


@pytest.mark.slow
def test_a_plan_has_one_operation_for_each_call_and_keeps_no_mask():
    rows, length, hidden, microbatches = 4, 64, SMALL_BERT["hidden_size"], 4
    sites = 2 * SMALL_BERT["num_hidden_layers"] + 1  # and one of the head, on vectors

    def planned(fused: bool) -> StepPlan:
        config = {**SMALL_BERT, "attention_probs_dropout_prob": 0.0}
        recipe = recipe_of({"model": {"config": config, "tokenizer": "none"}})
        return plan_step(plan_run(recipe, 1), 0, length, True, fused)

    found = planned(fused=True)
    amounts = [amount for kind, amount in found.totals.work.items() if kind.name == "keyed_dropout"]
    assert sum(amount.number for amount in amounts) == 2 * microbatches * (sites + 1)
    states, keys = 4 * rows * length * hidden, 8 * rows * (sites + 1)
    passes = 2 * (2 * sites * states + 2 * 4 * rows * hidden + keys) + (sites - 1) * states  # layers add a residual
    assert sum(amount.num_bytes for amount in amounts) == microbatches * passes
    kept = planned(fused=False).peak.by_component[ACTIVATIONS] - found.peak.by_component[ACTIVATIONS]
    assert kept >= (sites - 1) * rows * length * hidden, "the masks of the layers, a byte for each element"
