"""Small models of every family with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.families import EXPERTS


def build_experts(model_type: str, **changed: Any) -> nn.Module:
    """Return a model with the same weights at every call; routers have scores that differ clearly."""
    config = AutoConfig.for_model(model_type, **EXPERTS[model_type] | changed)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model
