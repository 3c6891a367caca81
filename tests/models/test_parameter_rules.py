"""Groups of parameters: matching, the decay over layers, and a plain loop of torch with the same groups."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers.training import build_tiny, tiny_recipe
from tests.parity.cases import model_config
from trainer.base.errors import UsageError
from trainer.models.describe import ModelUse, describe
from trainer.models.families.table import FAMILIES
from trainer.models.parameter_rules import ParameterGroups
from trainer.recipe.schema import Recipe

HEADS = {
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "resnet": "AutoModelForImageClassification",
}


def groups_of(
    model: dict[str, Any] | None = None, head: str = "AutoModelForMaskedLM", **optimizer: Any
) -> ParameterGroups:
    recipe = tiny_recipe(model=model or {}, optimizer=optimizer)
    described = describe(recipe.model, recipe.training, ModelUse(head), recipe.optimizer)
    whole = described.on_meta()
    described.adapt(whole)
    return described.groups(whole)


class TestMatching:
    def test_a_group_has_its_values_and_other_parameters_the_defaults(self):
        head = {"match": "cls", "learning_rate": 0.01}
        plain = {"match": ["*.query.weight", "layer.1.attention.self.key"], "weight_decay": 0.5}
        found = groups_of(groups=[head, plain])
        rules = {
            (rule.origin, round(rule.rate, 9), rule.weight_decay): [n for n, one in found.rules.items() if one == rule]
            for rule in found.rules.values()
        }
        assert rules.keys() == {
            ("cls", 10.0, 0.01),
            ("*.query.weight, layer.1.attention.self.key", 1.0, 0.5),
            ("others", 1.0, 0.01),
        }
        assert rules["*.query.weight, layer.1.attention.self.key", 1.0, 0.5] == [
            "bert.encoder.layer.0.attention.self.query.weight",
            "bert.encoder.layer.1.attention.self.query.weight",
            "bert.encoder.layer.1.attention.self.key.weight",
            "bert.encoder.layer.1.attention.self.key.bias",
        ]
        assert found.table[0] == ("group", "tensors", "parameters", "learning rate", "weight decay")
        assert [row[0] for row in found.table[1:]] == ["cls", "others", "*.query.weight, layer.1.attention.self.key"]
        assert found.table[1][3:] == ("0.01", "0.01")

    @pytest.mark.parametrize(
        ("groups", "model", "message"),
        [
            (["clss"], {}, r"`optimizer.groups\[0\].match` must match modules .*'clss' matches none; use .*cls"),
            (["cls", "predictions"], {}, r"groups\[1\].match` must match other parameters .*predictions and cls both"),
            (["pooler"], {"freeze": ["embeddings"]}, r"'pooler' matches none"),
            (["word_embeddings"], {"freeze": ["embeddings"]}, r"must match trained parameters, but word_embeddings"),
        ],
    )
    def test_patterns_without_a_match_or_with_two_are_refused(self, groups, model, message):
        with pytest.raises(UsageError, match=message):
            groups_of(model, groups=[{"match": match, "learning_rate": 0.1} for match in groups])

    def test_a_tied_parameter_matches_by_any_of_its_names(self):
        found = groups_of(groups=[{"match": "decoder.weight", "learning_rate": 0.1}])
        assert [name for name, rule in found.rules.items() if rule.rate != 1.0] == [
            "bert.embeddings.word_embeddings.weight"
        ]


class TestLayerDecay:
    def test_of_a_classifier(self):
        found = groups_of(head="AutoModelForSequenceClassification", layer_decay=0.5)
        rates = {row[0]: float(row[3]) for row in found.table[1:]}
        assert rates == {"embeddings": 1.25e-4, "encoder.layer.0": 2.5e-4, "encoder.layer.1": 5e-4, "head": 1e-3}

    def test_a_rate_of_a_group_does_not_decay_and_its_weight_decay_does(self):
        own = {"match": "layer.0.attention", "learning_rate": 0.1}
        other = {"match": "layer.0.output", "weight_decay": 0.0}
        rules = groups_of(groups=[own, other], layer_decay=0.5).rules
        assert rules["bert.encoder.layer.0.attention.self.query.weight"].rate == pytest.approx(100)
        assert rules["bert.encoder.layer.0.output.dense.weight"].rate == 0.25
        assert rules["bert.encoder.layer.0.intermediate.dense.weight"].rate == 0.25

    @pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "olmoe"])  # it has no such head
    def test_of_every_family_ends_at_the_embeddings(self, model_type):
        head = HEADS.get(model_type, "AutoModelForSequenceClassification")
        rows = groups_of({"config": model_config(model_type)}, head, learning_rate=1.0, layer_decay=0.5).table[1:]
        rates = {row[0]: float(row[3]) for row in rows}
        layers = [rate for part, rate in rates.items() if part not in ("head", "embeddings")]
        assert layers == sorted(layers)
        assert rates["embeddings"] == min(layers) / 2
        assert max(layers) == 0.5
        assert rates["head"] == 1.0


def test_training_is_that_of_a_plain_loop_with_the_same_groups():
    groups = [{"match": "classifier", "learning_rate": 0.03}, {"match": "pooler", "weight_decay": 0.5}]
    recipe: Recipe = tiny_recipe(
        model={"dropout": 0.0},
        optimizer={"groups": groups, "layer_decay": 0.7, "learning_rate": 0.01, "weight_decay": 0.1, "epsilon": 1e-4},
        schedule={"name": "cosine", "min_rate": 0.1},
    )
    training = build_tiny(recipe)
    model: Any = copy.deepcopy(training.model)
    made: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        height = next(
            (3 - layer - 1 for layer in (0, 1) if f"layer.{layer}." in name), 3 if "embeddings" in name else 0
        )
        rate = 0.03 if "classifier" in name else 0.01 * 0.7**height
        decay = 0.5 if "pooler" in name else 0.1
        made.setdefault((rate, decay * (parameter.dim() > 1)), []).append(parameter)
    named = [{"params": ps, "lr": lr, "weight_decay": wd} for (lr, wd), ps in made.items()]
    optimizer = torch.optim.AdamW(named, eps=1e-4)  # a smaller one would enlarge the rounding of small gradients
    schedule = LambdaLR(optimizer, lambda step: recipe.schedule.factor(step, training.total_steps))
    for batch in islice(training.loader, 4):
        (rows,) = batch.microbatches
        expected = cross_entropy(model(**rows.inputs).logits, rows.labels)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert training.engine.train_step(batch).loss == pytest.approx(expected.item(), rel=1e-6)
    for (name, parameter), other in zip(training.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-6, rtol=1e-5, msg=name)
