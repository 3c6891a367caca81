"""Which parameters decay, and the update of each optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.training import TINY_BERT
from trainer.engine.optimizers import tensor_batches
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters, matrix_names, no_decay_names
from trainer.engine.optimizers.table import build_optimizer, optimizer_class
from trainer.features.adafactor.section import Adafactor
from trainer.features.muon.section import Muon
from trainer.recipe.registered import optimizer_sections
from trainer.recipe.schema import SGD, AdamW

SMALL = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0}


def model(**config) -> nn.Module:
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))


class TestNoDecay:
    def test_of_bert_are_biases_and_layer_norms(self):
        bert = model(**TINY_BERT)
        expected = {name for name, _ in bert.named_parameters() if name.endswith("bias") or "LayerNorm" in name}
        assert no_decay_names(bert) == expected
        assert "bert.embeddings.LayerNorm.weight" in expected
        assert "classifier.bias" in expected
        assert "bert.embeddings.position_embeddings.weight" not in expected

    def test_of_llama_are_its_own_norms(self):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        assert no_decay_names(model(model_type="llama", **SMALL, **sizes)) == {
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.norm.weight",
        }

    def test_of_gpt2_and_t5(self):
        gpt2 = no_decay_names(model(model_type="gpt2", n_embd=16, n_layer=1, n_head=2, **SMALL))
        assert {"transformer.h.0.ln_1.weight", "transformer.h.0.attn.c_attn.bias", "transformer.ln_f.bias"} <= gpt2
        assert "transformer.h.0.attn.c_attn.weight" not in gpt2
        sizes = {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 32, "decoder_start_token_id": 0}
        t5 = no_decay_names(model(model_type="t5", eos_token_id=1, **SMALL, **sizes))
        assert "transformer.encoder.block.0.layer.0.layer_norm.weight" in t5
        assert "transformer.shared.weight" not in t5

    def test_a_name_that_only_contains_bias_decays(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.bias_scale = nn.Parameter(torch.ones(2))
                self.output_bias = nn.Parameter(torch.ones(2))

        assert no_decay_names(Odd()) == {"output_bias"}


def named() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for name, shape in (("weight", (4, 3)), ("bias", (4,)), ("frozen", (2,))):
        parameter = nn.Parameter(torch.randn(shape, generator=generator), requires_grad=name != "frozen")
        parameter.grad = torch.randn(shape, generator=generator)
        parameters.append((name, parameter))
    return parameters


@pytest.mark.parametrize("name", optimizer_sections())
def test_each_section_of_a_recipe_names_an_optimizer(name):
    assert issubclass(optimizer_class(optimizer_sections()[name]), EngineOptimizer)


class TestBuildOptimizer:
    def test_two_groups_without_the_frozen(self):
        parameters = named()
        optimizer = build_optimizer(AdamW(weight_decay=0.1), TrainedParameters(dict(parameters), {"bias"}))
        decayed, left = optimizer.param_groups
        assert [id(p) for p in decayed["params"]] == [id(parameters[0][1])]
        assert [id(p) for p in left["params"]] == [id(parameters[1][1])]
        assert (decayed["weight_decay"], left["weight_decay"]) == (0.1, 0.0)

    def test_an_empty_group_is_left_out(self):
        (group,) = build_optimizer(AdamW(), TrainedParameters(dict(named()))).param_groups
        assert len(group["params"]) == 2

    @pytest.mark.parametrize("steps", [1, 3])
    def test_adamw_is_the_published_rule(self, steps):
        """Loshchilov & Hutter 2019, algorithm 2, in fp64; the schedule multiplier is 1."""
        recipe = AdamW(learning_rate=0.01, weight_decay=0.1, betas=[0.8, 0.95], epsilon=1e-6)
        parameters = named()[:2]
        expected = []
        for name, parameter in parameters:
            theta, gradient = parameter.detach().double(), parameter.grad.double()
            first, second = torch.zeros_like(theta), torch.zeros_like(theta)
            for step in range(1, steps + 1):
                first = 0.8 * first + 0.2 * gradient
                second = 0.95 * second + 0.05 * gradient**2
                update = first / (1 - 0.8**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-6)
                theta = theta - 0.01 * update - 0.01 * (0.1 if name == "weight" else 0.0) * theta
            expected.append(theta)
        optimizer = build_optimizer(recipe, TrainedParameters(dict(parameters), {"bias"}))
        for _ in range(steps):
            optimizer.step()
        for (_, parameter), theta in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), theta, atol=1e-6, rtol=1e-5)

    def test_sgd_with_momentum(self):
        recipe = SGD(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.5)
        (_, weight), (_, bias), _ = parameters = named()
        before, gradient = weight.detach().clone(), weight.grad.clone()
        bias_before = bias.detach().clone()
        optimizer = build_optimizer(recipe, TrainedParameters(dict(parameters), {"bias"}))
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before - 0.1 * (gradient + 0.5 * before))
        optimizer.step()
        torch.testing.assert_close(bias.detach(), bias_before - 0.1 * bias.grad - 0.1 * 1.9 * bias.grad)

    def test_is_fused(self):
        assert build_optimizer(AdamW(), TrainedParameters(dict(named()))).defaults["fused"]
        assert build_optimizer(SGD(name="sgd", learning_rate=1.0), TrainedParameters(dict(named()))).defaults["fused"]


class TestWholeMatrices:
    """Muon and Adafactor against torch's own classes, on a BERT with random gradients."""

    @staticmethod
    def two_steps(make):
        bert = model(**TINY_BERT)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in bert.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        optimizers = make(bert)
        for _ in range(2):
            for parameter in bert.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
        return dict(bert.named_parameters())

    @pytest.mark.parametrize(("most", "difference"), [(1, 1e-7), (tensor_batches.MOST_ON_CPU, 2e-4)])
    def test_muon_updates_matrices_and_adamw_the_rest(
        self, most: int, difference: float, monkeypatch: pytest.MonkeyPatch
    ):
        """Batches of one matrix have torch's own iterations."""
        monkeypatch.setattr(tensor_batches, "MOST_ON_CPU", most)

        def ours(bert):
            recipe = Muon(name="muon", learning_rate=0.01, weight_decay=0.1)
            named = dict(bert.named_parameters())
            trained = TrainedParameters(named, no_decay_names(bert), lambda: matrix_names(bert))
            return [build_optimizer(recipe, trained)]

        def torchs(bert):
            plain = no_decay_names(bert)
            layers = {n: p for n, p in bert.named_parameters() if n.startswith("bert.encoder.layer") and p.dim() == 2}
            rest = [(n, p) for n, p in bert.named_parameters() if n not in layers]
            groups = [
                {"params": [p for n, p in rest if n not in plain], "weight_decay": 0.1},
                {"params": [p for n, p in rest if n in plain], "weight_decay": 0.0},
            ]
            matrices = torch.optim.Muon(
                list(layers.values()), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            )
            return [matrices, torch.optim.AdamW(groups, lr=0.01)]

        found, expected = self.two_steps(ours), self.two_steps(torchs)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=difference, msg=name)

    def test_adafactor_is_that_of_torch(self):
        def ours(bert):
            trained = TrainedParameters(dict(bert.named_parameters()), no_decay_names(bert))
            return [build_optimizer(Adafactor(name="adafactor"), trained)]

        found = self.two_steps(ours)
        expected = self.two_steps(lambda bert: [torch.optim.Adafactor(bert.parameters(), foreach=False)])
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-7, msg=name)
