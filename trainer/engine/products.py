"""The matrix products of a model, by the classes of its modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.models.merged_weights import is_fused
from trainer.parallel.tensor.kinds import MatrixProduct

IS_WIDE = "is_wide_product"
"""The attribute of classes of matrix products with gradients of weights in fp32."""
_PRODUCTS = {nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d}
"""Torch's modules of matrix products. Autocast rounds all their parameters; a subclass may use them in other ways."""


def is_product(kind: type[nn.Module]) -> bool:
    """Return whether a class is one of matrix products: torch's, its wide form, or one of this project."""
    # In its own names only: a class that is derived from a wide one may use the parameters in other ways.
    return kind in _PRODUCTS or issubclass(kind, MatrixProduct) or IS_WIDE in vars(kind)


def rounded_by_autocast(model: nn.Module) -> set[str]:
    """Return the names of the parameters that autocast rounds before each use: those of matrix products only.

    Ranks may gather them in the type of the products, which changes no result. Tied embeddings and norms, which compute
    in fp32, are not among them.
    """
    # A tied weight has several users, and it is rounded only if all of them are products.
    users: dict[Tensor, set[type[nn.Module]]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            is_of_experts = parameter.dim() == 3 and is_fused(module)  # a matrix for each of them
            users.setdefault(parameter, set()).add(MatrixProduct if is_of_experts else type(module))
    return {name for name, parameter in model.named_parameters() if all(map(is_product, users[parameter]))}


def products(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_product(type(module)))
