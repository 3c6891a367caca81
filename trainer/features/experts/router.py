"""The losses of routers, as a function of the global batch, and the load of experts.

With E experts, N tokens of the global batch times layers, f_e the choices of expert e divided by N, and P_e its mean
probability, the load balancing loss is E * sum_e f_e P_e (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6, as
transformers computes it for one batch). f has no gradient, so with f known, the gradient is a sum over tokens: that of
E * sum_e f_e p_e / N for each of them. So f is counted over all ranks before the first backward pass: after the only
microbatch of a step, or in a first pass of all microbatches without gradients, which pipeline stages always need.

The z loss is the mean of logsumexp(logits)^2 over tokens and layers (Zoph et al. 2022, arXiv:2202.08906, equation 5).

The gradients enter at the weights of the chosen experts, in the backward pass of the layer, so they pass through
recomputation and wrappers as the other gradients do. Padding and fillers do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.engine.forward import ModelForward
from trainer.features.experts.balance import NORMALISED_SIGMOID, SOFTMAX, Load, Scoring, correct_, z_gradient
from trainer.models.place import PlacedModel
from trainer.parallel.copying import begin_to_host
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.placement import CONTEXT_AXIS, PIPELINE_AXIS
from trainer.recipe.registered import value_at
from trainer.recipe.schema import Recipe

SCORINGS: Mapping[str, Scoring] = {
    "mixtral": SOFTMAX,
    "qwen2_moe": SOFTMAX,
    "qwen3_moe": SOFTMAX,
    "olmoe": SOFTMAX,
    "gpt_oss": SOFTMAX,
    "deepseek_v2": SOFTMAX,
    "deepseek_v3": NORMALISED_SIGMOID,
}
"""The probabilities of the routers of each model type."""
_BIAS = "e_score_correction_bias"
KEYS = _LOSS, _Z_LOSS, _BIAS_RATE = ("task.router_loss", "task.router_z_loss", "task.router_bias_rate")


def routers_of(model: Any) -> list[nn.Module]:
    """Return the routers of a model in order; their outputs are logits, weights and indices of the chosen experts.

    Those of other pipeline stages are on `meta`.
    """
    recorded = getattr(type(model), "_can_record_outputs", None) or {}
    kind = getattr(recorded.get("router_logits"), "target_class", None)
    return [] if kind is None else [module for module in _every_module(model) if isinstance(module, kind)]


def _every_module(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        yield from module.original.modules() if isinstance(module, Absent) else (module,)


def add_losses(built: PlacedModel, recipe: Recipe) -> None:
    """Let the routers of a model add their losses, and be balanced, as a recipe asks.

    Raises:
        UsageError: the model has no routers, they are of an unknown kind, or they have no bias.
    """
    if built.inner:
        return
    model: Any = built.model
    key = next(key for key in KEYS if value_at(recipe, key) is not None)
    routers, scoring = routers_of(model), SCORINGS.get(model.config.model_type)
    if not routers or scoring is None:
        raise UsageError(
            f"`{key}` needs a mixture of experts of a known type ({', '.join(SCORINGS)}), but the model is of type"
            f" {model.config.model_type}" + (" without a layer of experts" * bool(scoring)) + "; set it to null"
        )
    if value_at(recipe, _BIAS_RATE) is not None and not all(hasattr(router, _BIAS) for router in routers):
        raise UsageError(
            f"`{_BIAS_RATE}` needs routers with a bias for the choice of experts, as those of deepseek_v3, but a"
            f" {model.config.model_type} has none; use `{_LOSS}`"
        )
    built.inner.append(partial(Routers, scoring))


def watch_routers(built: PlacedModel, recipe: Recipe) -> None:
    """Let the routers of a model count the load of experts, unless a key does or the layout cannot."""
    if built.inner:
        return
    # Compiled and captured passes run no counts of Python; other engines read no numbers.
    if recipe.compile or recipe.cuda_graphs is True or recipe.parallel.strategy not in ("ddp", "fsdp", "hsdp"):
        return
    if routers_of(built.model):
        built.inner.append(partial(Routers, SCORINGS[cast(Any, built.model).config.model_type]))


@dataclass(frozen=True)
class _Pass:
    """The forward pass of a microbatch.

    `mask` is 1 for its tokens and 0 for padding `[rows, positions]`; None: routers see no padding.
    """

    routers: Routers
    mask: Tensor | None
    counts: bool  # whether its tokens count; those of a filler do not
    contexts: tuple[int, int]  # the index of this rank among those that share the positions, and their number

    def seen(self, number: int) -> Tensor | None:
        """Return the mask of the positions that a router of this rank sees, `[number]`."""
        if self.mask is None:
            return None
        index, count = self.contexts
        own, others = divmod(number, len(self.mask))
        assert not others, "a router sees as many positions of each row"
        # Context ranks have equal parts of rows, with padding behind the last one.
        padded = F.pad(self.mask, (0, own * count - self.mask.shape[1]))
        return padded[:, own * index : own * (index + 1)].flatten()


class Routers:
    """The routers of a model in training; see `InnerLoss`."""

    def __init__(self, scoring: Scoring, forward: ModelForward) -> None:
        self._scoring, self._forward, self._mesh = scoring, forward, forward.mesh
        recipe = forward.plan.recipe
        self._loss, self._z_loss, self._bias_rate = (value_at(recipe, key) for key in KEYS)
        self._num_ranks = getattr(forward.plan.layout, "ep", 1)
        self.adds = self._loss is not None or self._z_loss is not None
        self._sums: tuple[Tensor, ...] | None = None
        self._contexts = self._mesh.index(CONTEXT_AXIS), self._mesh.size(CONTEXT_AXIS)
        self._pass = _Pass(self, None, False, self._contexts)
        self._is_open = False

    def begin(self, batch: RankBatch, scale: Tensor | None) -> bool:
        self._num_tokens, self._scale = batch.num_tokens, 1.0 if scale is None else scale
        if self._sums is None:
            self._allocate(*self._watched())
        # All layers joined, as in transformers.
        self._number = max(1, batch.num_tokens) * len(self._counts)
        # The backward pass of a pipeline begins before all stages have counted.
        several = len(batch.microbatches) > 1 or self._mesh.size(PIPELINE_AXIS) > 1
        self._counts_first = self._loss is not None and several
        self._weights: Tensor | None = None
        self._clear()
        return self._counts_first

    def _watched(self) -> tuple[int, int]:
        """Follow the routers of this rank, and return the number of layers of the whole model and of experts."""
        self._routers: dict[int, Any] = {}
        for model in self._forward.models:
            routers, here = routers_of(model), set(model.modules())
            self._routers |= {layer: router for layer, router in enumerate(routers) if router in here}
        for layer, router in self._routers.items():
            router.register_forward_hook(partial(self._observe, layer))
        return len(routers), cast(Any, routers[0]).num_experts

    def _allocate(self, num_layers: int, num_experts: int) -> None:
        """Allocate the sums of a step once: a captured pass adds to the same memory in each replay."""
        device = self._mesh.device
        self._counts = torch.empty((num_layers, num_experts), dtype=torch.int64, device=device)
        # In fp64, the order of microbatches does not matter.
        self._probabilities = torch.empty(num_experts, dtype=torch.float64, device=device)
        self._squares = torch.empty(1, dtype=torch.float64, device=device)
        self._entropies = torch.empty(num_layers, dtype=torch.float64, device=device)
        self._sums = (self._counts, self._entropies, *((self._probabilities, self._squares) if self.adds else ()))

    def _clear(self) -> None:
        for sums in self._sums or ():
            sums.zero_()

    @contextmanager
    def running(self, microbatch: Microbatch) -> Iterator[None]:
        mask = microbatch.inputs.get("attention_mask")
        if microbatch.flat is not None:
            # Context ranks pad the joined rows.
            places = microbatch.flat.rows
            mask = None if self._contexts[1] == 1 else torch.ones_like(places)[None]
        rows = None if mask is None else mask.flatten(0, -2)
        self._pass = _Pass(self, rows, not microbatch.filler, self._contexts)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        if self._loss is not None and self._weights is None and torch.is_grad_enabled():
            self._set_weights()

    def counted(self) -> None:
        if self._counts_first:
            self._set_weights()
        self._clear()  # the passes with gradients count again

    def _set_weights(self) -> None:
        """Set the weights of probabilities in the loss, `[experts]`, from the choices of the global batch."""
        chosen = self._mesh.sum_(self._of_model(self._counts.sum(0)), "dp")
        self._weights = (chosen.double() * (self._loss * len(chosen) / self._number**2)).float()

    def _observe(self, layer: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if not router.training:
            return None
        logits, weights, chosen = output
        # A recomputation comes after the forward pass of the model, and does not count.
        if self._is_open and self._pass.counts:
            self._count(layer, logits.detach(), chosen)
        if not (self.adds and torch.is_grad_enabled()):
            return None
        return logits, _WithLosses.apply(weights, logits, self._pass), chosen  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _count(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        probabilities, mask = self._scoring.probabilities(logits), self._pass.seen(len(logits))
        ones = torch.ones_like(chosen) if mask is None else mask.to(chosen.dtype)[:, None].expand_as(chosen)
        self._counts[layer].scatter_add_(0, chosen.flatten(), ones.flatten())
        weights = None
        if mask is not None:
            weights = mask.to(probabilities.dtype)[:, None]
        entropies = torch.special.entr(probabilities)
        self._entropies[layer] += (entropies if weights is None else entropies * weights).sum(dtype=torch.float64)
        if not self.adds:  # fewer kernels where no loss needs these
            return
        squares = logits.float().logsumexp(-1, keepdim=True).square()
        if weights is not None:
            probabilities, squares = probabilities * weights, squares * weights
        self._probabilities += probabilities.sum(0, dtype=torch.float64)
        self._squares += squares.sum(dtype=torch.float64)

    def gradient(self, logits: Tensor, of: _Pass) -> Tensor:
        """Return the gradient of this step's losses with respect to the logits of a pass."""
        gradient = torch.zeros_like(logits, dtype=torch.float32)
        if not of.counts:
            return gradient
        if self._loss is not None:
            assert self._weights is not None, "the choices are counted before the backward pass"
            gradient += self._scoring.gradient(logits, self._weights)
        if self._z_loss is not None:
            gradient += z_gradient(logits) * (self._z_loss / self._number)
        gradient *= self._scale
        mask = of.seen(len(logits))
        return gradient if mask is None else gradient * mask.to(gradient.dtype)[:, None]

    def finish(self, share: Tensor) -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        own = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if self._weights is not None:
            own = own + self._weights.double() @ self._probabilities
        if self._z_loss is not None:
            own = own + self._squares[0] * (self._z_loss / self._number)
        of_rank = torch.cat([own.view(1), *(sums.flatten().double() for sums in self._sums or ())])
        own, whole = torch.tensor_split(self._of_model(of_rank), (1,))
        # On its way to the host before the numbers of the step, which its reader waits for.
        whole = self._mesh.sum_(whole, "dp")
        self._whole_counts = whole[: self._counts.numel()].view_as(self._counts)
        return share + own[0].to(share.dtype), partial(self._numbers, begin_to_host({"whole": whole}), self._num_tokens)

    def _of_model(self, sums: Tensor) -> Tensor:
        """Return sums over all layers and positions of the rows of this rank, in place."""
        return self._mesh.sum_(self._mesh.sum_(sums, PIPELINE_AXIS), CONTEXT_AXIS)

    def _numbers(self, read: Callable[[], dict[str, Tensor]], num_tokens: int) -> dict[str, float]:
        sizes = [sums.numel() for sums in self._sums or ()]
        counts, entropies, *of_losses = torch.split(read()["whole"], sizes)
        return Load(counts.view(self._counts.shape), entropies, num_tokens, *of_losses).numbers(self._num_ranks)

    def updated(self, flag: Tensor) -> None:
        if self._bias_rate is None:
            return
        rate = (1.0 - flag) * self._bias_rate  # a bad step changes nothing
        for layer, router in self._routers.items():
            correct_(getattr(router, _BIAS), self._whole_counts[layer], rate)


class _WithLosses(torch.autograd.Function):
    """The weights of the chosen experts as they are; the backward pass adds the gradients of the losses to the logits.

    A recomputation fills only the saved logits, so the pass is that of the first forward pass.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, of: _Pass) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.of = of
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits,) = ctx.saved_tensors
        return gradients[0], ctx.of.routers.gradient(logits, ctx.of).to(logits.dtype), None
