"""Weights that are drawn while they are on a GPU, as under ZeRO-3, have the bits of weights drawn on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_draw import fresh
from trainer.models.draw import draw_weights, whole_already

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_weights_do_not_depend_on_the_device():
    models = [fresh(), fresh().to("cuda")]
    for model in models:
        draw_weights(model, dict(model.named_parameters()), 1, whole_already)
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected)
