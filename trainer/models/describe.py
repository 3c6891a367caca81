"""Describe the model of a recipe: its configuration, its class, and the changes to it before it is cut; no weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.auto.auto_factory import _get_model_class

from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import registered
from trainer.models.added import add_module
from trainer.models.attention import KEYED_ATTENTION, OWN_ATTENTION
from trainer.models.configuration import load_config, require_head, vocabulary_size
from trainer.models.dropout import key_dropout
from trainer.models.families.table import FAMILIES
from trainer.models.freezing import adapt
from trainer.models.hub_files import not_found, one_line, pretrained_files
from trainer.models.parameter_rules import ParameterGroups, parameter_groups
from trainer.models.registered_forms import form_of, without_form
from trainer.models.statistics import fix_statistics
from trainer.parallel.dropout import DropoutKeys
from trainer.recipe.schema import Model, OptimizerKeys, Training

_MOST_SAMPLED = 300_000_000
"""Parameters of a sample that a check builds, in fp32."""
_CANNOT_BUILD = (
    OSError, ValueError, RuntimeError, KeyError, TypeError, ArithmeticError, AssertionError, SafetensorError
)  # fmt: skip
"""Errors of transformers for models that it cannot build; `RecursionError` is a `RuntimeError`."""


@dataclass(frozen=True)
class ModelUse:
    auto_class_name: str  # the head, as the name of an auto class of transformers
    # the configuration keys that the task sets, such as `num_labels`
    options: Mapping[str, Any] = field(default_factory=dict)
    # the id of the tokenizer's padding token, for a model without one; None without a tokenizer
    padding_token: int | None = None
    unused: Sequence[str] = ()  # modules of the base model to freeze, because the task does not use them
    packed: bool = False  # whether rows hold several documents, which the model must keep apart
    is_trained: bool = True  # whether the model learns, and does not only teach
    # a module after the model, with the values of its parameters (`models/added.py`); None: none
    added: nn.Module | None = None


@dataclass(frozen=True)
class ModelDescription:
    """A model of transformers that is not built yet.

    `attention` is the name of its attention function. `is_keyed`: its dropout is independent of the layout.
    `optimizer` forms groups of its parameters; None: it has none.
    """

    recipe: Model
    use: ModelUse
    seed: int
    config: Any
    model_class: Any
    attention: str
    is_keyed: bool
    optimizer: OptimizerKeys | None = None

    @property
    def keyword_arguments(self) -> dict[str, Any]:
        # fp32, whatever the type of the files; a strategy rounds the weights where the recipe asks for it.
        return {"attn_implementation": self.attention, "dtype": torch.float32}

    def new_keys(self) -> DropoutKeys | None:
        """Return the keys of the dropout of one model; None with torch's dropout."""
        return DropoutKeys(self.seed) if self.is_keyed else None

    def on_meta(self) -> nn.Module:
        """Return the whole model on `meta`, without adapters.

        Raises:
            UsageError: transformers cannot build it.
        """
        with self.explained(), torch.device("meta"):
            return self.instantiate()

    def instantiate(self) -> nn.Module:
        """Return the whole model as transformers makes it, with random weights."""
        # A copy, because a model keeps its configuration, and may change it.
        model: nn.Module = self.model_class._from_config(copy.deepcopy(self.config), **self.keyword_arguments)
        return model

    def adapt(self, model: nn.Module, drawn: Sequence[str] = ()) -> None:
        """Add the module of the task and adapters, and freeze as the recipe and the task ask; see `prepare`."""
        if self.use.added is not None:
            add_module(model, self.use.added)
        # After the added module, whose parameters patterns may name; before `unused`, because adapters set
        # `requires_grad` of all parameters.
        adapt(model, self.recipe, self.seed, drawn)
        for name in self.use.unused:
            # The engine refuses a trained parameter without a gradient, and a module without a use gets none.
            if isinstance(module := getattr(model.base_model, name, None), nn.Module):
                module.requires_grad_(False)
        if self.use.added is not None:
            _require_learned(model)

    def adapter_notes(self, model: nn.Module) -> list[str]:
        """Return a note on the weights of a whole model that its adapter reaches and leaves out, if it has one."""
        if self.recipe.adapter is None:
            return []
        from trainer.models.adapters import reach_note

        return [reach_note(model, form_of(self.recipe))]

    def groups(self, model: nn.Module) -> ParameterGroups:
        """Return the groups of the parameters of a whole model after `adapt`; see `parameter_groups`."""
        return ParameterGroups() if self.optimizer is None else parameter_groups(model, self.recipe, self.optimizer)

    def files(self) -> list[str]:
        """Return the files of the pretrained weights; see `pretrained_files`."""
        return pretrained_files(self.recipe, self.config)

    def prepare(self, model: nn.Module, drawn: Sequence[str], keys: DropoutKeys | None) -> list[str]:
        """Freeze, add adapters, key the dropout and fix statistics of a whole model, and return notes for the user.

        Args:
            model: the model, perhaps on `meta`, before it is cut; a cut changes the sites of its dropout.
            drawn: the parameters that a pretrained model does not have.
            keys: those of `new_keys`.

        Raises:
            UsageError: all of a pretrained model is drawn.
        """
        if drawn and {name for name, _ in model.named_parameters()} <= set(drawn):
            raise UsageError(
                f"`model.name_or_path` is {str(self.recipe.name_or_path)!r}, and its files hold no weight of a"
                f" {self.model_class.__name__}; name a folder with weights, or train random ones by `model.config`"
            )
        self.adapt(model, drawn)
        # After `adapt`, because adapters have dropout too.
        return [*self.adapter_notes(model), *_drawn_notes(model, self.recipe, drawn), *self.make_invariant(model, keys)]

    def check_invariance(self, model: nn.Module | None, keys: DropoutKeys | None) -> list[str]:
        """Check a model outside of the table of families, and return notes; see `check_invariance`.

        Args:
            model: the prepared model if this rank holds all of it; None: a sample with random weights is checked.
        """
        if self.config.model_type in FAMILIES:
            return []
        from trainer.models.invariance import check_invariance

        # A rank that holds a part of the model cannot run it.
        checked = self._sample(keys) if model is None or self.use.added is not None else model
        return check_invariance(checked, keys, self.use.packed, self.use.auto_class_name, self.use.is_trained)

    def check_sample(self, keys: DropoutKeys | None) -> list[str]:
        """Check a sample with random weights, as `check_invariance` does, unless it is large; return notes."""
        if self.config.model_type in FAMILIES:
            return []
        from trainer.models.invariance import sample_of

        # On `meta`, because the count of the parameters needs none of their memory.
        with torch.device("meta"):
            size = sum(p.numel() for p in sample_of(self.model_class, self.config, self.attention).parameters())
        if size > _MOST_SAMPLED:
            return [
                f"the forward pass is not tried, because a sample of this model type has {size:,} parameters; a run"
                " tries it when it starts"
            ]
        return self.check_invariance(None, keys)

    def _sample(self, keys: DropoutKeys | None) -> nn.Module:
        from trainer.models.invariance import sample_of

        sample = sample_of(self.model_class, self.config, self.attention)
        if self.recipe.adapter is not None and self.recipe.adapter.dropout:
            # The vocabulary of the sample is small, and its weights have no meaning.
            parts = dict.fromkeys(row.name.rpartition(".")[2] for row in registered("adapter"))
            adapter = self.recipe.adapter.model_copy(update={"start": None, **parts})
            adapted = self.recipe.model_copy(
                update={"freeze": None, "adapter": adapter, "new_tokens": None, **without_form()}
            )
            try:
                adapt(sample, adapted, self.seed)
            except UsageError:  # a target is in a layer that the sample lacks
                sample = sample_of(self.model_class, self.config, self.attention, is_whole=True)
                adapt(sample, adapted, self.seed)
        self.make_invariant(sample, keys)
        return sample

    def make_invariant(self, model: nn.Module, keys: DropoutKeys | None) -> list[str]:
        """Key the dropout of a whole model, fix its statistics, and name its padding; return notes for the user."""
        if keys is not None:
            key_dropout(model, keys)
        if (family := FAMILIES.get(self.config.model_type)) and family.change:
            family.change(model)
        notes = [*fix_statistics(model), *_name_padding(model, self.use.padding_token)]
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        return notes

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of transformers for a model that it cannot build as errors for the user."""
        try:
            yield
        except _CANNOT_BUILD as error:
            if not self.recipe.is_random and "ignore_mismatched_sizes" in str(error):
                raise sizes_differ("some weights") from error
            raise self.not_described(error) from error

    def not_described(self, error: Exception) -> TrainerError:
        """Return the error for the user, for an error of a model that cannot be built."""
        if self.recipe.is_random:
            name, size = self.use.auto_class_name, vocabulary_size(self.config)
            padding = getattr(self.config, "pad_token_id", None)
            if size is not None and padding is not None and padding >= size:
                return UsageError(
                    f"`model.config.pad_token_id` must be below `vocab_size` {size:,}, but is {padding:,}; write the id"
                    " of your tokenizer's padding, such as 0"
                )
            return UsageError(f"`model.config` does not describe an {name}: {one_line(error)}")
        return not_found("model.name_or_path", str(self.recipe.name_or_path), error)


def describe(
    recipe: Model, training: Training, use: ModelUse, optimizer: OptimizerKeys | None = None
) -> ModelDescription:
    """Describe the model of a recipe for a task and, if it is trained, for its optimizer.

    Raises:
        UsageError: the configuration cannot be loaded, or transformers does not have the head for it.
    """
    config = load_config(recipe, use.options)
    auto_class = getattr(transformers, use.auto_class_name)
    require_head(recipe, config, auto_class)
    # A configuration may have several classes for a head; transformers then chooses by its `architectures`.
    model_class = _get_model_class(config, auto_class._model_mapping)
    is_keyed = training.layout_invariant_dropout
    attention = _attention(model_class, is_keyed)
    return ModelDescription(recipe, use, training.seed, config, model_class, attention, is_keyed, optimizer)


def _attention(model_class: Any, is_keyed: bool) -> str:
    """Return the name of the attention function for a model class of transformers.

    A class that does not support SDPA computes another formula, such as capped scores or attention sinks.

    A class without transformers' attention interface has its own attention and adds a mask to its scores. It needs the
    additive mask that transformers makes under "eager". Its dropout modules are keyed like all others.
    """
    if not is_keyed:
        # With torch's own dropout no site is needed, so transformers' functions serve as they are.
        return "sdpa" if model_class._supports_sdpa else "eager"
    if not model_class._can_set_attn_implementation():
        return "eager"
    is_own = not model_class._supports_sdpa and hasattr(sys.modules[model_class.__module__], "eager_attention_forward")
    return OWN_ATTENTION if is_own else KEYED_ATTENTION


def _require_learned(model: nn.Module) -> None:
    """Refuse a parameter of an added module that a key of the recipe learns, and another one freezes."""
    for name, module in model.named_modules():
        key = getattr(module, "learned_by", None)
        if key is not None and not all(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError(
                f"`{key}` is true, but {name} is frozen; leave it out of `model.freeze`, name it in"
                f" `model.adapter.modules_to_save`, or set `{key}` to false"
            )


def sizes_differ(which: str, only_head: bool = False) -> UsageError:
    """Return the error for a checkpoint of another model or another task."""
    remedy = "set `model.new_head` to true" if only_head else "use a checkpoint with the task's number of labels"
    return UsageError(
        f"`model.name_or_path` is a checkpoint in which {which} have another size than in this task's model;"
        f" {remedy}, or use one without a head"
    )


def _drawn_notes(model: nn.Module, recipe: Model, drawn: Sequence[str]) -> list[str]:
    """Return notes on the modules with random weights in a pretrained model that is partly frozen."""
    if not recipe.is_partly_frozen:
        return []
    owners: dict[bool, list[str]] = {True: [], False: []}
    for name in drawn:
        owners[model.get_parameter(name).requires_grad].append(name.rpartition(".")[0])
    trained, frozen = (", ".join(dict.fromkeys(owners[key])) for key in (True, False))
    notes = [f"initialised at random and trained whole, beside frozen weights: {trained}"] if trained else []
    if frozen:
        key = "`model.freeze` leaves out" if recipe.adapter is None else "`model.adapter.modules_to_save` names"
        notes.append(
            f"initialised at random and never trained, because they are frozen: {frozen}; {key} modules to train"
        )
    return notes


def _name_padding(model: Any, padding_token: int | None) -> list[str]:
    """Set the tokenizer's padding token in the configuration of a model without a padding token.

    A decoder with a classification head reads the last token before the padding. The token is not set while weights are
    drawn, because some models would draw a zero vector for it.
    """
    if padding_token is None or model.main_input_name != "input_ids":
        return []
    config = model.config.get_text_config()
    named = getattr(config, "pad_token_id", None)
    if isinstance(named, int) and named >= 0:
        return []
    # Both, because a model of several parts has a text configuration of its own.
    config.pad_token_id = model.config.pad_token_id = padding_token
    return [f"the model names no padding token, so it takes the tokenizer's, of id {padding_token}"]


def _warn_of_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Replace transformers' warning of padding without a mask: only packed rows have none, and padding ends them."""
