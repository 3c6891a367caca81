"""Stages of unmodified models: run one after the other in one process, they are the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from tests.helpers.families import CONFIGS, EXPERTS
from tests.helpers.training import TINY_BERT, TINY_RESNET
from trainer.base.errors import UsageError
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.stage_split import StageSplit, _balanced, _costs, cut_stage, split_stages

# `tests/features/experts/` compares the families with experts.
FAMILIES_WITH_STAGES = [name for name, family in FAMILIES.items() if family.stages is not None and name not in EXPERTS]
SEQUENCE, IMAGES = "AutoModelForSequenceClassification", "AutoModelForImageClassification"
IMAGE_FAMILIES = ("vit", "resnet")
TINY = {**CONFIGS, "resnet": TINY_RESNET}
ODD = 35  # pixels, which no layer halves evenly


def tiny(model_type: str, head: str = SEQUENCE, /, **keys: Any) -> nn.Module:
    keys = {**TINY.get(model_type, {}), "num_labels": 3, **keys}
    keys.pop("model_type", None)
    config = AutoConfig.for_model(model_type, **keys)
    if model_type not in IMAGE_FAMILIES and config.pad_token_id is None:
        config.pad_token_id = 0
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, head).from_config(config)
    return model.eval()


def inputs_of(model: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if model.config.model_type in IMAGE_FAMILIES:
        size = getattr(model.config, "image_size", ODD)
        return {"pixel_values": torch.randn(2, model.config.num_channels, size, size)}
    ids, mask = torch.randint(5, 100, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    if model.config.is_encoder_decoder:
        ids[:, 4] = model.config.eos_token_id
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False} if takes_cache(model) else {
        "input_ids": ids, "attention_mask": mask
    }  # fmt: skip


def takes_cache(model: nn.Module) -> bool:
    return model.config.model_type in ("gpt2", "llama", "mistral", "qwen2", "qwen3", "t5", "bart")  # type: ignore[union-attr]


def in_stages(model: nn.Module, split: StageSplit) -> tuple[Tensor, list[nn.Module]]:
    """The logits, and the stages, each cut from a copy."""
    received: Any = ()
    stages = []
    inputs = inputs_of(model)
    for stage in range(split.num_stages):
        module = copy.deepcopy(model)
        part = cut_stage(module, split, stage)
        shapes = part.shapes.of(inputs, num_rows=2)
        assert tuple(tuple(tensor.shape) for tensor in received) == (shapes[stage - 1] if stage else ())
        received = part.run(module.forward, received, inputs)
        stages.append(module)
    return received.logits, stages


class TestStages:
    @pytest.mark.parametrize("model_type", FAMILIES_WITH_STAGES)
    def test_are_the_model(self, model_type):
        model = tiny(model_type, IMAGES if model_type in IMAGE_FAMILIES else SEQUENCE)
        for num_stages in range(1, len(layers_of(model)) + 1):
            logits, stages = in_stages(model, split_stages(model, num_stages))
            assert torch.equal(logits, model(**inputs_of(model)).logits)
            names = [name for stage in stages for name, _ in stage.named_parameters()]
            whole = {name for name, _ in model.named_parameters()}
            assert whole <= {*names, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
            copies = len(names) - len(whole)
            assert copies == 0 or model_type in ("t5", "bart")  # an encoder and a decoder share their embedding

    @pytest.mark.parametrize(
        ("model_type", "head"), [("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForCausalLM")]
    )
    def test_know_which_of_them_hold_a_tied_weight(self, model_type, head):
        model = tiny(model_type, head, **(TINY_BERT if model_type == "bert" else {}))
        split = split_stages(model, 2)
        logits, stages = in_stages(model, split)
        assert torch.equal(logits, model(**inputs_of(model)).logits)
        part = cut_stage(copy.deepcopy(model), split, 1)
        ((name, holders),) = part.holders.items()
        assert holders == (0, 1)
        assert torch.equal(stages[0].get_parameter(name), model.get_parameter(name))
        assert name in part.origins.values()

    def test_boundaries_of_an_encoder_and_a_decoder(self):
        model = tiny("t5")
        expected = model(**inputs_of(model)).logits
        layers = tuple(layers_of(model))
        assert layers == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
        for start in range(1, 4):
            logits, _ = in_stages(model, StageSplit(layers, (0, start)))
            assert torch.equal(logits, expected)

    def test_gradients_travel_back_through_all_of_them(self):
        model = tiny("t5")
        model(**inputs_of(model)).logits.sum().backward()
        split = split_stages(model, 4)
        logits, stages = in_stages(model, split)
        logits.sum().backward()
        parts = {name: p for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            if name in parts and "shared" not in name and "relative" not in name:
                torch.testing.assert_close(parts[name].grad, parameter.grad)


class TestSplit:
    def test_is_balanced_by_cost(self):
        assert _balanced((0.0, [1.0] * 8, 0.0), 4) == (0, 2, 4, 6)
        assert _balanced((0.0, [1.0] * 8, 3.0), 2) == (0, 5)  # a heavy head leaves the last stage fewer layers
        assert _balanced((2.0, [1.0] * 6, 0.0), 2) == (0, 2)
        assert _balanced((0.0, [1.0, 1.0, 1.0, 9.0], 0.0), 3) == (0, 1, 3)

    def test_counts_a_vocabulary_head(self):
        keys = {**TINY_BERT, "num_hidden_layers": 8, "vocab_size": 2000}
        classifies, guesses = tiny("bert", **keys), tiny("bert", "AutoModelForMaskedLM", **keys)
        assert split_stages(classifies, 2).starts[1] <= 5
        assert split_stages(guesses, 2).starts[1] > split_stages(classifies, 2).starts[1]

    def test_weighs_convolutions_by_their_operations(self):
        """Each group of a ResNet-18 multiplies about as often as any other, with four times its parameters at most."""
        keys = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
        model = tiny("resnet", IMAGES, **keys)
        before, layers, after = _costs(model, tuple(layers_of(model)))
        assert before == 49 * 64 * 112**2  # a kernel of 7 x 7 for each feature and place of its one channel
        assert layers[:2] == [2 * 9 * 64 * 64 * 56**2] * 2
        assert layers[2] == (9 * 64 * 128 + 9 * 128 * 128 + 64 * 128) * 28**2  # and its shortcut
        assert layers[3] == layers[5] == layers[7] == layers[0]
        assert after == 512 * 3
        assert split_stages(model, 2).starts == (0, 4)
        assert split_stages(model, 4).starts == (0, 2, 4, 6)

    def test_a_resnet_by_its_residual_layers(self):
        model = tiny("resnet", IMAGES)
        split = split_stages(model, 2, ["encoder.stages.0.layers.1"])
        logits, _ = in_stages(model, split)
        assert torch.equal(logits, model(**inputs_of(model)).logits)
        with pytest.raises(UsageError, match=r"from encoder.stages.0.layers.0 to encoder.stages.1.layers.1, but names"):
            split_stages(model, 2, ["encoder.stages.1"])
        with pytest.raises(UsageError, match="asks for 5 stages, but the model has 4 layers"):
            split_stages(model, 5)

    def test_by_names(self):
        model = tiny("bert", **{**TINY_BERT, "num_hidden_layers": 4})
        split = split_stages(model, 3, ["encoder.layer.1", "encoder.layer.3"])
        assert split.starts == (0, 1, 3)
        assert split.layers_of(1) == ("encoder.layer.1", "encoder.layer.2")
        assert [split.stage_of(layer) for layer in range(4)] == [0, 1, 1, 2]

    @pytest.mark.parametrize(
        ("num_stages", "starts", "words"),
        [
            (5, None, "asks for 5 stages, but the model has 4 layers and every stage needs one; use at most 4"),
            (3, ["encoder.layer.1"], "must name the first layer of each of the 3 stages but the first, 2 in all"),
            (2, ["encoder.layer.9"], "must name layers of the model, from encoder.layer.0 to encoder.layer.3"),
            (3, ["encoder.layer.2", "encoder.layer.1"], "must name layers in their order"),
            (3, ["encoder.layer.2", "encoder.layer.2"], "must name layers in their order"),
            (2, ["encoder.layer.0"], "each once and not the first of all"),
        ],
    )
    def test_refuses_stages_that_do_not_fit(self, num_stages, starts, words):
        with pytest.raises(UsageError, match=words):
            split_stages(tiny("bert", **{**TINY_BERT, "num_hidden_layers": 4}), num_stages, starts)

    def test_refuses_a_family_that_shares_its_layers(self):
        with pytest.raises(
            UsageError, match=r"family albert cannot be cut between its layers; .* bart, bert, .*distilbert"
        ):
            split_stages(tiny("albert"), 2)
