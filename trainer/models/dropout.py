"""Layout-invariant dropout in an unmodified Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trainer.base.errors import UsageError
from trainer.models.families.table import called_dropouts, first_shared_call, residual_output
from trainer.models.forward_context import replace_forward, run_within
from trainer.parallel.dropout import REMEDY, DropoutKeys, DropoutSite, KeyedDropout, KeyedDropPath
from trainer.parallel.kernel_support import missing

_SITE = "keyed_dropout_site"
# Parts of the names of dropout probabilities in transformers' configurations.
_PROBABILITY_MARKS = ("dropout", "drop_rate", "pdrop", "drop_prob")
# Parts of the names of rates that drop whole branches or layers. `model.dropout: 0` turns these off, too.
_DEPTH_MARKS = ("drop_path", "layerdrop")


def key_dropout(model: nn.Module, keys: DropoutKeys) -> int:
    """Replace every dropout of `model` by its keyed form, with masks from `keys`, and set every module's dropout site.

    A dropout that a module calls as a function is replaced if the family names it.

    Returns:
        The number of replaced dropouts, including stochastic depth.

    Raises:
        UsageError: a module has a kind of dropout without a keyed form.
    """
    replaced = 0
    # Lists, because the loop replaces children.
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            site_name = f"{name}.{child_name}" if name else child_name
            if (keyed := _keyed_form(child, DropoutSite(keys, site_name), model)) is not None:
                setattr(module, child_name, keyed.train(child.training))  # a loaded model is in evaluation mode
                replaced += 1
            # A dropout of whole channels or of alpha kind: a mask of elements would be another function.
            elif isinstance(child, nn.modules.dropout._DropoutNd):
                raise UsageError(f"{name}.{child_name} is a {type(child).__name__}, which has no keyed form; {REMEDY}")
        # Ranks would drop other layers, and the parameters of a dropped layer would have no gradient.
        if getattr(module, "layerdrop", 0):
            raise UsageError(f"{name} drops whole layers (layerdrop), which has no keyed form; {REMEDY}")
        if called := called_dropouts(model, name):
            _key_called(module, name, called, keys)
            replaced += len(called)
        if (forward := residual_output(model, name)) is not None:
            replace_forward(module, forward)
    # Any module may call the attention function, so each gets a site.
    for name, module in model.named_modules():
        setattr(module, _SITE, DropoutSite(keys, f"{name}.attention"))
    return replaced


def _key_called(module: nn.Module, path: str, names: tuple[str, ...], keys: DropoutKeys) -> None:
    """Replace the dropouts that `module` calls as functions by submodules with these names."""
    for name in names:
        module.add_module(name, KeyedDropout(DropoutSite(keys, f"{path}.{name}"), 0.0).train(module.training))

    def context(module: nn.Module) -> AbstractContextManager[Any]:
        # Without dropout there is nothing to replace, and a mode would take time at every function.
        if not module.training:
            return nullcontext()
        return ReplaceCalledDropout([module.get_submodule(name).site for name in names])

    run_within(module, context)


class ReplaceCalledDropout(TorchFunctionMode):
    """Context that replaces the calls of `F.dropout` by keyed dropouts, in order.

    Args:
        sites: the sites of the keyed dropouts; the probability is that of each call.
    """

    def __init__(self, sites: list[Any]) -> None:
        super().__init__()
        self._sites = iter(sites)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.dropout:
            return func(*args, **kwargs)
        # Calls are matched by their order, which the family's table states.
        site: DropoutSite = next(self._sites)
        probability = _dropped_share(func, args, kwargs)
        x: Tensor = args[0] if args else kwargs["input"]
        return site.drop(x, probability) if probability > 0 else x


def _keyed_form(module: nn.Module, site: DropoutSite, model: nn.Module) -> nn.Module | None:
    """Return the keyed form of a dropout or of stochastic depth; None for any other module."""
    if isinstance(module, nn.Dropout):
        # A tensor that all rows share needs one mask, and no row's key.
        shared_from = first_shared_call(model, site.name)
        return KeyedDropout(DropoutSite(site.keys, site.name, shared_from=shared_from), module.p)
    # transformers has one class of stochastic depth per model (`SwinDropPath`), each with one probability.
    probability = getattr(module, "drop_prob", None)
    if type(module).__name__.endswith("DropPath") and isinstance(probability, int | float):
        return KeyedDropPath(site, float(probability))
    return None


def dropout_notes(model: nn.Module, device: torch.device) -> list[str]:
    """Return a note on a GPU that does not run the kernel of keyed dropout; there is none elsewhere."""
    if device.type != "cuda" or not any(isinstance(module, KeyedDropout) for module in model.modules()):
        return []
    obstacle = missing("dropout", device)
    return [] if obstacle is None else [f"dropout stores its masks, because {obstacle}"]


def has_site(module: nn.Module) -> bool:
    """Return whether the dropout of an attention module is keyed."""
    return hasattr(module, _SITE)


def site_of(module: nn.Module) -> DropoutSite:
    """Return the dropout site of an attention module, which `key_dropout` has set."""
    site: DropoutSite = getattr(module, _SITE)
    return site


def move_site(module: nn.Module, move: Callable[[DropoutSite], DropoutSite]) -> None:
    """Change the dropout site of an attention module, if it has one; a module without a site uses torch's dropout."""
    if has_site(module):
        setattr(module, _SITE, move(site_of(module)))


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def _dropped_share(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the dropout probability of a call of a torch function; 0 for a function without dropout."""

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
    """Context that refuses a forward pass that draws from torch's generators.

    It refuses a dropout function at its call, and any other draw at the end of the context.

    Args:
        model: the subject of the messages, such as "model type 'bart'".
    """

    def __init__(self, model: str = "this model") -> None:
        super().__init__()
        self._model = model
        self._states: list[Tensor] = []

    def __enter__(self) -> RefuseUnkeyedDropout:
        # A comparison of the generators before and after finds every draw, whatever function made it.
        self._states = _generator_states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        # Not after an error, which has a cause of its own.
        if exc_type is None and not all(map(torch.equal, self._states, _generator_states())):
            raise UsageError(
                f"{self._model} draws random numbers in its forward pass (jitter or noise), which cannot be keyed;"
                f" {REMEDY}"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _dropped_share(func, args, kwargs) > 0:
            raise UsageError(f"{self._model} calls torch's {func.__name__} directly, which cannot be keyed; {REMEDY}")
        if func is torch.rand:
            return _draw(args, kwargs)
        return func(*args, **kwargs)


def _draw(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return `torch.rand(*args, **kwargs)` without advancing the generator for a scalar.

    transformers draws one scalar per layer even if `layerdrop` is 0, and `key_dropout` refuses any other `layerdrop`.
    """
    before = torch.get_rng_state()
    drawn = torch.rand(*args, **kwargs)
    # Only scalars: a tensor would be noise that reaches the result.
    if drawn.dim() == 0:
        torch.set_rng_state(before)
    return drawn


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    # The read of a state would initialise CUDA in a process that does not use it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def set_probabilities(config: Any, probability: float, given: Mapping[str, Any] | None = None) -> list[str]:
    """Set every dropout probability in a transformers configuration, including lists of probabilities.

    Zero also turns off stochastic depth and layer dropping; another probability keeps their rates.

    Args:
        given: the keys that the recipe sets in the configuration.

    Returns:
        The keys that were set.

    Raises:
        UsageError: the configuration has no dropout probability, or `given` has another one.
    """
    marks = _PROBABILITY_MARKS if probability else (*_PROBABILITY_MARKS, *_DEPTH_MARKS)
    layers = {
        key: value
        for key, value in config.to_dict().items()
        if any(mark in key for mark in marks) and _holds_numbers(value)
    }
    if not layers:
        raise UsageError(
            f"`model.dropout` is {probability}, but a {config.model_type} configuration has no dropout probability; "
            "leave it null"
        )
    for key, value in (given or {}).items():
        name = config.attribute_map.get(key, key)
        if name in layers and any(mark in name for mark in _PROBABILITY_MARKS) and value != probability:
            raise UsageError(
                f"`model.dropout` sets all dropout probabilities to {probability}, but `model.config.{key}` is"
                f" {value}; remove one of them"
            )
    for key, value in layers.items():
        is_sequence = isinstance(value, list | tuple)
        setattr(config, key, type(value)([probability] * len(value)) if is_sequence else probability)
    return list(layers)


def _holds_numbers(value: Any) -> bool:
    return all(type(number) in (int, float) for number in (value if isinstance(value, list | tuple) else [value]))
