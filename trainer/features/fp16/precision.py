"""The parts of a training that fp16 changes."""

from __future__ import annotations

import torch
from torch import nn

from trainer.features.fp16.scaling import DynamicScaler
from trainer.features.fp16.wide_layers import use_wide_products


class Fp16:
    """Gradients of weights are sums over rows in fp32, and a factor keeps gradients of activations in the range."""

    def widen(self, model: nn.Module) -> None:
        use_wide_products(model)

    def scaler(self, device: torch.device) -> DynamicScaler:
        return DynamicScaler(device)
