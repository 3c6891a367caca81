"""The balance of experts: probabilities of routers with their gradients, the load of experts, and its correction.

Knows no model and no layout: arguments are logits, counts and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor


def softmax(logits: Tensor) -> Tensor:
    """Return the probabilities of experts `[tokens, experts]` in fp32."""
    return logits.float().softmax(-1)


def normalised_sigmoid(logits: Tensor) -> Tensor:
    """Return the scores of DeepSeek-V3, divided by their sum (arXiv:2412.19437, equation 19), in fp32."""
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def softmax_gradient(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of `softmax(logits) @ weights`, summed over tokens, `[tokens, experts]`."""
    probabilities = softmax(logits)
    return probabilities * (weights - (probabilities @ weights)[:, None])


def normalised_sigmoid_gradient(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of `normalised_sigmoid(logits) @ weights`, summed over tokens, `[tokens, experts]`."""
    scores = logits.float().sigmoid()
    total = scores.sum(-1, keepdim=True)
    return scores * (1 - scores) / total * (weights - (scores / total @ weights)[:, None])


@dataclass(frozen=True)
class Scoring:
    """The probabilities of a kind of routers, and the gradient of a weighted sum of them."""

    probabilities: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


SOFTMAX = Scoring(softmax, softmax_gradient)
NORMALISED_SIGMOID = Scoring(normalised_sigmoid, normalised_sigmoid_gradient)


def z_gradient(logits: Tensor) -> Tensor:
    """Return the gradient of the sum of `logsumexp(logits) ** 2` over tokens, `[tokens, experts]`."""
    logits = logits.float()
    return 2 * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1)


@dataclass(frozen=True)
class Load:
    """The numbers of the routers of a step, on the host.

    `counts` `[layers, experts]` are the choices of each expert; `entropies` `[layers]` are sums over tokens.
    `probabilities` `[experts]` and `squares` are sums over tokens and layers; None without a loss of routers.
    """

    counts: Tensor
    entropies: Tensor
    num_tokens: int
    probabilities: Tensor | None = None
    squares: Tensor | None = None

    def numbers(self, num_ranks: int) -> dict[str, float]:
        """Return the numbers of a record; `num_ranks` ranks divide the experts of each layer.

        Loads are relative to the mean of their layer, so 1 is balance. They and the share of experts without a token
        are extremes over layers. Entropies are relative to that of equal probabilities: the mean over layers, and the
        least. Losses are without their coefficients.
        """
        num_layers, num_experts = self.counts.shape
        tokens = max(1, self.num_tokens)
        loads = self.counts / self.counts.mean(-1, keepdim=True).clamp(min=1e-9)
        numbers = {
            "expert_load_max": loads.max().item(),
            "expert_load_min": loads.min().item(),
            "experts_unused": (self.counts == 0).double().mean(-1).max().item(),
            "router_entropy": (self.entropies.sum() / (num_layers * tokens)).item() / log(max(2, num_experts)),
            "router_entropy_min": (self.entropies.min() / tokens).item() / log(max(2, num_experts)),
        }
        if self.probabilities is not None and self.squares is not None:
            shares = self.counts.sum(0) / (num_layers * tokens)
            numbers["router_loss"] = num_experts * (shares @ self.probabilities).item() / (num_layers * tokens)
            numbers["router_z_loss"] = self.squares.item() / (num_layers * tokens)
        if num_ranks > 1:
            numbers["expert_rank_load_max"] = loads.view(num_layers, num_ranks, -1).mean(-1).max().item()
        return numbers


@torch.no_grad()
def correct_(bias: Tensor, counts: Tensor, rate: Tensor) -> None:
    """Add `rate` to the biases of experts with fewer tokens than the mean, and subtract it where there are more.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.

    Args:
        bias: the bias of each expert `[experts]`, changed in place.
        counts: the choices of each expert in the global batch `[experts]`.
        rate: a scalar.
    """
    bias.add_(torch.sign(counts.mean() - counts).mul_(rate).to(bias.dtype))
