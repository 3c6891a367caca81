"""Read the configuration of a recipe's model, and refuse one that cannot be trained."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import ADAPTER_CONFIG_NAME

from trainer.base.errors import UsageError
from trainer.base.text import is_shallow
from trainer.models.dropout import set_probabilities
from trainer.models.families.table import FAMILIES
from trainer.models.hub_files import CANNOT_READ, not_found, one_line, require_small_files
from trainer.models.registered_forms import require_readable
from trainer.models.tokenizer import load_tokenizer
from trainer.recipe.schema import Model

_LARGEST_SIZE, _MOST_LAYERS = 2**31 - 1, 10_000
_MOST_LEVELS = 32  # of a configuration; copies of it fail at about 300


def vocabulary_size(config: Any) -> int | None:
    """Return the number of tokens with an embedding, or None if the configuration does not hold it."""
    try:
        described = config.get_text_config()
    except ValueError:  # the configuration describes several text models
        return None
    size = getattr(described, "vocab_size", None)
    return size if isinstance(size, int) else None


def number_of_experts(config: Any) -> int:
    """Return the number of experts of a layer; 0 for a model without experts."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(number) for key in keys if (number := getattr(config, key, None))), 0)


_POSITIONS_AFTER_PADDING = frozenset(
    ("camembert", "data2vec-text", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod")
)  # fmt: skip
"""Model types that number positions from the padding token's id + 1."""


def max_positions(config: Any) -> int | None:
    """Return the most tokens that the model has positions for; None without such a limit, as with rotary positions.

    Raises:
        UsageError: positions are numbered from the padding token, but there is none.
    """
    size = getattr(config, "max_position_embeddings", None)
    is_rotary = getattr(config, "rope_parameters", None) is not None
    is_relative = not getattr(config, "position_biased_input", True)  # of DeBERTa
    if not isinstance(size, int) or size <= 0 or is_rotary or is_relative:
        return None
    if config.model_type not in _POSITIONS_AFTER_PADDING:
        return size
    padding: int | None = config.pad_token_id
    if padding is None:
        raise UsageError(
            f"`model.config.pad_token_id` must be a token for a model of type {config.model_type}, which numbers"
            " positions from it, but is null; set it to the id of the tokenizer's padding token"
        )
    # RoBERTa's embedding has rows for positions up to the padding token's id that no token uses.
    return size - (padding + 1)


def rotary_positions(config: Any) -> int | None:
    """Return the positions of a model with rotary positions, which also computes later ones; None for other models."""
    size = getattr(config, "max_position_embeddings", None)
    return size if isinstance(size, int) and getattr(config, "rope_parameters", None) is not None else None


def require_constant_rotations(config: Any, num_tokens: int, key: str) -> None:
    """Refuse rotary positions that transformers scales by the longest row of a microbatch, if rows can be that long.

    Padding and other rows would decide the logits of a row.

    Args:
        num_tokens: the most tokens of a row.
        key: the key with the number of tokens, as the message shows it.
    """
    given = getattr(config, "rope_parameters", None) or {}
    for rotations in (given, *given.values()):  # one for all layers, or one for each kind of layer
        kind = rotations.get("rope_type") if isinstance(rotations, Mapping) else None
        if kind not in _BY_LENGTH:
            continue
        # longrope changes its factors at this length; dynamic scaling begins at the other.
        original = rotations.get("original_max_position_embeddings") if kind == "longrope" else None
        constant = original or config.max_position_embeddings
        if num_tokens > constant:
            raise UsageError(
                f'the rotary positions of the model are of the type "{kind}", so rows of more than {constant} tokens'
                f" change the logits of all rows beside them, but {key} allows {num_tokens}; lower it to {constant}, or"
                ' set `model.config.rope_parameters` to a scaling that does not depend on the length, such as "yarn"'
            )


def require_no_router_loss(config: Any, auto_class_name: str) -> None:
    """Refuse a mixture of experts for which transformers adds a loss of the routers to that of the task.

    It is a mean over the tokens of the whole batch and not a sum over rows.
    """
    if auto_class_name not in _WITH_ROUTER_LOSS or not getattr(config, "output_router_logits", False):
        return
    for key in ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "moe_loss_weight"):
        for place, of in (("", config), ("ffn_config.", getattr(config, "ffn_config", None))):
            if weight := getattr(of, key, None):
                raise UsageError(
                    f"`{place}{key}` in the model's configuration is {weight} and `output_router_logits` is true, with"
                    " which transformers adds a loss of the routers in each microbatch; set"
                    " `model.config.output_router_logits` to false, and `task.router_loss` for one of the whole batch"
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
    # By id, because a file may list its classes in any order.
    names = tuple(str(labels[index]) for index in sorted(labels))
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def _described_config(described: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
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
    try:
        config = AutoConfig.for_model(model_type, **keys, **options)
        config.architectures = []  # transformers iterates over it for types with several classes, such as deit
        # Transformers stores an unknown key as an attribute. It does not store an older name of a known key.
        _require_known(config, [key for key in keys if key in vars(config)])
    except CANNOT_READ as error:
        raise UsageError(
            f"`model.config` does not describe a model of transformers: {one_line(error)}; correct it"
        ) from error
    return config


def _stored_config(name_or_path: str, revision: str | None, options: Mapping[str, Any]) -> Any:
    if (Path(name_or_path) / ADAPTER_CONFIG_NAME).is_file():
        raise UsageError(
            f"`model.name_or_path` must be a whole model, but {name_or_path} is an adapter of PEFT; merge it into its"
            " base first: `merge_and_unload()` in PEFT, or `trainer export RUN FOLDER` without --adapter"
        )
    require_small_files("model.name_or_path", name_or_path, revision)
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision or "main", trust_remote_code=False, **options)
    except CANNOT_READ as error:
        raise not_found("model.name_or_path", str(name_or_path), error) from error


def _require_known(config: Any, keys: Collection[str]) -> None:
    declared = {*(field.name for field in fields(config)), *config.attribute_map}
    # A key that transformers does not know would be stored, and ignored in silence.
    known = declared | _read_keys(type(config))
    if not known.issuperset(keys):  # else the source of the model need not be read
        known |= _undeclared(config)
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "remove it"
            raise UsageError(f"`model.config.{key}` is not a key of a {config.model_type} configuration; {meant}")


def _undeclared(config: Any) -> set[str]:
    """Return the keys that a model reads and its configuration does not declare, such as `head_dim` of Qwen3 MoE."""
    family = FAMILIES.get(config.model_type)
    module = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    source = Path(module.origin).read_text() if module is not None and module.origin else ""
    # Model files read some keys by `getattr` with a default, because their configurations do not declare them.
    read = re.findall(r'getattr\((?:self\.)?config, "([a-z]\w*)"', source)
    return {*read, *(family.undeclared_keys if family else ())}


_OWNED = frozenset(
    ("architectures", "attn_implementation", "auto_map", "dtype", "id2label", "label2id", "num_labels", "problem_type",
     "quantization_config", "return_dict", "torch_dtype", "transformers_version", "use_cache")
)  # fmt: skip
"""Keys of a loaded configuration that the task, the recipe or the checkpoint decides."""
_SAME_SHAPES = frozenset(("num_attention_heads", "num_key_value_heads"))
"""Keys that cut the same weights into other parts, so that a loaded model computes something else."""


def _changed_config(config: Any, recipe: Model, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a pretrained model with the keys of the recipe's `model.config` in place."""
    keys = recipe.config or {}
    for key in keys:
        if key in options or key in _OWNED or key.startswith("_"):
            raise UsageError(f"`model.config.{key}` is set by the trainer or the task; remove it")
    _require_known(config, keys)
    for key in keys.keys() - _undeclared(config):
        if not hasattr(config, key):  # transformers reads it only where it builds a configuration
            raise UsageError(f"`model.config.{key}` is not kept in a {config.model_type} configuration; remove it")
    try:
        # Loaded again and not set by attribute: a configuration class checks and derives values when it is made.
        changed = AutoConfig.from_pretrained(
            recipe.name_or_path, revision=recipe.revision or "main", trust_remote_code=False, **{**keys, **options}
        )
        for key in keys.keys() & _undeclared(config):
            setattr(changed, key, keys[key])  # transformers drops a key that it does not declare
        _require_plain(recipe, changed)
        # The weights exist already, so a changed shape cannot be loaded.
        before, after = _shapes(config), _shapes(changed)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise UsageError(
            f"`model.config` does not fit the model {str(recipe.name_or_path)!r}: {one_line(error)}; correct it"
        ) from error
    # The number of heads leaves all shapes equal, but cuts the same matrices into other heads.
    if before != after or any(config.attribute_map.get(key, key) in _SAME_SHAPES for key in keys):
        raise UsageError(
            f"`model.config` ({', '.join(keys)}) would change the shapes of the weights of"
            f" {str(recipe.name_or_path)!r} or how heads share them; leave out keys of the architecture, or set"
            " `model.name_or_path` to null for random weights"
        )
    return changed


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        # A copy, because a model keeps its configuration, and may change it.
        model = transformers.AutoModel.from_config(copy.deepcopy(config))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _read_keys(config_class: type) -> set[str]:
    """Return the keys that a configuration class reads without declaring them, such as older names and switches.

    Examples are `tie_word_embeddings` of T5 and `global_attn_every_n_layers` of ModernBERT.
    """
    # From the source: classes read such keys from `kwargs` and declare them nowhere.
    bases = [cls for cls in config_class.__mro__ if issubclass(cls, PreTrainedConfig) and cls is not PreTrainedConfig]
    return {key for cls in bases for key in re.findall(r'kwargs(?:\.get\(|\.pop\(|\[)"(\w+)"', inspect.getsource(cls))}


def load_config(recipe: Model, options: Mapping[str, Any]) -> Any:
    """Load the transformers configuration of the recipe's model, with the task's `options` and the recipe's dropout.

    Its vocabulary has the new tokens of the recipe.

    Raises:
        UsageError: the configuration cannot be loaded, or does not describe a model.
    """
    given = recipe.config or {}
    _require_sizes(given, "`model.config`", "leave it out for the default of its model type")
    if recipe.name_or_path is None:
        config = _described_config(given, options)
    else:
        config = _stored_config(recipe.name_or_path, recipe.revision, options)
    _require_plain(recipe, config)
    # After the check of the plain file, so that an error of the file is not blamed on `model.config`.
    if given and not recipe.is_random:
        config = _changed_config(config, recipe, options)
    if getattr(config, "quantization_config", None):
        del config.quantization_config  # the files tell which weights are quantised; the model's class shall not see it
    if recipe.new_tokens is not None:
        _add_tokens(config, recipe, recipe.new_tokens)
    config.gradient_checkpointing = False  # transformers' own; `activation_checkpointing` decides
    if recipe.dropout is not None:
        set_probabilities(config, recipe.dropout, recipe.config)
    family = FAMILIES.get(config.model_type)
    if family and family.starts_with_padding and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # the model reads the key, but has no default
    return config


def _add_tokens(config: Any, recipe: Model, tokens: Sequence[str]) -> None:
    size = vocabulary_size(config)
    if size is None:
        raise UsageError(
            "`model.new_tokens` needs a model with an embedding of tokens, but a configuration of type"
            f" {config.model_type} has no `vocab_size`; remove it"
        )
    ids = load_tokenizer(recipe).convert_tokens_to_ids(list(tokens))
    # A checkpoint may have more rows than its tokenizer has tokens; those are used first.
    needed = max(ids) + 1
    # A further row needs a token that the user named, or it would be an untrained row in silence.
    if others := sorted(set(range(size, needed)) - set(ids)):
        raise UsageError(
            f"`model.new_tokens` must name all tokens without an embedding, but the model has {size:,} and the"
            f" tokenizer has {len(others):,} more, such as that of id {others[0]}; name them too, or the model's own"
            " tokenizer in `model.tokenizer`"
        )
    config.get_text_config().vocab_size = max(size, needed)


_NOT_COMPUTED = {
    "architectures", "attn_implementation", "dtype", "experts_implementation", "id2label", "label2id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def computed_facts(config: Any) -> dict[str, Any]:
    """Return the values of a configuration that decide what its model computes, without defaults of its class.

    Places, versions and types of weights are left out, and so are classes, which the rows and the weights hold.
    """
    try:
        defaults = _plain_values(type(config)())
    except Exception:  # some classes have no defaults
        defaults = {}
    # A key that a later transformers adds with a default then changes nothing.
    of_config = _plain_values(config).items()
    return {key: value for key, value in of_config if key == "model_type" or value != defaults.get(key)}


def _plain_values(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _NOT_COMPUTED and not key.startswith("_")}


_SIZES = (
    "d_ff", "d_kv", "d_model", "decoder_attention_heads", "decoder_ffn_dim", "decoder_layers", "depths", "dim",
    "embedding_size", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layers", "hidden_dim", "hidden_size",
    "hidden_sizes", "image_size", "inner_group_num", "intermediate_size", "max_position_embeddings", "n_embd", "n_head",
    "n_heads", "n_inner", "n_layer", "n_layers", "n_positions", "num_attention_heads", "num_channels",
    "num_decoder_layers", "num_heads", "num_hidden_groups", "num_hidden_layers", "num_key_value_heads", "num_layers",
    "patch_size", "vocab_size",
)  # fmt: skip
"""Keys of sizes and counts. transformers builds a model without layers from a count below 1, without an error."""


def _require_sizes(values: Mapping[str, Any], place: str, otherwise: str) -> None:
    """Refuse sizes and counts below 1, and those that no model has."""
    for key in _SIZES:
        value = values.get(key)
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int) and number < 1 for number in numbers):
            raise UsageError(f"`{key}` in {place} must be at least 1, but is {value!r}; raise it, or {otherwise}")
        most = _MOST_LAYERS if "layer" in key or key in ("depths", "num_hidden_groups") else _LARGEST_SIZE
        if any(isinstance(number, int) and number > most for number in numbers):
            raise UsageError(
                f"`{key}` in {place} must be at most {most:,}, but is {value!r:.40}; lower it, or {otherwise}"
            )


def _require_plain(recipe: Model, config: Any) -> None:
    """Refuse a configuration with a size below 1, an unknown activation, or too many levels to be copied."""
    place = "`model.config`" if recipe.name_or_path is None else f"the configuration of {str(recipe.name_or_path)!r}"
    _require_sizes(vars(config), place, "correct its config.json")
    if quantised := getattr(config, "quantization_config", None):
        require_readable(recipe, place, quantised)
    for key in ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn"):
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            near = get_close_matches(name, ACT2FN, n=1) or ["gelu"]
            raise UsageError(
                f"`{key}` in {place} must be an activation of transformers, but is {name!r}; write one such as"
                f" {near[0]}"
            )
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise UsageError(f"{place} has a text model, which a {config.model_type} cannot have; correct its config.json")
    if not is_shallow(vars(config), _MOST_LEVELS + 1):
        raise UsageError(f"{place} is nested deeper than {_MOST_LEVELS} levels; flatten it")


def require_head(recipe: Model, config: Any, auto_class: Any) -> None:
    """Refuse a model type for which transformers does not have the task's head."""
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
