"""An unmodified model gets keyed dropout everywhere, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.families import build, inputs_of
from tests.helpers.training import TINY_BERT
from trainer.base.errors import UsageError
from trainer.models.attention import KEYED_ATTENTION
from trainer.models.dropout import RefuseUnkeyedDropout, dropout_notes, key_dropout, set_probabilities, site_of
from trainer.models.families.table import FAMILIES, residual_output
from trainer.parallel import kernel_support
from trainer.parallel.dropout import DropoutKeys, KeyedDropout, MicrobatchKey

IDS = torch.tensor([[5, 6, 7, 8, 9, 1], [5, 6, 7, 1, 0, 0]])
SMALL = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tiny(model_type: str, **keys) -> nn.Module:
    config = AutoConfig.for_model(model_type, **SMALL, **keys)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=KEYED_ATTENTION).train()


def tiny_bert() -> nn.Module:
    return tiny("bert", **{key: value for key, value in TINY_BERT.items() if key not in ("model_type", "vocab_size")})


def logits(model: nn.Module, keys: DropoutKeys, rows: tuple[int, ...] = (0, 1), step: int = 0) -> torch.Tensor:
    with RefuseUnkeyedDropout(), keys.use(MicrobatchKey(step, torch.tensor(rows))):
        return model(input_ids=IDS, attention_mask=(IDS > 0).long()).logits


def test_a_run_on_a_gpu_without_the_kernel_has_a_note(monkeypatch):
    model, gpu = tiny_bert(), torch.device("cuda", 0)
    monkeypatch.setattr(kernel_support, "obstacle", lambda device: "the GPU is old")
    assert dropout_notes(model, gpu) == [], "torch's dropout"
    key_dropout(model, DropoutKeys(0))
    assert dropout_notes(model, gpu) == ["dropout stores its masks, because the GPU is old"]
    assert dropout_notes(model, torch.device("cpu")) == []
    monkeypatch.setattr(kernel_support, "obstacle", lambda device: None)
    assert dropout_notes(model, gpu) == []


class TestResidualOutputs:
    """Where a dropout adds the residual, the model computes as with transformers' own forward function."""

    @pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.residual_outputs])
    def test_they_compute_as_transformers(self, model_type: str):
        def results(replaced: bool) -> tuple[torch.Tensor, ...]:
            keys = DropoutKeys(0)
            model = build(model_type, "AutoModelForSequenceClassification", 0.2, keys)
            changed = [module for name, module in model.named_modules() if residual_output(model, name) is not None]
            assert len(changed) == (5 if model_type == "t5" else 2) * model.config.num_hidden_layers
            for module in changed:
                assert type(module) is not type(module).__base__
                if not replaced:
                    module.__class__ = type(module).__base__
            inputs = inputs_of(model_type)
            with keys.use(MicrobatchKey(0, torch.arange(len(inputs["input_ids"])))):
                logits = model(**inputs).logits
            gradients = torch.autograd.grad(logits.square().sum(), [*model.parameters()], allow_unused=True)
            return logits, model.eval()(**inputs).logits, *(one for one in gradients if one is not None)

        for found, expected in zip(results(True), results(False), strict=True):
            assert torch.equal(found, expected)


class TestKeyDropout:
    def test_every_dropout_of_bert_is_replaced_and_keeps_its_probability(self):
        model = tiny_bert()
        before = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
        assert key_dropout(model, DropoutKeys(0)) == len(before) == 1 + 2 * 3 + 1
        after = {name: module for name, module in model.named_modules() if isinstance(module, KeyedDropout)}
        assert not any(isinstance(module, nn.Dropout) for module in model.modules())
        assert {name: module.p for name, module in after.items()} == before
        assert {module.site.name for module in after.values()} == set(before), "each site is named as the module"

    def test_weights_and_their_names_are_left_alone(self):
        model, plain = tiny_bert(), tiny_bert()
        key_dropout(model, DropoutKeys(0))
        for (name, one), (other_name, other) in zip(
            model.state_dict().items(), plain.state_dict().items(), strict=True
        ):
            assert name == other_name
            assert torch.equal(one, other)

    def test_every_attention_module_has_a_site_of_its_own(self):
        model = tiny_bert()
        key_dropout(model, DropoutKeys(0))
        names = [site_of(layer.attention.self).name for layer in model.bert.encoder.layer]
        assert names == [f"bert.encoder.layer.{index}.attention.self.attention" for index in range(2)]

    def test_draws_nothing_from_torchs_generator_and_repeats_itself(self):
        model, keys = tiny_bert(), DropoutKeys(0)
        key_dropout(model, keys)
        state = torch.get_rng_state()
        one = logits(model, keys)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(one, logits(model, keys))
        assert not torch.equal(one, logits(model, keys, step=1))
        assert not torch.equal(one, logits(model, keys, rows=(0, 2)))

    def test_layers_that_share_their_modules_draw_different_masks(self):
        """ALBERT calls one layer twice."""
        model, keys = tiny("albert", embedding_size=8, hidden_dropout_prob=0.5, **LAYERS), DropoutKeys(0)
        key_dropout(model, keys)
        drawn: dict[str, list[torch.Tensor]] = {}
        row_keys = keys.row_keys

        def watch(site, *args):
            drawn.setdefault(site, []).append(row_keys(site, *args))
            return drawn[site][-1]

        keys.row_keys = watch
        logits(model, keys)
        shared = [of_calls for of_calls in drawn.values() if len(of_calls) == 2]
        assert shared
        assert all((one != other).all() for one, other in shared)

    @pytest.mark.parametrize("module", [nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)])
    def test_another_kind_of_dropout_is_refused(self, module):
        with pytest.raises(UsageError, match=rf"inner\.drop is a {type(module).__name__}.*layout_invariant_dropout"):
            key_dropout(nn.ModuleDict({"inner": nn.ModuleDict({"drop": module})}), DropoutKeys(0))

    def test_dropping_whole_layers_is_refused(self):
        model = tiny("opt", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, layerdrop=0.1)
        with pytest.raises(UsageError, match=r"layerdrop.*layout_invariant_dropout"):
            key_dropout(model, DropoutKeys(0))

    def test_a_dropout_of_positions_instead_of_rows_is_refused(self):
        keys = DropoutKeys(0)
        model = tiny("deberta", **LAYERS, relative_attention=True, pos_att_type=["p2c", "c2p"])
        key_dropout(model, keys)
        with pytest.raises(UsageError, match=r"pos_dropout.*layout_invariant_dropout"):
            logits(model, keys)

    @pytest.mark.parametrize("rows", [(0,), (1,), (1, 0)])
    def test_dropout_of_shared_tensors_is_equal_in_all_microbatches_of_a_step(self, rows):
        """DeBERTa drops embeddings of positions, `[2 * buckets, hidden]`, which have no batch."""
        keys = DropoutKeys(0)
        model = tiny(
            "deberta-v2", **LAYERS, relative_attention=True, position_buckets=2, pos_att_type=["p2c", "c2p"],
            hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        key_dropout(model, keys)
        shared = [
            module.site for module in model.modules() if getattr(module, "site", None) and module.site.shared_from == 0
        ]
        assert [site.name.rsplit(".", 1)[1] for site in shared] == ["pos_dropout"] * 2
        whole = logits(model, keys)
        ids = IDS[list(rows)]
        with keys.use(MicrobatchKey(0, torch.tensor(rows))):
            found = model(input_ids=ids, attention_mask=(ids > 0).long()).logits
        torch.testing.assert_close(found, whole[list(rows)])


QKV = torch.randn(2, 2, 4, 8)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.1)
IN_EVALUATION = nn.MultiheadAttention(8, 2, dropout=0.1).eval()


class TestRefuseUnkeyedDropout:
    def test_a_model_that_calls_torchs_function(self):
        keys = DropoutKeys(0)
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        model = tiny("mbart", d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
        key_dropout(model, keys)
        with pytest.raises(UsageError, match=r"torch's dropout directly.*layout_invariant_dropout"):
            logits(model, keys)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: F.dropout(QKV),
            lambda: F.dropout(QKV, 0.1),
            lambda: F.dropout(QKV, p=0.1, training=True),
            lambda: F.alpha_dropout(QKV, 0.1, True),
            lambda: torch.dropout(QKV, 0.1, True),
            lambda: nn.Dropout(0.1)(QKV),
            lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, None, 0.1),
            lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, dropout_p=0.1),
            lambda: ATTENTION(QKV[0], QKV[0], QKV[0]),
        ],
    )
    def test_refuses(self, call):
        with RefuseUnkeyedDropout(), pytest.raises(UsageError, match="cannot be keyed"):
            call()
        call()

    @pytest.mark.parametrize(
        "call",
        [
            lambda: F.dropout(QKV, 0.0),
            lambda: F.dropout(QKV, 0.5, False),
            lambda: F.dropout(QKV, p=0.5, training=False),
            lambda: torch.dropout(QKV, 0.5, False),
            lambda: nn.Dropout(0.5).eval()(QKV),
            lambda: F.scaled_dot_product_attention(QKV, QKV, QKV),
            lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, None, 0.0),
            lambda: IN_EVALUATION(QKV[0], QKV[0], QKV[0]),
        ],
    )
    def test_accepts_modules_that_drop_nothing(self, call):
        with RefuseUnkeyedDropout():
            call()

    @pytest.mark.parametrize(
        "draw", [lambda: torch.rand(2), lambda: torch.empty(2).uniform_(), lambda: torch.randint(3, (2,))]
    )
    def test_refuses_any_other_draw(self, draw):
        message = r"^model type 'a' draws random numbers.*layout_invariant_dropout"
        with pytest.raises(UsageError, match=message), RefuseUnkeyedDropout("model type 'a'"):
            draw()

    def test_a_scalar_draw_leaves_the_generator_as_it_was(self):
        """Transformers draws one for each layer even where `layerdrop` is 0."""
        state = torch.get_rng_state()
        with RefuseUnkeyedDropout():
            torch.rand([])
        assert torch.equal(state, torch.get_rng_state())


class TestSetProbabilities:
    @pytest.mark.parametrize(
        ("model_type", "keys"),
        [
            ("bert", ["hidden_dropout_prob", "attention_probs_dropout_prob"]),
            ("distilbert", ["dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"]),
            ("gpt2", ["resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"]),
            ("t5", ["dropout_rate", "classifier_dropout"]),
            ("modernbert", ["attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"]),
        ],
    )
    def test_finds_every_probability(self, model_type, keys):
        config = AutoConfig.for_model(model_type)
        assert sorted(set_probabilities(config, 0.25)) == sorted(keys)
        assert all(getattr(config, key) == 0.25 for key in keys)

    def test_reaches_every_dropout_of_the_model(self):
        config = AutoConfig.for_model(**{**TINY_BERT, "classifier_dropout": 0.3})
        set_probabilities(config, 0.25)
        model = AutoModelForSequenceClassification.from_config(config)
        assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}

    def test_leaves_flags_and_unset_probabilities_alone(self):
        config = AutoConfig.for_model(**TINY_BERT)
        config.use_dropout_schedule = True
        set_probabilities(config, 0.25)
        assert config.use_dropout_schedule is True
        assert config.classifier_dropout is None

    def test_a_model_without_dropout_is_refused(self):
        with pytest.raises(UsageError, match=r"`model.dropout` is 0.1, but a mamba .* leave it null"):
            set_probabilities(AutoConfig.for_model("mamba"), 0.1)
