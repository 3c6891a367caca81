"""The modules of a sentence embedding after its model: pooling, dense layers, normalisation, learned temperature."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.features.embeddings.names import HIGHEST_SCALE, SCALE_FOLDER, DenseLayer
from trainer.parallel.dtypes import at_least_fp32


class LearnedTemperature(nn.Module):
    """A temperature that is learned as `exp(-log)`, at least 1 / 100 (Radford et al. 2021, arXiv:2103.00020).

    Beyond the bound, the parameter keeps its gradient, so it can come back.
    """

    has_weight_decay = False
    learned_by = "task.learn_temperature"

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([-math.log(temperature)]))  # FSDP shards no scalar

    def forward(self) -> Tensor:
        log = self.log.float()
        # The value is clamped and the gradient is not, so that the parameter can come back from beyond the bound.
        bounded = log + (log.detach().clamp(max=math.log(HIGHEST_SCALE)) - log.detach())
        return (-bounded).exp()


class _Linear(nn.Linear):
    """A linear layer in the type of its input; weights may be held in 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


class _Dense(nn.Module):
    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        self.linear = _Linear(layer.in_features, layer.out_features, bias=layer.bias)
        if layer.file:
            weights = load_file(layer.file).items()
            self.linear.load_state_dict({name.rpartition(".")[2]: value for name, value in weights})
        else:
            generator = torch.Generator().manual_seed(layer.seed)
            nn.init.normal_(self.linear.weight, std=layer.in_features**-0.5, generator=generator)
        self._activation = getattr(nn, layer.activation_name)()

    def forward(self, embeddings: Tensor) -> Tensor:
        activated: Tensor = self._activation(self.linear(embeddings))
        return activated


class SentenceHead(nn.Module):
    """Embeddings of texts from the hidden states of their tokens.

    Submodules have the names of their folders in an exported folder of sentence-transformers.

    Args:
        temperature: the start of a learned temperature; None: it is not learned.
    """

    def __init__(
        self,
        poolings: Iterable[str],
        normalize: bool,
        dense: Iterable[DenseLayer] = (),
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self._poolings, self._normalize = tuple(poolings), normalize
        self._dense = [layer.folder for layer in dense]
        for layer in dense:
            self.add_module(layer.folder, _Dense(layer))
        self._is_learned = temperature is not None
        if temperature is not None:
            self.add_module(SCALE_FOLDER, LearnedTemperature(temperature))

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the embeddings `[texts, hidden]` in fp32 at least; a learned temperature is one more column.

        With the pooling `tokens`, they are the vectors of all tokens `[texts, sequence, hidden]`.

        Args:
            states: the hidden states `[texts, sequence, hidden]`.
            mask: 1 for the tokens to pool and 0 for others `[texts, sequence]`.
        """
        # Poolings and cosines in fp32: in 16 bits, sums over tokens would lose digits that the loss compares.
        with torch.autocast(states.device.type, enabled=False):
            states = at_least_fp32(states)
            found = torch.cat([_pooled(states, mask, pooling) for pooling in self._poolings], dim=-1)
            for name in self._dense:
                found = self.get_submodule(name)(found)
            if self._normalize:
                found = F.normalize(found, dim=-1)
            if self._is_learned:
                temperature = self.get_submodule(SCALE_FOLDER)().to(found.dtype)
                found = torch.cat([found, temperature.expand(len(found), 1)], dim=-1)
        return found


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return the embeddings `[texts, hidden]` of states `[texts, sequence, hidden]`."""
    texts = torch.arange(states.shape[0], device=states.device)  # a length would be a constant of an exported graph
    if pooling == "cls":
        return states[texts, mask.int().argmax(1)]
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    if pooling == "last":
        # The last token of the mask, wherever padding stands.
        return states[texts, (mask * places).argmax(1)]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "tokens":  # a vector for each of them, and zeros for others
        return states * weights
    if pooling == "max":
        return states.masked_fill(weights == 0, -torch.inf).amax(1)
    if pooling == "weighted_mean":
        weights = weights * places[:, None]
    # The bound of `Pooling` in sentence-transformers, for texts without a token to pool.
    total = weights.sum(1).clamp(min=1e-9)
    return (states * weights).sum(1) / (total.sqrt() if pooling == "mean_sqrt_length" else total)
