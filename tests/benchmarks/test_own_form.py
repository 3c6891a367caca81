"""The operations that stand for the kernels of ModernBERT's authors."""

from __future__ import annotations

from tests.benchmarks.gpu import MASKED, MODERN, SMALL
from tests.benchmarks.operations import Case, own_form

ROWS, LENGTH, LAYERS, WORDS = 4, 40, 3, 50368


def test_each_kernel_is_counted_once_with_the_bytes_that_it_moves():
    config = {**MODERN, **SMALL, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    keys = {
        "data": {"source": "files", "train": "none", "max_length": LENGTH, "padding_free": True},
        "task": {"type": "masked_lm", "text": "text", "mask_probability": MASKED},
    }
    found = own_form(Case("ModernBERT", config, "masked_lm", "bf16", rows=ROWS, length=LENGTH, keys=keys))
    tokens, heads = ROWS * LENGTH, SMALL["num_attention_heads"]
    states = tokens * SMALL["hidden_size"] * 2  # one of queries, keys and values, in bf16
    starts, log_sums = (ROWS + 1) * 4, heads * tokens * 4
    tables = 2 * LENGTH * SMALL["hidden_size"] // heads // 2 * 2  # of half of a head
    masked = round(tokens * MASKED)
    logits = masked * WORDS * 2
    expected = {
        # queries and keys, read and written, in each direction
        "rotate_": (2 * LAYERS, 2 * LAYERS * (4 * states + tables + starts)),
        "attention": (LAYERS, LAYERS * (4 * states + log_sums + starts)),
        "attention_backward": (LAYERS, LAYERS * (8 * states + log_sums + starts)),
        "cross_entropy": (1, logits + masked * (8 + 3 * 4)),
        "cross_entropy_backward": (1, 2 * logits + masked * (8 + 2 * 4)),
    }
    assert {name: (found.number[name], found.num_bytes[name]) for name in expected} == expected
    # The gradient of queries, keys and values is one tensor, so `cat` joins the halves of gated layers alone.
    assert found.number["cat"] == LAYERS
    # Three products of each linear layer, of which the logits add a bias: four in a layer, and two in the head.
    assert found.number["mm"] + found.number["addmm"] == 3 * (4 * LAYERS + 2)
    assert found.waits == 2  # for the number of masked words, which selects states and labels
