"""Each module draws its weights from a stream of its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification, BertForSequenceClassification

from tests.helpers.families import CONFIGS, HEADS, has_head
from tests.helpers.training import TINY_BERT
from trainer.models.draw import draw_weights

WIDTHS = ("hidden_size", "intermediate_size", "dim", "hidden_dim", "n_embd", "d_model", "d_ff")  # for statistics


def fresh(**keys: Any) -> BertForSequenceClassification:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**{**TINY_BERT, **keys}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    return model


def drawn(seed: int = 1, names: list[str] | None = None, **keys: Any) -> dict[str, torch.Tensor]:
    model = fresh(**keys)
    draw_weights(model, dict(model.named_parameters()) if names is None else names, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_weights_follow_the_models_own_rules():
    weights = drawn(hidden_size=64, initializer_range=0.5)
    for name, tensor in weights.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "LayerNorm" in name:
            assert (tensor == 1).all(), name
        else:
            assert 0.4 < tensor.std() < 0.6, name
            assert tensor.mean().abs() < 0.1, name
    assert not weights["bert.embeddings.word_embeddings.weight"][0].any(), "the padding token's row is zero"


def test_they_depend_on_seed_and_name_alone():
    one = drawn()
    torch.manual_seed(99)
    again = drawn()
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    other = drawn(seed=2)
    matrices = [name for name, tensor in one.items() if tensor.dim() == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    pairs = {name: one[name].flatten()[:32].tolist() for name in matrices}
    assert len({tuple(values) for values in pairs.values()}) >= len(matrices) - 1, "no two modules draw the same"


def test_a_draw_does_not_depend_on_earlier_modules():
    """A deeper model has the same first layers; one generator for all would have shifted every one after them."""
    shallow, deep = drawn(), drawn(num_hidden_layers=3)
    assert all(torch.equal(tensor, deep[name]) for name, tensor in shallow.items())


def test_only_named_modules_are_drawn():
    weights = drawn(names=["classifier.weight"])
    assert weights["classifier.weight"].std() < 1
    assert all((tensor == 7.0).all() for name, tensor in weights.items() if name != "classifier.weight")


def test_torchs_generator_is_left_alone():
    state = torch.get_rng_state()
    model = fresh()
    before = torch.get_rng_state()
    draw_weights(model, dict(model.named_parameters()), 1)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(state, before), "only building it drew"


def test_parameters_are_whole_while_they_are_drawn_and_no_longer():
    gathered: list[tuple[int, ...]] = []
    inside = []

    @contextmanager
    def gather(parameters):
        gathered.append(tuple(id(parameter) for parameter in parameters))
        inside.append(parameters)
        yield
        inside.pop()

    model = fresh()
    draw_weights(model, dict(model.named_parameters()), 1, gather)
    assert not inside
    seen = [one for parameters in gathered for one in parameters]
    assert sorted(seen) == sorted(id(parameter) for parameter in model.parameters()), "each once"
    query, key, value = 2, 2, 2
    assert max(len(parameters) for parameters in gathered) == query + key + value, "a module at a time"


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_family_draws_as_transformers_does(model_type):
    """Also where the rule for a matrix is that of the module around it (T5, GPT-2, ModernBERT)."""
    head = next(head for head in HEADS if has_head(model_type, head))
    wide = {key: 4 * value for key, value in CONFIGS[model_type].items() if key in WIDTHS}
    config = AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **wide})
    torch.manual_seed(0)
    expected = getattr(transformers, head).from_config(config)
    model = getattr(transformers, head).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    draw_weights(model, dict(model.named_parameters()), 1)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if parameter.numel() < 200:
            assert not (parameter == 7.0).any(), name
        else:
            assert float(parameter.std()) == pytest.approx(float(other.std()), rel=0.25), name
            assert float(parameter.mean()) == pytest.approx(float(other.mean()), abs=0.4 * float(other.std())), name
