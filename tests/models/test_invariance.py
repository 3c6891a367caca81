"""A model outside of the table of families is proven before it trains: by padding, and by other rows beside a row."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trainer.base.errors import UsageError
from trainer.models import invariance
from trainer.models.describe import ModelUse, describe
from trainer.models.dropout import set_probabilities
from trainer.models.fill import build_model
from trainer.models.invariance import check_invariance, sample_of
from trainer.parallel.dropout import KeyedDropPath, MicrobatchKey
from trainer.recipe.schema import Model, Training

difference = invariance._difference
TEXTS, IMAGES = "AutoModelForSequenceClassification", "AutoModelForImageClassification"
LAYERS = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
GROUPS = ("q", "k", "v", "post_attention", "intermediate", "output")
DECODER = {"vocab_size": 60, "hidden_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OWN_ATTENTION = {
    "mpnet": LAYERS,
    "squeezebert": {**LAYERS, "embedding_size": 16, **{f"{name}_groups": 1 for name in GROUPS}},
    "roformer": LAYERS,
    "convbert": {**LAYERS, "embedding_size": 16},
    "megatron-bert": LAYERS,
    "rembert": {**LAYERS, "input_embedding_size": 8, "output_embedding_size": 8},
    "ibert": LAYERS,
    "luke": {**LAYERS, "entity_vocab_size": 10},
    "bloom": {**DECODER, "n_layer": 2, "n_head": 2},
    "gpt_neo": {**DECODER, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
VISION = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 11], [5, 6, 7, 12, 0, 0]])


def build(model_type: str, keys: dict, head: str = TEXTS, model: dict | None = None, **training):
    recipe = Model.model_validate({"config": {"model_type": model_type, **keys}, **(model or {})})
    labels = 2 if head == "AutoModelForQuestionAnswering" else 3  # both ends of an answer
    return build_model(describe(recipe, Training.model_validate(training), ModelUse(head, {"num_labels": labels})))


def logits(model: nn.Module, rows: slice, columns: slice = slice(None)) -> torch.Tensor:
    ids = IDS[rows, columns]
    return model(input_ids=ids, attention_mask=(ids != 0).long()).logits


@pytest.mark.parametrize("model_type", OWN_ATTENTION)
def test_a_model_with_attention_functions_of_its_own_masks_its_padding(model_type):
    model = build(model_type, OWN_ATTENTION[model_type]).model.eval()
    torch.testing.assert_close(logits(model, slice(1, 2), slice(4)), logits(model, slice(None))[1:])
    plain = AutoModelForSequenceClassification.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model, slice(None)), logits(plain, slice(None)))


HEADS = ("", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


@pytest.mark.parametrize("head", HEADS)
def test_a_model_is_proven_by_the_outputs_of_each_head(head, monkeypatch):
    proven = []

    def noted(row, alone):
        proven.append((difference(row, alone), float(row.abs().max())))
        return proven[-1][0]

    monkeypatch.setattr(invariance, "_difference", noted)
    build("mpnet", LAYERS, f"AutoModel{head}")
    of_rows, largest = proven[0]
    assert of_rows < 1e-5  # on some processors, both passes give the same bits
    assert largest > 0


WIDTHS = {**LAYERS, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(("model_type", "keys"), [("gemma2", {}), ("gpt_oss", EXPERTS)])
def test_capped_scores_and_attention_sinks_are_computed_as_in_transformers(model_type, keys):
    config = {**WIDTHS, **keys, "attention_dropout": 0.3}
    built = build(model_type, config, "AutoModelForCausalLM")
    model = built.model.eval()
    if model_type == "gpt_oss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(2.0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    evaluated, state = logits(model, slice(None)), torch.get_rng_state()
    torch.testing.assert_close(evaluated, logits(plain, slice(None)))
    with built.dropout_keys.use(MicrobatchKey(0, torch.tensor([0, 1]))):
        dropped = logits(model.train(), slice(None))
    assert not torch.allclose(dropped, evaluated)
    with built.dropout_keys.use(MicrobatchKey(0, torch.tensor([0]))):
        torch.testing.assert_close(logits(model, slice(0, 1)), dropped[:1])
    assert torch.equal(state, torch.get_rng_state())


DECODERS = {
    "gpt_neox": LAYERS,
    "gemma": {**LAYERS, "num_key_value_heads": 1, "head_dim": 8},
    "bloom": {**DECODER, "n_layer": 2, "n_head": 2},  # has no positions
}


@pytest.mark.parametrize(("model_type", "refused"), [("gpt_neox", ""), ("gemma", ""), ("bloom", "change its logits")])
def test_a_decoder_that_separates_packed_documents_is_detected(model_type, refused):
    recipe = Model.model_validate({"config": {"model_type": model_type, **DECODERS[model_type]}})
    described = describe(recipe, Training(), ModelUse("AutoModelForCausalLM", packed=True))
    build = partial(build_model, described)
    if not refused:
        assert build().model.training
        return
    with pytest.raises(UsageError, match=rf'`task.packing` is "documents", .*\'{model_type}\' .* {refused}'):
        build()


def test_an_image_model_with_attention_classes_of_its_own_can_be_built():
    model = build("data2vec-vision", VISION, IMAGES).model.eval()
    assert model(pixel_values=torch.zeros(1, 3, 16, 16)).logits.shape == (1, 3)


NO_HEADS = {key: value for key, value in LAYERS.items() if key != "num_attention_heads"}


@pytest.mark.parametrize(("model_type", "keys"), [("fnet", NO_HEADS), ("yoso", LAYERS)])
class TestAModelThatDependsOnItsPadding:
    def test_is_refused_by_name(self, model_type, keys):
        with pytest.raises(UsageError, match=rf"model type '{model_type}'.*logits of a row change.*layout_invariant"):
            build(model_type, keys)

    def test_is_noted_with_torchs_own_dropout(self, model_type, keys):
        (note,) = build(model_type, keys, layout_invariant_dropout=False).notes
        assert note.startswith(f"model type '{model_type}' depends on the layout: the logits of a row change")


class TestALanguageModel:
    def test_that_adds_terms_to_its_loss_is_refused(self):
        routed = {**LAYERS, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
        build("granitemoe", {**routed, "router_aux_loss_coef": 0.5}, "AutoModelForCausalLM")
        with pytest.raises(UsageError, match=r"'granitemoe' has a loss of its own, [\d.]+ where the cross entropy"):
            build("granitemoe", {**routed, "output_router_logits": True}, "AutoModelForCausalLM")

    def test_with_rotations_by_the_longest_row_is_refused(self):
        factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
        keys = {**WIDTHS, "original_max_position_embeddings": 12, "rope_parameters": factors}
        del keys["head_dim"]
        with pytest.raises(UsageError, match="the logits of a row change"):
            build("phi3", {**keys, "max_position_embeddings": 32}, "AutoModelForCausalLM")

    def test_that_needs_tokens_for_its_decoder_gets_them(self):
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        widths = {"vocab_size": 60, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        keys = {**sizes, **widths, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "dropout": 0.0}
        assert build("m2m_100", {**keys, "pad_token_id": 1}, "AutoModelForSeq2SeqLM").model


class TestStochasticDepth:
    def test_is_keyed_by_row(self):
        built = build("swin", {**SWIN, "drop_path_rate": 0.5}, IMAGES)
        assert any(isinstance(module, KeyedDropPath) for module in built.model.modules())
        pixels = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        model, state = built.model.train(), torch.get_rng_state()

        def run(*rows: int, step: int = 0) -> torch.Tensor:
            with built.dropout_keys.use(MicrobatchKey(step, torch.tensor(rows))):
                return model(pixel_values=pixels[list(rows)]).logits

        whole = run(0, 1, 2, 3, 4, 5)
        torch.testing.assert_close(torch.cat([run(0, 1), run(5, 2), run(3, 4)]), whole[[0, 1, 5, 2, 3, 4]])
        assert not torch.allclose(whole, run(0, 1, 2, 3, 4, 5, step=1))
        assert not torch.allclose(whole, model.eval()(pixel_values=pixels).logits)
        assert torch.equal(state, torch.get_rng_state())

    @pytest.mark.parametrize(
        ("model_type", "keys", "key", "off"),
        [
            ("swin", {"drop_path_rate": 0.1}, "drop_path_rate", 0),
            ("convnext", {"drop_path_rate": 0.1}, "drop_path_rate", 0),
            ("cvt", {"drop_path_rate": [0.0, 0.0, 0.1]}, "drop_path_rate", [0, 0, 0]),
            ("opt", {"layerdrop": 0.1}, "layerdrop", 0),
        ],
    )
    def test_model_dropout_0_turns_it_off(self, model_type, keys, key, off):
        config = AutoConfig.for_model(model_type, **keys)
        set_probabilities(config, 0.0)
        assert list(getattr(config, key)) == off if isinstance(off, list) else getattr(config, key) == off

    def test_another_probability_leaves_its_rate(self):
        config = AutoConfig.for_model("swin", drop_path_rate=0.1)
        set_probabilities(config, 0.3)
        assert (config.drop_path_rate, config.hidden_dropout_prob) == (0.1, 0.3)


class TestDraws:
    def test_jitter_is_refused_by_the_models_name(self):
        keys = {**LAYERS, "num_key_value_heads": 2, "num_local_experts": 2, "router_jitter_noise": 0.1}
        with pytest.raises(UsageError, match=r"model type 'phimoe' draws random numbers.*layout_invariant_dropout"):
            build("phimoe", keys)

    def test_a_dropout_function_is_refused_by_the_models_name(self):
        keys = {**DECODER, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16}
        with pytest.raises(UsageError, match=r"model type 'opt' calls torch's dropout directly"):
            build("opt", {**keys, "dropout": 0.1})
        build("opt", {**keys, "dropout": 0.0})  # still draws a scalar for each layer, and drops none


class TestASample:
    """A rank that holds a part of a model proves a stand-in."""

    def test_has_few_layers_and_random_weights(self):
        config = AutoConfig.for_model("mpnet", **{**LAYERS, "num_hidden_layers": 20})
        sample = sample_of(AutoModelForSequenceClassification._model_mapping[type(config)], config, "eager")
        assert len(sample.mpnet.encoder.layer) == 8
        assert config.num_hidden_layers == 20
        assert check_invariance(sample.eval(), None) == []

    def test_keeps_the_mode_and_the_configuration_of_the_model(self):
        config = AutoConfig.for_model("gpt_neo", **{**OWN_ATTENTION["gpt_neo"], "pad_token_id": None})
        sample = sample_of(AutoModelForSequenceClassification._model_mapping[type(config)], config, "eager")
        check_invariance(sample.eval(), None)
        assert not sample.training
        assert sample.config.pad_token_id is None
