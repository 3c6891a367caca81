"""Build the model of a recipe: pretrained, from a folder or the hub, or with random weights."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.auto_factory import _get_model_class

from trainer.base.errors import TrainerError, UsageError, causes, storage_error
from trainer.base.text import is_shallow
from trainer.models.adapters import adapt
from trainer.models.attention import KEYED_ATTENTION, OWN_ATTENTION
from trainer.models.compiled import CompiledLayers
from trainer.models.cutting import ModelCut
from trainer.models.dropout import key_dropout, set_probabilities
from trainer.models.families.table import FAMILIES
from trainer.models.heads import ChunkedHead
from trainer.models.initialising import Gather, draw_weights, whole_already
from trainer.models.invariance import check_invariance, sample_of
from trainer.models.loading import (
    CannotLoadPartsError,
    compare_shapes,
    count_reads,
    load_parts,
    require_safe_shards,
    sizes_differ,
    without_report,
)
from trainer.models.peft_folder import ADAPTER_CONFIG_NAME
from trainer.models.stage_split import StagePart
from trainer.models.statistics import fix_statistics
from trainer.models.teacher import Teacher
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.node import NodeRanks
from trainer.parallel.placement import Placements
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.parallel.tensor.linear import ColumnParallelLinear
from trainer.recipe.schema import Model, Training


@dataclass(frozen=True)
class BuiltModel:
    """A Hugging Face model in fp32 on the CPU, before it is placed.

    `dropout_keys` is None if the recipe chose torch's dropout. `notes` are messages for the user about the build, such
    as weights that the checkpoint does not hold.

    `placements` are the placements of its parameters if the model was cut over tensor ranks or into stages; None means
    that the model is whole. `part` describes its pipeline stage; None means that there is no pipeline.
    `head` is its output head if that works in chunks of tokens. `lacking` are the parameters that the pretrained model
    does not have. `teacher` is the model that it learns from, if there is one.
    `shards` are this rank's rows of each parameter if data ranks shard them; the parameters of `model` are then on
    `meta`. `compiled` are its compiled layers.
    """

    model: nn.Module
    dropout_keys: DropoutKeys | None
    notes: list[str] = field(default_factory=list)
    placements: Placements | None = None
    part: StagePart | None = None
    head: ChunkedHead | None = None
    lacking: Sequence[str] = ()
    teacher: Teacher | None = None
    shards: dict[str, Tensor] | None = None
    compiled: list[CompiledLayers] = field(default_factory=list)

    @property
    def vocabulary(self) -> VocabularyCut | None:
        """The cut of the logits over the vocabulary; None if they are whole, or not over a vocabulary."""
        heads = [m for m in self.model.modules() if isinstance(m, ColumnParallelLinear) and m.pads]
        assert len(heads) <= 1, f"a model has one head over its vocabulary, not {len(heads)}"
        return VocabularyCut(heads[0].group, heads[0].whole_out_features) if heads else None


Loading = Callable[[], AbstractContextManager[Gather]]


@contextmanager
def loading_whole() -> Iterator[Gather]:
    """Let a model be built as it is: the `Loading` of a model that is not partitioned."""
    yield whole_already


_MOST_LEVELS = 32  # of a configuration; copies of it fail at about 300

_CANNOT_BUILD = (OSError, ValueError, RuntimeError, KeyError, ZeroDivisionError, SafetensorError)
"""Errors of transformers for models that it cannot build; `RecursionError` is a `RuntimeError`."""


CANNOT_READ = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip
"""Errors of transformers for configurations and tokenizers that it cannot read; values have any type."""


def _one_line(error: Exception) -> str:
    """Return the message of an error of transformers on one line of at most 300 characters."""
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return shorten(text, 300, placeholder=" ...") or type(error).__name__


def not_found(key: str, name: str, error: Exception) -> TrainerError:
    """Return the error for a folder or repository, named by the recipe's `key`, that could not be opened."""
    for cause in (error, *causes(error)):
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            continue
        if str(cause.filename or "").startswith(HF_HUB_CACHE):
            return storage_error(
                f"the hub's cache must be a folder that can be used, but {cause.filename} cannot ({cause.strerror});"
                " make room, restore its permissions, or set HF_HOME to another folder",
                cause,
            )
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


def rotary_positions(config: Any) -> int | None:
    """Return the positions of a model with rotary positions, which also computes later ones; None for other models."""
    size = getattr(config, "max_position_embeddings", None)
    return size if isinstance(size, int) and getattr(config, "rope_parameters", None) is not None else None


def require_constant_rotations(config: Any, num_tokens: int, key: str) -> None:
    """Refuse rotary positions that transformers scales by the longest row of a microbatch, if rows can be that long.

    Padding and other rows would decide the logits of a row.

    Args:
        config: the configuration of transformers.
        num_tokens: the most tokens of a row.
        key: the key with the number of tokens, as the message shows it.

    Raises:
        UsageError: the scaling depends on the length of rows with so many tokens.
    """
    given = getattr(config, "rope_parameters", None) or {}
    for rotations in (given, *given.values()):  # one for all layers, or one for each kind of layer
        kind = rotations.get("rope_type") if isinstance(rotations, Mapping) else None
        if kind not in _BY_LENGTH:
            continue
        own = rotations.get("original_max_position_embeddings") if kind == "longrope" else None
        constant = own or config.max_position_embeddings
        if num_tokens > constant:
            raise UsageError(
                f'the rotary positions of the model are of the type "{kind}", so rows of more than {constant} tokens'
                f" change the logits of all rows beside them, but {key} allows {num_tokens}; lower it to {constant}, or"
                ' set `model.config.rope_parameters` to a scaling that does not depend on the length, such as "yarn"'
            )


def require_no_router_loss(config: Any, auto_class_name: str) -> None:
    """Refuse a mixture of experts for which transformers adds a loss of the routers to that of the task.

    It is a mean over the tokens of the whole batch and not a sum over rows.

    Raises:
        UsageError: the head adds such a loss.
    """
    if auto_class_name not in _WITH_ROUTER_LOSS or not getattr(config, "output_router_logits", False):
        return
    for key in ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "moe_loss_weight"):
        for place, of in (("", config), ("ffn_config.", getattr(config, "ffn_config", None))):
            if weight := getattr(of, key, None):
                raise UsageError(
                    f"`{place}{key}` in the model's configuration is {weight} and `output_router_logits` is true, with"
                    " which transformers adds a loss of the routers; it cannot be trained here: set"
                    " `model.config.output_router_logits` to false"
                )


_WITH_ROUTER_LOSS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
_BY_LENGTH = ("dynamic", "longrope")
"""Scalings of rotary positions that depend on the longest row of a microbatch."""


def reads_end_tokens(config: Any, auto_class_name: str) -> bool:
    """Return whether the head reads the states at end tokens, as encoder-decoders that classify texts do."""
    is_classifier = auto_class_name == "AutoModelForSequenceClassification"
    return is_classifier and bool(getattr(config, "is_encoder_decoder", False))


def checkpoint_labels(recipe: Model, config: Any) -> tuple[str, ...] | None:
    """Return the class names of a fine-tuned checkpoint in order; None if it has none, or only default names."""
    labels = getattr(config, "id2label", None)
    if recipe.is_random or not labels:
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
    # Transformers stores an unknown key as an attribute. It does not store an older name of a known key.
    _require_known(config, [key for key in keys if key in vars(config)])
    return config


def _require_known(config: Any, keys: Iterable[str]) -> None:
    """Refuse keys that the configuration's model type does not read.

    Raises:
        UsageError: there is such a key.
    """
    declared = {*(field.name for field in fields(config)), *config.attribute_map}
    known = declared | _read_keys(type(config)) | _undeclared(config)
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "remove it"
            raise UsageError(f"`model.config.{key}` is not a key of a {config.model_type} configuration; {meant}")


def _undeclared(config: Any) -> set[str]:
    family = FAMILIES.get(config.model_type)
    return set(family.undeclared_keys) if family else set()


_OWNED = frozenset(
    ("architectures", "attn_implementation", "auto_map", "dtype", "id2label", "label2id", "num_labels", "problem_type",
     "quantization_config", "return_dict", "torch_dtype", "transformers_version", "use_cache")
)  # fmt: skip
"""Keys of a loaded configuration that the task, the recipe or the checkpoint decides."""
_SAME_SHAPES = frozenset(("num_attention_heads", "num_key_value_heads"))
"""Keys that cut the same weights into other parts, so that a loaded model computes something else."""


def _changed_config(config: Any, recipe: Model, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a pretrained model with the keys of the recipe's `model.config` in place.

    Raises:
        UsageError: a key is unknown or not the recipe's to set, a value has the wrong type, or the weights would have
            other names or shapes.
    """
    keys = recipe.config or {}
    for key in keys:
        if key in options or key in _OWNED or key.startswith("_"):
            raise UsageError(f"`model.config.{key}` is set by the trainer or the task; remove it")
    _require_known(config, keys)
    for key in keys.keys() - _undeclared(config):
        if not hasattr(config, key):  # transformers reads it only where it builds a configuration
            raise UsageError(f"`model.config.{key}` is not kept in a {config.model_type} configuration; remove it")
    try:
        changed = AutoConfig.from_pretrained(
            recipe.name_or_path, revision=recipe.revision or "main", trust_remote_code=False, **{**keys, **options}
        )
        for key in keys.keys() & _undeclared(config):
            setattr(changed, key, keys[key])  # transformers drops a key that it does not declare
        _require_plain(recipe, changed)
        before, after = _shapes(config), _shapes(changed)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise UsageError(
            f"`model.config` does not fit the model {str(recipe.name_or_path)!r}: {_one_line(error)}; mend it"
        ) from error
    if before != after or any(config.attribute_map.get(key, key) in _SAME_SHAPES for key in keys):
        raise UsageError(
            f"`model.config` ({', '.join(keys)}) would change the shapes of the weights of"
            f" {str(recipe.name_or_path)!r} or how heads share them; leave out keys of the architecture, or set"
            " `model.name_or_path` to null for random weights"
        )
    return changed


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a configuration's base model."""
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(copy.deepcopy(config))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


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
    if recipe.name_or_path is not None and (Path(recipe.name_or_path) / ADAPTER_CONFIG_NAME).is_file():
        raise UsageError(
            f"`model.name_or_path` must be a whole model, but {recipe.name_or_path} is an adapter of PEFT; merge it"
            " into its base first: `merge_and_unload()` in PEFT, or `trainer export RUN FOLDER` without --adapter"
        )
    _require_sizes(recipe.config or {}, "`model.config`", "leave it out for the default of its model type")
    try:
        if recipe.is_random:
            config = _described_config(recipe.config or {}, options)
        else:
            config = AutoConfig.from_pretrained(
                recipe.name_or_path, revision=recipe.revision or "main", trust_remote_code=False, **options
            )
    except CANNOT_READ as error:
        if recipe.is_random:
            raise UsageError(
                f"`model.config` does not describe a model of transformers: {_one_line(error)}; mend it"
            ) from error
        raise not_found("model.name_or_path", str(recipe.name_or_path), error) from error
    _require_plain(recipe, config)
    if recipe.config and not recipe.is_random:
        config = _changed_config(config, recipe, options)
    if recipe.dropout is not None:
        set_probabilities(config, recipe.dropout, recipe.config)
    family = FAMILIES.get(config.model_type)
    if family and family.starts_with_padding and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # the model reads the key, but has no default
    return config


_SIZES = (
    "d_ff", "d_kv", "d_model", "decoder_attention_heads", "decoder_ffn_dim", "decoder_layers", "depths", "dim",
    "embedding_size", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layers", "hidden_dim", "hidden_size",
    "hidden_sizes", "image_size", "inner_group_num", "intermediate_size", "max_position_embeddings", "n_embd", "n_head",
    "n_heads", "n_inner", "n_layer", "n_layers", "n_positions", "num_attention_heads", "num_channels",
    "num_decoder_layers", "num_heads", "num_hidden_groups", "num_hidden_layers", "num_key_value_heads", "num_layers",
    "patch_size", "vocab_size",
)  # fmt: skip
"""Keys of sizes and counts. transformers builds a model without layers from a count below 1, and does not say so."""


def _require_sizes(values: Mapping[str, Any], place: str, otherwise: str) -> None:
    """Refuse sizes and counts below 1.

    Raises:
        UsageError: there is one.
    """
    for key in _SIZES:
        value = values.get(key)
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int) and number < 1 for number in numbers):
            raise UsageError(f"`{key}` in {place} must be at least 1, but is {value!r}; raise it, or {otherwise}")


def _require_plain(recipe: Model, config: Any) -> None:
    """Refuse a configuration with a size below 1, an unknown activation, or too many levels to be copied.

    Raises:
        UsageError: it has one of these.
    """
    place = "`model.config`" if recipe.name_or_path is None else f"the configuration of {str(recipe.name_or_path)!r}"
    _require_sizes(vars(config), place, "mend its config.json")
    if getattr(config, "quantization_config", None):
        raise UsageError(f"{place} is that of quantised weights, which cannot be trained; name the model without them")
    for key in ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn"):
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            near = get_close_matches(name, ACT2FN, n=1) or ["gelu"]
            raise UsageError(
                f"`{key}` in {place} must be an activation of transformers, but is {name!r}; write one such as"
                f" {near[0]}"
            )
    if not is_shallow(vars(config), _MOST_LEVELS + 1):
        raise UsageError(f"{place} is nested deeper than {_MOST_LEVELS} levels; mend it")


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
    if not recipe.is_random:
        key, what = "model.name_or_path", f'is "{recipe.name_or_path}", of type {config.model_type}'
    raise UsageError(
        f"`{key}` must be of a type that has the head of `task.type` ({auto_class.__name__}), but {what}, which has"
        f" none; use one that has, such as {families}, or another task"
    )


def _initialise(
    auto_class: Any, recipe: Model, config: Any, attention: str, seed: int, gather: Gather
) -> tuple[nn.Module, list[str], list[str]]:
    """Return the model in fp32 on the CPU, the names of weights drawn from `seed` instead of loaded, and notes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if recipe.is_random:
            from_config = getattr(auto_class, "from_config", None) or auto_class._from_config  # a class has the second
            model = from_config(config, attn_implementation=attention, dtype=torch.float32)
            drawn = dict(model.named_parameters())
            draw_weights(model, drawn, seed, gather)
            return model, list(drawn), []
        require_safe_shards(recipe, config)
        with without_report():
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
    return model, missing, notes


def build_base(described: Any, recipe: Model, seed: int) -> tuple[nn.Module, list[str]]:
    """Build the model of a recipe as it was before the training, without adapter, whole and in fp32 on the CPU.

    The second result names the weights that are not loaded, but drawn from the seed.

    Args:
        described: the model on `meta`, from `described_model`.
        recipe: the recipe's `model`.
        seed: the recipe's seed.

    Raises:
        UsageError: the weights cannot be loaded.
    """
    config = copy.deepcopy(described.config)
    if recipe.is_random and "pad_token_id" not in (recipe.config or {}):
        config.pad_token_id = type(config)().pad_token_id  # see `_name_padding`
    try:
        return _initialise(type(described), recipe, config, "eager", seed, whole_already)[:2]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise not_found("model.name_or_path", str(recipe.name_or_path), error) from error


def build_model(
    recipe: Model,
    training: Training,
    auto_class_name: str,
    options: Mapping[str, Any],
    loading: Loading = loading_whole,
    cut: ModelCut | None = None,
    pad_token_id: int | None = None,
    unused: Sequence[str] = (),
    packed: bool = False,
    node: NodeRanks | None = None,
    is_trained: bool = True,
) -> BuiltModel:
    """Build the model, with the same weights on every rank and under every layout.

    Args:
        recipe: the recipe's `model`.
        training: the recipe's `training`, for the seed and the kind of dropout.
        auto_class_name: the head, as the name of an auto class of transformers.
        options: the configuration keys that the task sets, such as `num_labels`.
        loading: the context in which a model is built that cannot be loaded in parts. It may partition the parameters
            as they are made, and yields the context that makes them whole.
        cut: the cut of the model, or None. With a cut, the result holds this rank's parts only. If the model cannot be
            loaded in parts, the rank holds the whole model during the build.
        pad_token_id: the tokenizer's padding token, for a model without one; None if there is no tokenizer.
        unused: modules of the base model to freeze, because the task does not use them.
        packed: whether rows hold several documents, which the model must keep apart.
        node: the ranks of this node, if one of them reads the weights for all; this needs a cut, perhaps of nothing,
            and the calls of all ranks of the node.
        is_trained: whether the model learns, and does not only teach.

    Raises:
        UsageError: the model cannot be loaded, has no safetensors, has a dropout that cannot be keyed, cannot be cut,
            does not keep documents apart, or adds terms to the loss.
    """
    assert cut is not None or node is None, "a model that is built whole is read by each rank"
    config = load_config(recipe, options)
    keys = DropoutKeys(training.seed) if training.layout_invariant_dropout else None
    auto_class = getattr(transformers, auto_class_name)
    _require_head(recipe, config, auto_class)
    model_class = _get_model_class(config, auto_class._model_mapping)
    attention = _attention(model_class, training)
    in_table = config.model_type in FAMILIES
    how = packed, auto_class_name, is_trained

    fixed: list[str] = []
    trained: list[str] = []
    lacking: list[str] = []

    def prepare(model: nn.Module, drawn: Sequence[str]) -> None:
        lacking[:] = drawn
        adapt(model, recipe, training.seed, drawn)
        freeze(model, unused)
        trained[:] = _drawn_notes(model, recipe, drawn)
        prepare_sample(model)

    def prepare_sample(model: nn.Module) -> None:
        if keys is not None:
            key_dropout(model, keys)
        fixed[:] = [*fix_statistics(model), *_name_padding(model, pad_token_id)]
        _expect_padding(model)

    def build_whole() -> tuple[nn.Module, list[str]]:
        with loading() as gather:
            checked = [] if in_table or gather is whole_already else check_sample()
            model, drawn, notes = _initialise(auto_class, recipe, config, attention, training.seed, gather)
            prepare(model, () if recipe.is_random else drawn)  # before the cut, which changes the dropout sites
            if not in_table and gather is whole_already:
                checked = check_invariance(model, keys, *how)
        return model, [*notes, *checked]

    def check_sample() -> list[str]:
        sample = sample_of(model_class, config, attention)
        if recipe.adapter is not None and recipe.adapter.dropout:
            adapted = recipe.model_copy(update={"freeze": None})
            try:
                adapt(sample, adapted, training.seed)
            except UsageError:  # a target is in a layer that the sample lacks
                sample = sample_of(model_class, config, attention, is_whole=True)
                adapt(sample, adapted, training.seed)
        prepare_sample(sample)
        return check_invariance(sample, keys, *how)

    try:
        if cut is None:
            model, notes = build_whole()
            return BuiltModel(model, keys, [*notes, *trained, *fixed], lacking=lacking)
        try:
            parts = load_parts(auto_class, recipe, config, attention, training.seed, prepare, cut, node)
            notes = parts.notes if in_table else [*parts.notes, *check_sample()]
            cuts = parts.cut.placements, parts.cut.part
            return BuiltModel(
                parts.model, keys, [*notes, *trained, *fixed], *cuts, lacking=lacking, shards=parts.shards
            )
        except CannotLoadPartsError as reason:
            if node is not None:
                raise UsageError(
                    f"`parallel.load` is broadcast, but each rank must read this model whole, because {reason}; use"
                    " read"
                ) from reason
            model, notes = build_whole()
            if cut.shard is not None and cut.shard.flat:  # it is partitioned
                return BuiltModel(model, keys, [*notes, *trained, *fixed], lacking=lacking)
            if cut != ModelCut(None):
                notes.append(f"every rank held the whole model for a moment while it was built, because {reason}")
            made = cut(model)
            return BuiltModel(model, keys, [*notes, *trained, *fixed], made.placements, made.part, lacking=lacking)
    except _CANNOT_BUILD as error:
        if not recipe.is_random and "ignore_mismatched_sizes" in str(error):
            raise sizes_differ("some weights") from error
        raise _undescribed(recipe, auto_class_name, error) from error


def _drawn_notes(model: nn.Module, recipe: Model, drawn: Sequence[str]) -> list[str]:
    """Return notes on the modules with random weights in a pretrained model that is partly frozen."""
    if not recipe.is_partly_frozen:
        return []
    owners: dict[bool, list[str]] = {True: [], False: []}
    for name in drawn:
        owners[model.get_parameter(name).requires_grad].append(name.rpartition(".")[0])
    trained, frozen = (", ".join(dict.fromkeys(owners[key])) for key in (True, False))
    notes = [f"drawn and trained whole, beside frozen weights: {trained}"] if trained else []
    if frozen:
        key = "`model.freeze` leaves out" if recipe.adapter is None else "`model.adapter.modules_to_save` names"
        notes.append(f"drawn and never trained, because they are frozen: {frozen}; {key} modules to train")
    return notes


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


def _expect_padding(model: nn.Module) -> None:
    """Turn off transformers' warning of padding without a mask: only packed rows have none, and padding ends them."""
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing


def _warn_of_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    pass


def build_on_meta(recipe: Model, training: Training, auto_class_name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build the recipe's model on the meta device, without adapters; see `build_model`."""
    config = load_config(recipe, options)
    auto_class = getattr(transformers, auto_class_name)
    _require_head(recipe, config, auto_class)
    attention = _attention(_get_model_class(config, auto_class._model_mapping), training)
    try:
        with torch.device("meta"):
            model: nn.Module = auto_class.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except _CANNOT_BUILD as error:
        raise _undescribed(recipe, auto_class_name, error) from error
    return model


def build_shapes(
    recipe: Model,
    training: Training,
    auto_class_name: str,
    options: Mapping[str, Any],
    cut: ModelCut | None = None,
) -> BuiltModel:
    """Build the model of `build_model` on the meta device; this needs its configuration, and no weights."""
    model = build_on_meta(recipe, training, auto_class_name, options)
    adapt(model, recipe, training.seed)
    keys = DropoutKeys(training.seed) if training.layout_invariant_dropout else None
    if keys is not None:
        key_dropout(model, keys)
    if cut is None:
        return BuiltModel(model, keys, [])
    made = cut(model)
    return BuiltModel(model, keys, [], made.placements, made.part)


def count_weight_reads(
    recipe: Model, training: Training, auto_class_name: str, options: Mapping[str, Any], cut: ModelCut | None
) -> Mapping[str, int]:
    """Return the bytes that a rank reads of each file of pretrained weights; only their headers are read for it.

    Raises:
        UsageError: the files are missing, do not fit the model, or it cannot be cut.
    """
    config = load_config(recipe, options)
    require_safe_shards(recipe, config)
    auto_class = getattr(transformers, auto_class_name)
    _require_head(recipe, config, auto_class)
    attention = _attention(_get_model_class(config, auto_class._model_mapping), training)

    def prepare(model: nn.Module, drawn: Sequence[str]) -> None:
        adapt(model, recipe, training.seed, drawn)

    try:
        return count_reads(auto_class, recipe, config, attention, prepare, cut)
    except (*_CANNOT_BUILD, CannotLoadPartsError) as error:
        raise _undescribed(recipe, auto_class_name, error) from error


def check_weights(recipe: Model, auto_class_name: str, options: Mapping[str, Any] | None) -> list[str]:
    """Check that the files of pretrained weights exist and fit the model; their values are not read.

    Returns the parameters that the files lack, as far as these can be compared.

    Args:
        recipe: the recipe's `model`.
        auto_class_name: the head, as the name of an auto class of transformers.
        options: the configuration keys that the task sets; None: they are not known, and sizes are not compared.

    Raises:
        UsageError: the files are missing, or of other sizes.
    """
    if recipe.name_or_path is None:
        return []
    config = load_config(recipe, options or {})
    require_safe_shards(recipe, config)
    if options is None:
        return []
    auto_class = getattr(transformers, auto_class_name)
    if type(config) not in auto_class._model_mapping:
        return []  # `build_on_meta` refuses it
    try:
        return compare_shapes(_get_model_class(config, auto_class._model_mapping), recipe, config)
    except CannotLoadPartsError:
        return []  # such a model is compared when it is loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _undescribed(recipe, auto_class_name, error) from error


def _attention(model_class: Any, training: Training) -> str:
    """Return the name of the attention function for a model class of transformers.

    A class that does not support SDPA computes another formula, such as capped scores or attention sinks.

    A class without transformers' attention interface has its own attention and adds a mask to its scores. It needs the
    additive mask that transformers makes under "eager". Its dropout modules are keyed like all others.
    """
    if not training.layout_invariant_dropout:
        return "sdpa" if model_class._supports_sdpa else "eager"
    if not model_class._can_set_attn_implementation():
        return "eager"
    is_own = not model_class._supports_sdpa and hasattr(sys.modules[model_class.__module__], "eager_attention_forward")
    return OWN_ATTENTION if is_own else KEYED_ATTENTION


def _undescribed(recipe: Model, auto_class_name: str, error: Exception) -> TrainerError:
    if recipe.is_random:
        return UsageError(f"`model.config` does not describe an {auto_class_name}: {_one_line(error)}")
    return not_found("model.name_or_path", str(recipe.name_or_path), error)


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters of modules of the base model; names that it does not have are skipped."""
    base: Any = model.base_model
    for name, module in base.named_children():
        if name in names:
            module.requires_grad_(False)
