"""The kernel of losses over a vocabulary: its code for GPUs, and all its tests in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.interpreting import needs_triton, run_interpreted


@needs_triton
@pytest.mark.slow
def test_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_rows.py"))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("width", [128_256, 30_522])
def test_its_code_spills_nothing(width: int):
    from tests.helpers.kernel_compiling import compiled_for
    from trainer.features.chunked_head import fused_rows

    logits, labels = torch.empty(2, width, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    with compiled_for((9, 0)) as found:
        statistics = fused_rows.statistics(logits, labels, width, 0, width)
        fused_rows.write_gradients(logits, labels, statistics, torch.ones(2), width, 0, width)
        fused_rows.statistics_and_gradients(logits, labels, width, 0, width)
    assert len(found) == 3
    assert [usage for usage in found if usage.stack_bytes or usage.registers > 64] == []
