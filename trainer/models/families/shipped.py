"""Families from transformers' own plans: the `base_model_tp_plan` of a configuration, converted to a `ModelFamily`.

They are used for architectures outside the table. Such a plan lists the sharded modules, but not the modules beside
them. A model is refused if these could make a rank's result wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from trainer.base.errors import UsageError
from trainer.models.families.family import ModelFamily, TensorPlan, matches, relative_name
from trainer.parallel.dropout import KeyedDropout

_COLUMN, _ROW, _PARTIAL, _VOCABULARY = "colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"
_STYLES = (_COLUMN, _ROW, _PARTIAL, _VOCABULARY)
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
_REMEDY = "use `parallel.tensor` 1, or add a file to `trainer/models/families/` and its row to `table.py`"


def shipped_layers(config: Any) -> str | None:
    """Return the pattern of the repeated layers in transformers' plan, or None if there is no plan."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    # A star stands for the number of a repeated layer.
    prefixes = list(dict.fromkeys(_layer(name) for name in plan if "*" in name))
    if not prefixes:
        return None
    return prefixes[0] if len(prefixes) == 1 else f"({'|'.join(prefixes)})"


def shipped_family(model: Any) -> ModelFamily | None:
    """Return the family from transformers' own plan, or None if there is no plan.

    Raises:
        UsageError: the plan has an unknown style, or does not define how its parts fit together.
    """
    layers = shipped_layers(model.config)
    if layers is None:
        return None
    plan: Mapping[str, str] = model.config.base_model_tp_plan
    for pattern, style in plan.items():
        if style not in _STYLES:
            raise UsageError(
                f"transformers' plan for {model.config.model_type} cuts `{pattern}` by {style!r}, but known are"
                f" {', '.join(_STYLES)}; {_REMEDY}"
            )
    columns = _of_style(plan, _COLUMN)
    _require_blocks(model, plan)
    embedding = _name_of(model, _input_embedding(model))
    head = _name_of(model, model.get_output_embeddings())
    return ModelFamily(
        model.config.model_type,
        layers=layers,
        tensor=TensorPlan(
            columns=dict.fromkeys(columns, 1),
            rows=_of_style(plan, _ROW),
            # A module between the block and the column calls the attention function. The others do not use dropout.
            attention=tuple(dict.fromkeys(name for column in columns for name in _owners(column))),
            embeddings=(*_of_style(plan, _VOCABULARY), *embedding),
            vocabulary_heads=head,
            whole=tuple(name for name in _matrices_around(model) if name not in head),
            partial=_of_style(plan, _PARTIAL),
            heads=tuple(key for key in _HEAD_COUNTS if getattr(model.config, key, None) is not None),
        ),
    )


def _layer(name: str) -> str:
    """Return the layer of a pattern, up to its first star; a second star counts experts."""
    return name[: name.index("*") + 1]


def _block(name: str) -> str:
    """Return the part of a layer that holds a column and its row, such as its attention."""
    layer = _layer(name)
    inside = name[len(layer) + 1 :].split(".")
    return f"{layer}.{inside[0]}" if len(inside) > 1 else layer


def _owners(name: str) -> Iterator[str]:
    """Yield the modules that contain a column, from its parent up to its block."""
    block = _block(name)
    while name != block:
        name = name.rpartition(".")[0]
        yield name


def _of_style(plan: Mapping[str, str], style: str) -> tuple[str, ...]:
    return tuple(pattern for pattern, of in plan.items() if of == style)


def _require_blocks(model: Any, plan: Mapping[str, str]) -> None:
    """Refuse modules in the plan's blocks that the plan does not define, or that cannot be cut."""
    model_type = model.config.model_type
    cut = set(map(_block, (*_of_style(plan, _COLUMN), *_of_style(plan, _ROW))))
    columns: list[tuple[str, str, int]] = []  # blocks, names and output features
    inputs: dict[str, int] = {}  # by block: input features of the row
    for name, module in model.named_modules():
        relative = relative_name(model, name)
        block = _inside(cut, relative)
        if block is None:
            continue
        style = next((style for pattern, style in plan.items() if matches(pattern, relative)), None)
        # On cut features, a rank must draw its part of the mask, but the plan does not say which features are cut.
        if isinstance(module, nn.Dropout | KeyedDropout) and module.p > 0:
            raise UsageError(
                f"transformers' plan for {model_type} must name the features of the dropout `{name}`, all or those of a"
                f" rank, but does not; set `model.dropout` to 0, or {_REMEDY}"
            )
        # A replicated bias or norm on cut features would be applied to the wrong ones.
        if style is None and next(module.parameters(recurse=False), None) is not None:
            raise UsageError(
                f"transformers' plan for {model_type} does not define the layout of `{name}`, which is beside matrices"
                f" that it cuts; {_REMEDY}"
            )
        if style in (_COLUMN, _ROW):
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                raise UsageError(
                    f"transformers' plan for {model_type} cuts `{name}`, which is a {type(module).__name__} and no"
                    f" plain linear layer; {_REMEDY}"
                )
            if style == _COLUMN:
                columns.append((block, name, module.out_features))
            else:
                inputs[block] = max(module.in_features, inputs.get(block, 0))
    for block, name, outputs in columns:
        # A fused matrix, such as q, k and v in one: a plain cut would give a rank parts of the wrong matrices.
        if outputs > inputs.get(block, 0):
            raise UsageError(
                f"transformers' plan for {model_type} cuts `{name}` with {outputs} outputs, but the row after it has"
                f" {inputs.get(block, 0)} inputs: it joins several matrices in an order that the plan lacks; {_REMEDY}"
            )


def _inside(blocks: Iterable[str], name: str) -> str | None:
    parts = name.split(".")
    starts = (".".join(parts[: block.count(".") + 1]) for block in blocks)
    return next((start for block, start in zip(blocks, starts, strict=True) if matches(block, start)), None)


def _input_embedding(model: Any) -> nn.Module | None:
    """Return the embedding of the vocabulary, or None for a model without one."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def _name_of(model: Any, wanted: nn.Module | None) -> tuple[str, ...]:
    return tuple(relative_name(model, name) for name, module in model.named_modules() if module is wanted)


def _matrices_around(model: Any) -> Iterator[str]:
    """Yield the modules with a matrix in the head around the base model; they are replicated on every rank."""
    for name, module in model.named_modules():
        outside = model.base_model is not model and relative_name(model, name) == name
        if outside and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            yield name
