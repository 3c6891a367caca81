"""Padded rows without dropout: torch's variable-length attention beside SDPA with a mask, and masks that stay."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, masking_utils

from tests.helpers.reads import NoReads
from tests.models.test_attention import MODELS, SMALL
from tests.parallel.test_varlen import torchs
from trainer.models.attention import KEYED_ATTENTION, keyed_attention, padding_known
from trainer.models.dropout import key_dropout, set_probabilities
from trainer.models.padded_attention import PaddedRows, rows_of
from trainer.parallel import varlen
from trainer.parallel.dropout import DropoutKeys

LENGTH = 6
RIGHT = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]
LEFT = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
WHOLE = [[1, 1, 1, 1, 1, 1]] * 3
WINDOWED = {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 4}
FAMILIES = {
    **{name: (name, options) for name, options in MODELS.items() if name != "t5"},
    "modernbert, window": ("modernbert", MODELS["modernbert"] | WINDOWED),
    "mistral, window": ("mistral", MODELS["llama"] | {"sliding_window": 3}),
}


@pytest.fixture
def torch_reads_rows(monkeypatch) -> mock.Mock:
    """Let a loop over rows compute torch's variable-length attention on this machine, and return it."""
    loop = mock.Mock(side_effect=torchs)
    monkeypatch.setattr(varlen, "varlen_attn", loop)
    for name in ("obstacle", "obstacle_of_device"):
        monkeypatch.setattr(varlen, name, lambda *_: None)
    return loop


def outputs(family: str, tokens: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The last hidden states of the tokens of a model without dropout, and the gradients of its weights."""
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL, **options)
    set_probabilities(config, 0.0)
    model = AutoModel.from_config(config, attn_implementation=KEYED_ATTENTION)
    key_dropout(model, DropoutKeys(0))
    mask = torch.tensor(tokens)
    ids = torch.arange(5, 5 + mask.numel()).view_as(mask)
    with padding_known(bool((mask == 0).any())), NoReads():
        hidden = model.train()(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden = hidden * mask.unsqueeze(-1)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        *[(family, RIGHT) for family in FAMILIES],
        ("bert", LEFT),
        ("mistral, window", LEFT),
        ("modernbert, window", WHOLE),
        ("mistral, window", WHOLE),
    ],
)
def test_a_model_with_padding_or_a_window_passes_no_mask(family, tokens, torch_reads_rows, monkeypatch):
    """Each layer whose mask hides something calls torch's variable-length attention, and the host reads nothing."""
    found = outputs(family, tokens)
    layers = MODELS["bert"]["num_hidden_layers"]
    if family == "modernbert, window":
        layers = 2 if tokens is WHOLE else 3
    assert torch_reads_rows.call_count == layers
    monkeypatch.setattr(varlen, "obstacle_of_device", lambda _: "the test wants a mask")
    expected = outputs(family, tokens)
    assert torch_reads_rows.call_count == layers
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_between_tokens_is_refused(torch_reads_rows):
    with pytest.raises(RuntimeError, match="padding between its tokens"):
        outputs("bert", [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def _options(function: Any, **changed: Any) -> dict[str, Any]:
    sizes = {"q_length": LENGTH, "kv_length": LENGTH, "local_size": None}
    return {**sizes, "mask_function": function, **changed}


def test_other_masks_stay():
    """Packed rows, chunks, further conditions, and queries that are no keys."""
    tokens, ids = torch.ones(2, LENGTH, dtype=torch.bool), torch.zeros(2, LENGTH, dtype=torch.int64)
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    assert rows_of(tokens, _options(causal)) is not None
    packed = masking_utils.packed_sequence_compatibility_function(causal, ids, ids)
    chunks = masking_utils.chunked_causal_mask_function(3, ids[:, 0])
    joined = masking_utils.or_masks(causal, both)
    for function in (packed, chunks, joined, masking_utils.and_masks(both, packed), lambda *_: True):
        assert rows_of(tokens, _options(function, local_size=3)) is None
    assert rows_of(tokens, _options(both, q_length=3)) is None
    assert rows_of(tokens, _options(causal, q_offset=1)) is None
    assert rows_of(tokens[:, :4], _options(causal)) is None


@pytest.mark.parametrize("model_type", ["bart", "bert"])
def test_attention_to_an_encoder_keeps_its_mask(model_type):
    """Its mask may look like that of attention inside of rows, if both have one length."""
    config = AutoConfig.for_model(model_type)
    config.add_cross_attention = model_type == "bert"
    tokens = torch.ones(2, LENGTH, dtype=torch.bool)
    assert rows_of(tokens, _options(masking_utils.bidirectional_mask_function, config=config)) is None
    assert rows_of(tokens, _options(masking_utils.causal_mask_function, config=config)) is not None


def test_a_bias_and_dropout_keep_their_masks(torch_reads_rows):
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask.padded_rows = PaddedRows(None, False, None)
    states = torch.randn(3, 2, 1, LENGTH, 8)
    keyed_attention(nn.Module(), *states, mask, position_bias=torch.zeros(1, 1, LENGTH, LENGTH))
    keyed_attention(nn.Module(), *states, mask, dropout=0.1)
    torch_reads_rows.assert_not_called()
    keyed_attention(nn.Module(), *states, mask)
    torch_reads_rows.assert_called_once()


def test_a_compiled_layer_calls_it_too(torch_reads_rows, monkeypatch):
    """Without a graph break; each graph finds the rows itself."""
    monkeypatch.setattr(varlen, "varlen_attn", torch.library.custom_op("tests::rows", mutates_args=())(_rows))
    torch.library.register_fake("tests::rows", lambda query, *_, **__: torch.empty_like(query))
    tokens = torch.tensor(RIGHT[:2], dtype=torch.bool)
    mask = tokens[:, None, None].expand(2, 1, LENGTH, LENGTH)
    mask.padded_rows = PaddedRows(tokens, False, None)
    states = torch.randn(3, 2, 1, LENGTH, 8)

    def attend(states: Tensor) -> Tensor:
        return keyed_attention(nn.Module(), *states, mask)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(states), attend(states))


def _rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor, longest: int, most: int, scale: float,
    window_size: list[int],
) -> Tensor:  # fmt: skip
    found = torchs(query, key, value, starts, ends, longest, most, scale=scale, window_size=tuple(window_size))
    return found.contiguous()
