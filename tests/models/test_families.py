"""The table of families, and finding layers by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.families import CONFIGS, build
from tests.helpers.training import TINY_BERT
from trainer.base.errors import UsageError
from trainer.models.families import table
from trainer.models.families.family import ModelFamily, matches
from trainer.models.families.table import FAMILIES, family_of, layers_of
from trainer.models.tensor_split import split_model
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.row_groups import RowGroups

HEAD = {"vit": "AutoModelForImageClassification"}
NUM_LAYERS = {"albert": 1, "t5": 4, "bart": 4}  # of which are fewer than are called, or two stacks; the others have two


def model_of(config: dict[str, Any]) -> nn.Module:
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))


SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def causal_model_of(model_type: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL))


def renamed(layers: str) -> ModelFamily:
    """BERT, but for where its layers are."""
    return replace(FAMILIES["bert"], layers=layers)


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_are_found_in_order_and_are_all_of_the_model_that_repeats(family):
    model = build(family, HEAD.get(family, "AutoModelForSequenceClassification"), 0.0, DropoutKeys(0))
    layers = layers_of(model)
    assert len(layers) == NUM_LAYERS.get(family, 2)
    # An encoder comes before its decoder, and each counts its own.
    assert list(layers) == sorted(layers, key=lambda name: ("decoder." in name, int(name.rsplit(".", 1)[1])))
    # BART has a class for each of its stacks.
    assert len({type(layer) for layer in layers.values()}) == (2 if family == "bart" else 1)
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
    with pytest.raises(UsageError, match="'opt' is in no family"):
        split_model(model, RowGroups())


def test_a_pattern_that_matches_nothing_is_refused(monkeypatch):
    monkeypatch.setitem(table.FAMILIES, "bert", renamed("encoder.block.*"))
    with pytest.raises(
        UsageError, match=r"must name the layers of this model, but `encoder\.block\.\*` matches no module"
    ):
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


class TestPlansOfTransformers:
    """Architectures without a table of ours; that the parts compute what the whole does is in `test_tensor.py`."""

    def test_the_plan_with_embedding_and_head_is_split(self):
        plan = family_of(causal_model_of("olmo")).tensor
        assert set(plan.columns) == {
            f"layers.*.{name}"
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        }
        assert plan.rows == ("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj")
        assert "layers.*.self_attn" in plan.attention
        assert (plan.embeddings, plan.vocabulary_heads, plan.whole) == (("embed_tokens",), ("lm_head",), ())
        assert plan.heads == ("num_attention_heads", "num_key_value_heads")

    def test_a_head_around_the_base_model_is_whole(self):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("starcoder2", **SMALL))
        plan = family_of(model).tensor
        assert (plan.vocabulary_heads, plan.whole) == ((), ("score",))

    def test_a_table_of_ours_comes_first(self):
        assert family_of(causal_model_of("llama")) is FAMILIES["llama"]

    @pytest.mark.parametrize(
        ("model_type", "why"),
        [
            ("phi3", r"cuts `layers\.\*\.self_attn\.qkv_proj` by 'colwise_gather_output', but known are colwise"),
            ("glm4_moe", "by 'packed_colwise', but known are"),
            (
                "gpt_neox",
                "query_key_value` with 48 outputs, but the row after it has 16 inputs: it joins several matrices",
            ),
            ("apertus", "does not define the layout of `model.layers.0.mlp.act_fn`"),  # an activation with weights
        ],
    )
    def test_unsupported_blocks_are_refused_and_their_layers_known(self, model_type, why):
        model = causal_model_of(model_type)
        with pytest.raises(UsageError, match=why):
            split_model(model, RowGroups())
        assert list(layers_of(model)) == ["layers.0", "layers.1"]

    def test_a_parameter_that_the_plan_forgets_is_refused(self):
        """A norm of queries sees a rank's heads only: its gradient would be wrong in silence."""
        model = causal_model_of("olmo")
        model.get_submodule("model.layers.0.self_attn").q_norm = nn.LayerNorm(8)
        with pytest.raises(UsageError, match=r"does not define the layout of `model\.layers\.0\.self_attn\.q_norm`"):
            split_model(model, RowGroups())

    def test_a_matrix_that_the_plan_forgets_is_refused(self):
        model = causal_model_of("olmo")
        model.get_submodule("model.layers.0").adapter = nn.Linear(16, 16)
        with pytest.raises(
            UsageError, match=r"layers\.0\.adapter\.weight .* must be cut or named as whole by the family"
        ):
            split_model(model, RowGroups())

    def test_a_dropout_that_may_be_on_a_part_of_the_features_is_refused(self):
        model = causal_model_of("olmo")
        model.get_submodule("model.layers.0.mlp").drop = nn.Dropout(0.1)
        with pytest.raises(UsageError, match=r"dropout `model\.layers\.0\.mlp\.drop`.*set `model\.dropout` to 0"):
            split_model(model, RowGroups())
        model.get_submodule("model.layers.0.mlp").drop = nn.Dropout(0.0)
        split_model(model, RowGroups())

    def test_a_linear_layer_of_another_kind_is_refused(self):
        class Scaled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * 2

        model = causal_model_of("olmo")
        model.get_submodule("model.layers.0.mlp").up_proj = Scaled(16, 32, bias=False)
        with pytest.raises(UsageError, match=r"`model\.layers\.0\.mlp\.up_proj`, which is a Scaled"):
            split_model(model, RowGroups())
