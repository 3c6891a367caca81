"""The attention function against transformers' own, forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

from tests.helpers.reads import NoReads
from trainer.base.errors import UsageError
from trainer.models.attention import KEYED_ATTENTION, keyed_attention, padding_known
from trainer.models.dropout import key_dropout, set_probabilities
from trainer.parallel.dropout import DropoutKeys, DropoutSite, MicrobatchKey
from trainer.parallel.microbatch import has_padding, hidden_positions
from trainer.parallel.random import quantised

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 6, 8
ROWS = torch.tensor([5, 3])
LOWEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """What an attention function reads of the module that calls it."""

    def __init__(self, is_causal: bool = False, groups: int = 1) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_key_value_groups = groups


def qkv(key_value_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, key_value_heads, key_value_heads)
    return [
        torch.randn(BATCH, number, LENGTH, HEAD_DIM, generator=generator, dtype=dtype).requires_grad_()
        for number in heads
    ]


def keyed_module(keys: DropoutKeys, **options) -> nn.Module:
    model = nn.ModuleDict({"attention": Attention(**options)})
    key_dropout(model, keys)
    return model["attention"]


def padding(kind: str) -> torch.Tensor | None:
    """The second row has two tokens of padding."""
    visible = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    visible[1, ..., 4:] = False
    if kind == "boolean":
        return visible
    return torch.zeros(visible.shape).masked_fill(~visible, LOWEST) if kind == "additive" else None


def run(function, module, tensors, mask, **options) -> list[torch.Tensor]:
    """The output `[batch, queries, heads, head_dim]` and the gradients of query, key and value."""
    output, _ = function(module, *tensors, mask, **options)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


def run_keyed(tensors, mask, dropout: float, **options) -> list[torch.Tensor]:
    keys = DropoutKeys(7)
    module = keyed_module(keys, **options)
    with keys.use(MicrobatchKey(2, ROWS)):
        return run(keyed_attention, module, tensors, mask, dropout=dropout)


class Fixed:
    """Puts the mask that the keyed function draws in place of the dropout of an eager attention function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules) -> None:
        for module in modules:
            monkeypatch.setattr(module.nn.functional, "dropout", self.drop)

    def drop(self, probabilities: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        assert training
        keys = DropoutKeys(7)
        with keys.use(MicrobatchKey(2, ROWS)):
            mask = DropoutSite(keys, "attention.attention").mask(probabilities.shape, p)
        return probabilities * mask / (1 - quantised(p))


@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
class TestAgainstBert:
    def test_without_dropout(self, kind):
        additive = padding("additive") if kind != "none" else None
        expected = run(modeling_bert.eager_attention_forward, Attention().eval(), qkv(), additive)
        torch.testing.assert_close(run(keyed_attention, Attention(), qkv(), padding(kind)), expected)

    def test_with_the_same_mask_of_dropout(self, kind, monkeypatch):
        found = run_keyed(qkv(), padding(kind), 0.3)
        Fixed(monkeypatch, modeling_bert)
        additive = padding("additive") if kind != "none" else None
        expected = run(modeling_bert.eager_attention_forward, Attention(), qkv(), additive, dropout=0.3)
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found[0], run(keyed_attention, Attention(), qkv(), padding(kind))[0])


class TestAgainstLlama:
    """Grouped queries: two heads of keys and values for four of queries; and a causal mask where none is given."""

    def causal(self) -> torch.Tensor:
        return torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, LOWEST)[None, None]

    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_causal_with_grouped_queries(self, dropout, monkeypatch):
        found = run_keyed(qkv(2), None, dropout, is_causal=True, groups=2)
        Fixed(monkeypatch, modeling_llama)
        options = {"scaling": HEAD_DIM**-0.5, "dropout": dropout}
        module = Attention(is_causal=True, groups=2).train(dropout > 0)
        if dropout == 0:
            monkeypatch.undo()
        expected = run(modeling_llama.eager_attention_forward, module, qkv(2), self.causal(), **options)
        torch.testing.assert_close(found, expected)

    def test_the_first_position_sees_only_itself(self):
        query, key, value = qkv()
        keys = DropoutKeys(7)
        with keys.use(MicrobatchKey(2, ROWS)):
            _, probabilities = keyed_attention(keyed_module(keys, is_causal=True), query, key, value, None, dropout=0.1)
        assert torch.equal(probabilities, probabilities.tril())
        assert torch.equal(probabilities[:, :, 0, 0], torch.ones(BATCH, HEADS))


class TestArguments:
    @pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["sdpa", "materialised"])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_position_bias_scaling_and_causality(self, dropout, causal, masked):
        """As T5 calls it; a dropout of 1e-9 drops nothing, and takes the other path."""
        bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
        mask = padding("boolean") if masked else None
        options = {"scaling": 0.7, "position_bias": bias, "is_causal": causal}
        keys = DropoutKeys(7)
        module = keyed_module(keys)
        with keys.use(MicrobatchKey(2, ROWS)):
            found = run(keyed_attention, module, qkv(), mask, dropout=dropout, **options)
        torch.testing.assert_close(found, run(sdpa_attention_forward, Attention(), qkv(), mask, **options))

    def test_a_query_that_may_look_nowhere_gives_no_nan(self):
        nowhere = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
        assert all(tensor.isfinite().all() for tensor in run_keyed(qkv(), nowhere, 0.3))

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
    def test_other_dtypes(self, dtype, tolerance):
        """fp64 is exact as fp64; bf16 takes its softmax in fp32."""
        found = run_keyed(qkv(dtype=dtype), None, 0.3)
        exact = run_keyed([t.detach().double().requires_grad_() for t in qkv(dtype=dtype)], None, 0.3)
        assert {tensor.dtype for tensor in found} == {dtype}
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("variant", ["softcap", "s_aux"])
    def test_a_variant_that_is_not_computed_is_refused(self, variant):
        keys = DropoutKeys(7)
        with pytest.raises(UsageError, match=rf"uses {variant}.*layout_invariant_dropout"):
            keyed_attention(keyed_module(keys), *qkv(), None, dropout=0.1, **{variant: 30.0})


SMALL = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0}
BERT_LIKE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32}
MODELS = {
    "bert": BERT_LIKE,
    "roberta": BERT_LIKE,
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "albert": {**BERT_LIKE, "embedding_size": 8},
    "modernbert": {**BERT_LIKE, "eos_token_id": 2, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2},
    "llama": {**BERT_LIKE, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "t5": {**T5, "eos_token_id": 1, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_whole_model_without_dropout_is_that_of_transformers(model_type):
    """Forward and backward, with padding."""
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 1], [5, 6, 7, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    }
    found = {}
    for attention, dropout in (("eager", 0.0), (KEYED_ATTENTION, 1e-9)):  # 1e-9 drops nothing, but is not zero
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SMALL, **MODELS[model_type])
        set_probabilities(config, dropout)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
        keys = DropoutKeys(0)
        key_dropout(model, keys)
        with keys.use(MicrobatchKey(0, torch.tensor([0, 1]))):
            logits = model.train()(**batch).logits
        logits.square().sum().backward()
        found[attention] = (logits, {name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[KEYED_ATTENTION], found["eager"])


def _is_of_trainer(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", None)).startswith("trainer.")


class TestMasks:
    @pytest.mark.parametrize("make", [create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask])
    @pytest.mark.parametrize("is_padded", [True, False])
    @pytest.mark.parametrize("name", [KEYED_ATTENTION, "sdpa"])
    def test_equal_transformers_without_a_read(self, monkeypatch, name, is_padded, make):
        config = AutoConfig.for_model("mistral", hidden_size=8, num_attention_heads=2, sliding_window=3)
        config._attn_implementation = name
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, 4:] = 1 - int(is_padded)
        inputs = {"attention_mask": mask, "inputs_embeds": torch.zeros(BATCH, LENGTH, 8), "past_key_values": None}
        with padding_known(has_padding(hidden_positions({"attention_mask": mask}))), NoReads():
            found = make(config, **inputs)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, sdpa_mask)
        expected = make(config, **inputs)
        if expected is None:
            assert found is None
        else:
            assert torch.equal(found, expected)

    def test_leave_functions_of_transformers_in_place(self):
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"]
        tables = [vars(module) for module in modules]
        classes = {value for table in tables for value in table.values() if isinstance(value, type)}
        tables += [{**vars(kind)} for kind in classes if kind.__module__.startswith("transformers.")]
        tables += [ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS]
        ours = {name for table in tables for name, value in table.items() if _is_of_trainer(value)}
        ours.discard("ImmutableSandboxedEnvironment")  # chats bound the time of templates in the whole process
        assert all(name.startswith("trainer_") for name in ours), ours
        with padding_known(True), padding_known(None):
            assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
