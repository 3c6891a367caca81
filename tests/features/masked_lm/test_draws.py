from __future__ import annotations

import torch
from scipy import stats

from tests.parallel.test_random import ROWS, correlation_z
from trainer.features.masked_lm.draws import uniforms
from trainer.parallel.random import row_keys, stream_key


def test_uniforms_are_even_in_the_unit_interval():
    numbers = uniforms(row_keys(stream_key(1), ROWS), torch.arange(4096))
    assert numbers.shape == (64, 4096)
    assert numbers.dtype == torch.float64
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-3
    assert abs(correlation_z(numbers[:, 1:], numbers[:, :-1])) < 4
