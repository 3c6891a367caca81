"""The table of families, and finding layers by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.families import build
from tests.helpers.training import TINY_BERT
from trainer.errors import UsageError
from trainer.models.families import table
from trainer.models.families.family import ModelFamily
from trainer.models.families.table import FAMILIES, layers_of, matches
from trainer.parallel.dropout import DropoutKeys

HEAD = {"vit": "AutoModelForImageClassification"}
NUM_LAYERS = {"albert": 1, "t5": 4}  # of which are fewer than are called, or two stacks; the others have two


def model_of(config: dict[str, Any]) -> nn.Module:
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))


def renamed(layers: str) -> ModelFamily:
    """BERT, but for where its layers are."""
    return replace(FAMILIES["bert"], layers=layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_in_order_and_are_all_of_the_model_that_repeats(family):
    model = build(family, HEAD.get(family, "AutoModelForSequenceClassification"), 0.0, DropoutKeys(0))
    layers = layers_of(model)
    assert len(layers) == NUM_LAYERS.get(family, 2)
    # An encoder comes before its decoder, and each counts its own.
    assert list(layers) == sorted(layers, key=lambda name: ("decoder." in name, int(name.rsplit(".", 1)[1])))
    assert len({type(layer) for layer in layers.values()}) == 1
    outside = {type(module) for module in model.modules()} - {
        type(m) for layer in layers.values() for m in layer.modules()
    }
    assert type(next(iter(layers.values()))) not in outside
    repeated = {id(p) for layer in layers.values() for p in layer.parameters()}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in repeated]
    assert not any(part in name for name in left for part in (".layer.", ".layers.", ".block.", ".albert_layers."))


def test_a_model_of_no_family_is_refused_with_the_remedy():
    model = model_of(
        {"model_type": "opt", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    with pytest.raises(UsageError, match=r"'opt' is in no family of models; known are .*bert, .*gpt2.*; add a file"):
        layers_of(model)


def test_a_pattern_that_matches_nothing_is_refused(monkeypatch):
    monkeypatch.setitem(table.FAMILIES, "bert", renamed("encoder.block.*"))
    with pytest.raises(UsageError, match=r"says that layers are `encoder\.block\.\*`, but none is in this model"):
        layers_of(model_of(TINY_BERT))


def test_a_pattern_matches_whole_names_only(monkeypatch):
    """`*` is one part of a name: modules inside of a layer are no layers."""
    assert set(layers_of(model_of(TINY_BERT))) == {"encoder.layer.0", "encoder.layer.1"}
    monkeypatch.setitem(table.FAMILIES, "bert", renamed("encoder.laye."))
    with pytest.raises(UsageError):
        layers_of(model_of(TINY_BERT))


@pytest.mark.parametrize(
    ("pattern", "name", "does"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.mlp", False),
        ("layers.*", "layersx0", False),
        ("(encoder|decoder).block.*", "decoder.block.1", True),
        ("(encoder|decoder).block.*", "encoder|decoder.block.1", False),
        ("mlp.(wi|wi_0|wi_1)", "mlp.wi_1", True),
        ("mlp.(wi|wi_0|wi_1)", "mlp.wi_2", False),
    ],
)
def test_patterns(pattern, name, does):
    assert matches(pattern, name) is does
