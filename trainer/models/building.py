"""Build the model of a recipe: pretrained, from a folder or the hub, or with random weights."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import CONFIG_NAME

from trainer.base.errors import TrainerError, UsageError
from trainer.models.adapters import adapt, without_adapters
from trainer.models.attention import KEYED_ATTENTION
from trainer.models.cutting import ModelCut
from trainer.models.dropout import key_dropout, set_probabilities
from trainer.models.families.table import FAMILIES
from trainer.models.heads import ChunkedHead
from trainer.models.initialising import Gather, draw_weights, whole_already
from trainer.models.invariance import check_invariance, sample_of
from trainer.models.loading import CannotLoadPartsError, load_parts, require_safe_shards, sizes_differ
from trainer.models.stages import StagePart
from trainer.models.statistics import fix_statistics
from trainer.models.writing import described_model, transformers_class, write_weights
from trainer.parallel.cross_entropy import VocabularyCut
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.linear import ColumnParallelLinear
from trainer.parallel.placement import Placements
from trainer.recipe.schema import Adapter, Model, Training


@dataclass(frozen=True)
class BuiltModel:
    """A Hugging Face model in fp32 on the CPU, before it is placed.

    `dropout_keys` is None if the recipe chose torch's dropout. `notes` are messages for the user about the build, such
    as weights that the checkpoint does not hold.

    `placements` are the placements of its parameters if the model was cut over tensor ranks or into stages; None means
    that the model is whole. `part` describes its pipeline stage; None means that there is no pipeline.
    `head` is its output head if that works in chunks of tokens.
    """

    model: nn.Module
    dropout_keys: DropoutKeys | None
    notes: list[str] = field(default_factory=list)
    placements: Placements | None = None
    part: StagePart | None = None
    head: ChunkedHead | None = None

    @property
    def vocabulary(self) -> VocabularyCut | None:
        """The cut of the logits over the vocabulary; None if they are whole, or not over a vocabulary."""
        heads = [m for m in self.model.modules() if isinstance(m, ColumnParallelLinear) and m.pads]
        assert len(heads) <= 1, f"a model has one head over its vocabulary, not {len(heads)}"
        return VocabularyCut(heads[0].group, heads[0].whole_out_features) if heads else None


def _one_line(error: Exception) -> str:
    """Return the message of an error of transformers on one line of at most 300 characters."""
    return shorten(str(error), 300, placeholder=" ...") or type(error).__name__


def not_found(key: str, name: str, error: Exception) -> UsageError:
    """Return the error for a folder or repository, named by the recipe's `key`, that could not be opened."""
    return UsageError(
        f"`{key}` is {name!r}, which could not be opened: {_one_line(error)}; give a folder that holds it, or the name"
        " of a repository that this machine can reach or has in its cache"
    )


def vocabulary_size(config: Any) -> int | None:
    """Return the number of tokens with an embedding, or None if the configuration does not hold it."""
    try:
        described = config.get_text_config()
    except ValueError:  # the configuration describes several text models
        return None
    size = getattr(described, "vocab_size", None)
    return size if isinstance(size, int) else None


_POSITIONS_AFTER_PADDING = frozenset(
    ("camembert", "data2vec-text", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod")
)  # fmt: skip
"""Model types that number positions from the padding token's id + 1."""


def max_positions(config: Any) -> int | None:
    """Return the most tokens that the model has positions for; None without such a limit, as with rotary positions."""
    size = getattr(config, "max_position_embeddings", None)
    is_rotary = getattr(config, "rope_parameters", None) is not None
    is_relative = not getattr(config, "position_biased_input", True)  # of DeBERTa
    if not isinstance(size, int) or size <= 0 or is_rotary or is_relative:
        return None
    return size - (config.pad_token_id + 1) if config.model_type in _POSITIONS_AFTER_PADDING else size


def checkpoint_labels(recipe: Model, config: Any) -> tuple[str, ...] | None:
    """Return the class names of a fine-tuned checkpoint in order; None if it has none, or only default names."""
    labels = getattr(config, "id2label", None)
    if recipe.config is not None or not labels:
        return None
    names = tuple(str(labels[index]) for index in sorted(labels))
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def _described_config(described: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Build the configuration from a recipe's `model.config`.

    Raises:
        UsageError: the model type is unknown, the task sets a key, or the model type does not read a key.
        ValueError: transformers rejects the configuration.
        TypeError, StrictDataclassError: a value has the wrong type.
    """
    keys = dict(described)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        meant = f'did you mean "{near[0]}"?' if near else 'write one such as "bert"'
        raise UsageError(
            f"`model.config.model_type` must be a model type of transformers, but is {model_type!r}; {meant}"
        )
    for key in keys:
        if key in options or key == "num_labels":
            raise UsageError(f"`model.config.{key}` is set by `task`; remove it")
    config = AutoConfig.for_model(model_type, **keys, **options)
    config.architectures = []  # transformers iterates over it for types with several classes, such as deit
    family = FAMILIES.get(model_type)
    undeclared = family.undeclared_keys if family else ()
    known = {*(field.name for field in fields(config)), *config.attribute_map, *_read_keys(type(config)), *undeclared}
    # Transformers stores an unknown key as an attribute. It does not store an older name of a known key.
    for key in keys.keys() - known:
        if key in vars(config):
            near = get_close_matches(key, known, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "remove it"
            raise UsageError(f"`model.config.{key}` is not a key of a {model_type} configuration; {meant}")
    return config


def _read_keys(config_class: type) -> set[str]:
    """Return the keys that a configuration class reads without declaring them, such as older names and switches.

    Examples are `tie_word_embeddings` of T5 and `global_attn_every_n_layers` of ModernBERT.
    """
    own = [cls for cls in config_class.__mro__ if issubclass(cls, PreTrainedConfig) and cls is not PreTrainedConfig]
    return {key for cls in own for key in re.findall(r'kwargs(?:\.get\(|\.pop\(|\[)"(\w+)"', inspect.getsource(cls))}


def load_config(recipe: Model, options: Mapping[str, Any]) -> Any:
    """Load the transformers configuration of the recipe's model, with the task's `options` and the recipe's dropout.

    Raises:
        UsageError: the configuration cannot be loaded, or does not describe a model.
    """
    try:
        if recipe.config is not None:
            config = _described_config(recipe.config, options)
        else:
            config = AutoConfig.from_pretrained(
                recipe.name_or_path, revision=recipe.revision or "main", trust_remote_code=False, **options
            )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        if recipe.config is not None:
            raise UsageError(
                f"`model.config` does not describe a model of transformers: {_one_line(error)}; mend it"
            ) from error
        raise not_found("model.name_or_path", str(recipe.name_or_path), error) from error
    if recipe.dropout is not None:
        set_probabilities(config, recipe.dropout)
    family = FAMILIES.get(config.model_type)
    if family and family.starts_with_padding and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # the model reads the key, but has no default
    return config


def _require_head(recipe: Model, config: Any, auto_class: Any) -> None:
    """Refuse a model type for which transformers does not have the task's head.

    Raises:
        UsageError: there is no such head; the message names the families of the table that have it.
    """
    able = auto_class._model_mapping  # keyed by configuration class; listing it would import every model
    if type(config) in able:
        return
    families = ", ".join(sorted(known for known in FAMILIES if CONFIG_MAPPING[known] in able))
    key, what = "model.config.model_type", f'is "{config.model_type}"'
    if recipe.config is None:
        key, what = "model.name_or_path", f'is "{recipe.name_or_path}", of type {config.model_type}'
    raise UsageError(
        f"`{key}` must be of a type that has the head of `task.type` ({auto_class.__name__}), but {what}, which has"
        f" none; use one that has, such as {families}, or another task"
    )


def _initialise(
    auto_class: Any, recipe: Model, config: Any, attention: str, seed: int, gather: Gather
) -> tuple[nn.Module, list[str]]:
    """Return the model in fp32 on the CPU, and notes; weights that are not loaded depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if recipe.config is not None:
            from_config = getattr(auto_class, "from_config", None) or auto_class._from_config  # a class has the second
            model = from_config(config, attn_implementation=attention, dtype=torch.float32)
            draw_weights(model, dict(model.named_parameters()), seed, gather)
            return model, []
        require_safe_shards(recipe)
        with _without_report():
            model, loading = auto_class.from_pretrained(
                recipe.name_or_path,
                config=config,
                revision=recipe.revision or "main",
                attn_implementation=attention,
                dtype=torch.float32,
                use_safetensors=True,  # a pickle can run code
                trust_remote_code=False,
                output_loading_info=True,
            )
    notes = []
    if missing := sorted(loading["missing_keys"]):
        draw_weights(model, missing, seed, gather)
        notes.append(f"not in the checkpoint, drawn at random: {', '.join(missing)}")
    if unexpected := sorted(loading["unexpected_keys"]):
        notes.append(f"in the checkpoint, not in this model: {', '.join(unexpected)}")
    return model, notes


@contextmanager
def _without_report() -> Iterator[None]:
    """Hide the report of transformers on a loaded model, one for each rank: the notes of the build say the same."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def build_base(described: Any, recipe: Model, seed: int) -> nn.Module:
    """Build the model that an adapter was added to, whole and in fp32 on the CPU.

    Args:
        described: the model on `meta`, from `described_model`.
        recipe: the recipe's `model`.
        seed: the recipe's seed.

    Raises:
        UsageError: the weights cannot be loaded.
    """
    config = copy.deepcopy(described.config)
    if recipe.config is not None and "pad_token_id" not in recipe.config:
        config.pad_token_id = type(config)().pad_token_id  # see `_name_padding`
    try:
        return _initialise(type(described), recipe, config, "eager", seed, whole_already)[0]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise not_found("model.name_or_path", str(recipe.name_or_path), error) from error


def build_model(
    recipe: Model,
    training: Training,
    auto_class_name: str,
    options: Mapping[str, Any],
    gather: Gather = whole_already,
    cut: ModelCut | None = None,
    pad_token_id: int | None = None,
) -> BuiltModel:
    """Build the model, with the same weights on every rank and under every layout.

    Args:
        recipe: the recipe's `model`.
        training: the recipe's `training`, for the seed and the kind of dropout.
        auto_class_name: the head, as the name of an auto class of transformers.
        options: the configuration keys that the task sets, such as `num_labels`.
        gather: the context that makes parameters whole, if they are partitioned while the model is built.
        cut: the cut of the model, or None. With a cut, the result holds this rank's parts only. If the model cannot be
            loaded in parts, the rank holds the whole model during the build.
        pad_token_id: the tokenizer's padding token, for a model without one; None if there is no tokenizer.

    Raises:
        UsageError: the model cannot be loaded, has no safetensors, has a dropout that cannot be keyed, or cannot be
            cut.
    """
    assert cut is None or gather is whole_already, "parameters are either partitioned while they are built, or cut"
    config = load_config(recipe, options)
    keys = DropoutKeys(training.seed) if training.layout_invariant_dropout else None
    auto_class = getattr(transformers, auto_class_name)
    _require_head(recipe, config, auto_class)
    model_class = _get_model_class(config, auto_class._model_mapping)
    attention = _attention(model_class, training)
    in_table = config.model_type in FAMILIES

    fixed: list[str] = []

    def prepare(model: nn.Module) -> None:
        adapt(model, recipe, training.seed)
        prepare_sample(model)

    def prepare_sample(model: nn.Module) -> None:
        if keys is not None:
            key_dropout(model, keys)
        fixed[:] = [*fix_statistics(model), *_name_padding(model, pad_token_id)]

    def build_whole() -> tuple[nn.Module, list[str]]:
        model, notes = _initialise(auto_class, recipe, config, attention, training.seed, gather)
        prepare(model)  # before the cut, which changes the dropout sites
        if not in_table and gather is whole_already:
            notes += check_invariance(model, keys)
        return model, notes

    def check_sample() -> list[str]:
        sample = sample_of(model_class, config, attention)
        prepare_sample(sample)
        return check_invariance(sample, keys)

    try:
        if cut is None:
            checked = [] if in_table or gather is whole_already else check_sample()
            model, notes = build_whole()
            return BuiltModel(model, keys, [*notes, *checked, *fixed])
        try:
            parts = load_parts(auto_class, recipe, config, attention, training.seed, prepare, cut)
            notes = parts.notes if in_table else [*parts.notes, *check_sample()]
            return BuiltModel(parts.model, keys, [*notes, *fixed], parts.cut.placements, parts.cut.part)
        except CannotLoadPartsError as reason:
            model, notes = build_whole()
            notes.append(f"every rank held the whole model for a moment while it was built, because {reason}")
            made = cut(model)
            return BuiltModel(model, keys, [*notes, *fixed], made.placements, made.part)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if recipe.config is None and "ignore_mismatched_sizes" in str(error):
            raise sizes_differ("some weights") from error
        raise _undescribed(recipe, auto_class_name, error) from error


def _name_padding(model: Any, pad_token_id: int | None) -> list[str]:
    """Set the tokenizer's padding token in the configuration of a model without a padding token.

    A decoder with a classification head reads the last token before the padding. The token is not set while weights are
    drawn, because some models would draw a zero vector for it.
    """
    if pad_token_id is None or model.main_input_name != "input_ids":
        return []
    config = model.config.get_text_config()
    named = getattr(config, "pad_token_id", None)
    if isinstance(named, int) and named >= 0:
        return []
    config.pad_token_id = model.config.pad_token_id = pad_token_id
    return [f"the model names no padding token, so it takes the tokenizer's, of id {pad_token_id}"]


def build_on_meta(recipe: Model, training: Training, auto_class_name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build the recipe's model on the meta device, for estimates; arguments and errors are those of `build_model`."""
    config = load_config(recipe, options)
    auto_class = getattr(transformers, auto_class_name)
    _require_head(recipe, config, auto_class)
    attention = _attention(_get_model_class(config, auto_class._model_mapping), training)
    try:
        with torch.device("meta"):
            model: nn.Module = auto_class.from_config(config, attn_implementation=attention, dtype=torch.float32)
        adapt(model, recipe, training.seed)
    except (ValueError, RuntimeError) as error:
        raise _undescribed(recipe, auto_class_name, error) from error
    return model


def _attention(model_class: Any, training: Training) -> str:
    """Return the name of the attention function for a model class of transformers.

    A class without transformers' attention interface has its own attention and adds a mask to its scores. It needs the
    additive mask that transformers makes under "eager". Its dropout modules are keyed like all others.
    """
    if training.layout_invariant_dropout:
        return KEYED_ATTENTION if model_class._can_set_attn_implementation() else "eager"
    return "sdpa" if model_class._supports_sdpa else "eager"


def _undescribed(recipe: Model, auto_class_name: str, error: Exception) -> UsageError:
    if recipe.config is not None:
        return UsageError(f"`model.config` does not describe an {auto_class_name}: {_one_line(error)}")
    return not_found("model.name_or_path", str(recipe.name_or_path), error)


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters of modules of the base model; names that it does not have are skipped."""
    base: Any = model.base_model
    for name, module in base.named_children():
        if name in names:
            module.requires_grad_(False)


def save_configuration(model: nn.Module, folder: Path) -> None:
    """Write the files, except the weights, from which transformers rebuilds the model.

    Raises:
        OSError: a file cannot be written.
    """
    described: Any = model
    config = copy.deepcopy(described.config)
    config.architectures = [transformers_class(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    if described.can_generate():
        described.generation_config.save_pretrained(folder)


def save_model(model: nn.Module, folder: Path, weights: Mapping[str, Tensor], adapter: Adapter | None = None) -> None:
    """Write a Hugging Face folder with safetensors and configuration.

    Args:
        model: the trained model, or this rank's part of it.
        folder: the folder to write to; it is created if it does not exist.
        weights: all tensors of the whole model, by name; tied tensors appear once.
        adapter: the recipe's adapter, which is merged into the weights; None without one.

    Raises:
        TrainerError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_configuration(model, folder)
        described = described_model(json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")))
        shapes, read = without_adapters(
            described,
            {name: tuple(tensor.shape) for name, tensor in weights.items()},
            weights.__getitem__,
            adapter.alpha / adapter.rank if adapter else 1.0,
        )
        write_weights(described, shapes, read, folder)
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"the model could not be written to {folder}: {error}") from error
