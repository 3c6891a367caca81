"""LoRA on the fused matrices of experts, in the form of `target_parameters` of PEFT.

A matrix `[experts, out, in]` gets factors `A` `[experts, rank, in]` and `B` `[experts, out, rank]`. The rows of an
expert go through its factors, so that no sum of a weight and a product is ever formed in training.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.base.errors import Problems, UsageError
from trainer.features.experts.adapters_section import ExpertAdapterKeys
from trainer.features.experts.counts import RowCounts
from trainer.features.experts.products import ALIGNED, rows_times, use_products
from trainer.models.adapters import PartsAdder
from trainer.models.merged_weights import is_fused
from trainer.models.names import nothing_matches
from trainer.parallel.tensor.kinds import ATTRIBUTE
from trainer.parallel.tensor.low_rank import Factors, drawn_factor
from trainer.recipe.schema import Adapter, Model
from trainer.recipe.schema.model import matches

_KEY = "model.adapter.target_parameters"


class ExpertFactors(Factors):
    """The products `scaling * B_e A_e x` of the rows `x` of each expert `e`."""

    def forward(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """Return the products `[n, out]` of rows `[n, in]` that are sorted by expert."""
        first: Tensor = self.A
        second: Tensor = self.B
        if counts.is_grouped and (lacking := -self.rank % ALIGNED):
            # Rows of zeros change no product.
            first, second = F.pad(first, (0, 0, 0, lacking)), F.pad(second, (0, lacking))
        return rows_times(rows_times(rows, first, counts), second, counts) * self.scaling


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices `[experts, out, in]` or `[experts, in, out]` of the experts of a model."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if is_fused(module)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def _add_factors(model: nn.Module, recipe: Model, adapter: Adapter, seed: int) -> Collection[str]:
    """Add factors to the matrices that `target_parameters` names, and return their names.

    Raises:
        UsageError: a pattern matches no matrix of experts, or a matrix that is trained whole.
    """
    patterns = cast(ExpertAdapterKeys, adapter).target_parameters
    if patterns is None:
        return ()
    matrices = _matrices(model)
    if not matrices:
        raise UsageError(f"`{_KEY}` adapts experts, but {type(model).__name__} has none that are fused; set it to null")
    if patterns == "all-experts":
        names = [name for name, matrix in matrices.items() if not matrix.requires_grad]
    else:
        names = _matched(patterns, matrices)
    for name in names:
        owner, _, key = name.rpartition(".")
        experts = model.get_submodule(owner)
        if not hasattr(experts, ATTRIBUTE):
            experts.add_module(ATTRIBUTE, nn.ModuleDict())
        products = cast(nn.ModuleDict, getattr(experts, ATTRIBUTE))
        products[key] = _factors(name, matrices[name], bool(experts.is_transposed), adapter, seed)
    # Other functions of transformers do not know the factors.
    use_products(model)
    return names


def _matched(patterns: Collection[str], matrices: dict[str, nn.Parameter]) -> list[str]:
    names: dict[str, None] = {}
    problems = Problems()
    for pattern in patterns:
        with problems.collect():
            matched = [name for name in matrices if matches(pattern, name)]
            if not matched:
                raise nothing_matches(_KEY, pattern, list(matrices))
            if whole := next((name for name in matched if matrices[name].requires_grad), None):
                raise UsageError(
                    f"`{_KEY}` adapts frozen matrices, but {whole} is trained whole by"
                    f" `model.adapter.modules_to_save`; remove {pattern!r}, or that module"
                )
            names |= dict.fromkeys(matched)
    problems.raise_all()
    return [name for name in matrices if name in names]


def _factors(name: str, matrix: Tensor, transposed: bool, adapter: Adapter, seed: int) -> ExpertFactors:
    num_experts, out_features, in_features = matrix.mT.shape if transposed else matrix.shape
    rank, most = adapter.rank_of(name), max(in_features, out_features)
    if rank > most:
        raise UsageError(
            f"`model.adapter.rank` must be at most {most}, because {name} has {in_features} inputs and {out_features}"
            f" outputs, but is {rank}; lower it, or give this matrix a rank in `model.adapter.rank_pattern`"
        )
    shapes = {"A": (num_experts, rank, in_features), "B": (num_experts, out_features, rank)}
    owner, _, key = name.rpartition(".")

    def factor(which: str) -> Tensor:
        if matrix.is_meta:
            return torch.empty(shapes[which], device="meta")
        return drawn_factor(f"{owner}.{ATTRIBUTE}.{key}.{which}", shapes[which], seed)

    return ExpertFactors(factor("A"), factor("B"), adapter.scaling_of(name))


EXPERT_FACTORS = PartsAdder(_add_factors, is_fused)
