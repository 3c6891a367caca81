"""Gives an unmodified Hugging Face model dropout that does not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trainer.base.errors import UsageError
from trainer.models.families.table import is_shared_dropout
from trainer.parallel.dropout import REMEDY, DropoutKeys, DropoutSite, KeyedDropout

_SITE = "keyed_dropout_site"
# Names under which configurations of transformers keep a probability of dropout.
_PROBABILITY_MARKS = ("dropout", "drop_rate", "pdrop", "drop_prob")


def key_dropout(model: nn.Module, keys: DropoutKeys) -> int:
    """Replaces every `nn.Dropout` of `model` by one whose masks come from `keys`, and tells every module its site.

    Returns:
        The number of dropouts that were replaced.

    Raises:
        UsageError: a module drops in a way that has no keyed form.
    """
    replaced = 0
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                site_name = f"{name}.{child_name}" if name else child_name
                site = DropoutSite(keys, site_name, shared=is_shared_dropout(model, site_name))
                setattr(module, child_name, KeyedDropout(site, child.p))
                replaced += 1
            elif isinstance(child, nn.modules.dropout._DropoutNd):
                raise UsageError(f"{name}.{child_name} is a {type(child).__name__}, which has no keyed form; {REMEDY}")
        if getattr(module, "layerdrop", 0):
            raise UsageError(f"{name} drops whole layers (layerdrop), which has no keyed form; {REMEDY}")
    # Only the model knows which of its modules call the attention function, so each learns its own name.
    for name, module in model.named_modules():
        setattr(module, _SITE, DropoutSite(keys, f"{name}.attention"))
    return replaced


def site_of(module: nn.Module) -> DropoutSite:
    """The dropout site of an attention module that `key_dropout` has prepared."""
    site: DropoutSite = getattr(module, _SITE)
    return site


def move_site(module: nn.Module, move: Callable[[DropoutSite], DropoutSite]) -> None:
    """Changes the dropout site of an attention module; one that was never told a site uses torch's own dropout."""
    if hasattr(module, _SITE):
        setattr(module, _SITE, move(site_of(module)))


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def _dropped_share(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """What a call of one of torch's functions drops; 0 for a function that is none of those that drop."""

    def given(name: str, place: int, default: Any) -> Any:
        return kwargs.get(name, args[place] if len(args) > place else default)

    if func in _DROPOUTS:
        return float(given("p", 1, 0.5)) if given("training", 2, True) else 0.0
    if func is torch.dropout:
        return float(given("p", 1, 0.5)) if given("train", 2, True) else 0.0
    if func is F.multi_head_attention_forward:
        return float(given("dropout_p", 10, 0.0)) if given("training", 13, True) else 0.0
    return float(given("dropout_p", 4, 0.0)) if func is F.scaled_dot_product_attention else 0.0


class RefuseUnkeyedDropout(TorchFunctionMode):
    """Inside, a model that drops activations with torch's own generator is an error instead of a silent difference."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _dropped_share(func, args, kwargs) > 0:
            raise UsageError(f"this model calls torch's {func.__name__} directly, which cannot be keyed; {REMEDY}")
        return func(*args, **kwargs)


def set_probabilities(config: Any, probability: float) -> list[str]:
    """Sets every dropout probability in a transformers configuration.

    Returns:
        The keys that were set.

    Raises:
        UsageError: the configuration has none.
    """
    keys = [
        key
        for key, value in config.to_dict().items()
        if any(mark in key for mark in _PROBABILITY_MARKS)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ]
    if not keys:
        raise UsageError(
            f"`model.dropout` is {probability}, but a {config.model_type} configuration has no dropout probability; "
            "leave it null"
        )
    for key in keys:
        setattr(config, key, probability)
    return keys
