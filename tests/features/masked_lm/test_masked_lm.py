from __future__ import annotations

import math

import datasets
import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.helpers.training import TINY_BERT, VOCABULARY
from trainer.base.errors import DataError
from trainer.features.masked_lm.section import MaskedLM
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.registry import build_task

WHERE = "`rows.jsonl`"


def task_of(**keys):
    return build_task(MaskedLM(type="masked_lm", **{"text": "text", **keys}))


def some_labels(rows=4, length=9):
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    labels[:, ::2] = IGNORED_LABEL
    labels[1] = IGNORED_LABEL  # a row in which nothing was chosen
    return labels


def test_rows_are_tokens_without_labels(tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["a file", "another"], "other": ["x", "y"]})
    encoded = task_of().resolve(rows, WHERE).encode(rows, tokenizer, 16, WHERE, 0)
    assert encoded["input_ids"] == tokenizer(["a file", "another"])["input_ids"]
    assert "labels" not in encoded
    pair = task_of(text=["text", "other"])
    assert pair.columns == ("text", "other")
    assert (
        pair.encode(rows, tokenizer, 16, WHERE, 0)["input_ids"]
        == tokenizer(["a file", "another"], ["x", "y"])["input_ids"]
    )


def test_a_missing_column():
    rows = datasets.Dataset.from_dict({"body": ["a"]})
    with pytest.raises(DataError, match=r"`task.text` names the column `text`, .* columns are `body`"):
        task_of().resolve(rows, WHERE)


def test_the_probability_changes_nothing_that_is_cached():
    assert task_of(mask_probability=0.3).fingerprint == task_of().fingerprint != task_of(text="body").fingerprint


def test_the_loss_is_that_of_transformers():
    """Its mean over the same labels, times their number; the gradient too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.for_model(**TINY_BERT)).eval()
    ids, labels = torch.randint(5, VOCABULARY, (4, 9)), some_labels()
    task = task_of()
    output = model(input_ids=ids, labels=labels)
    loss = task.loss_sum(output.logits, labels)
    num_valid = task.num_valid(labels)
    assert num_valid == (labels >= 0).sum()
    assert num_valid.dtype == torch.int64
    torch.testing.assert_close(loss / num_valid, output.loss)
    (one,) = torch.autograd.grad(loss / num_valid, output.logits, retain_graph=True)
    (other,) = torch.autograd.grad(output.loss, output.logits)
    torch.testing.assert_close(one, other)


def test_the_loss_is_a_sum_in_float32():
    logits, labels = torch.randn(4, 9, VOCABULARY, dtype=torch.bfloat16), some_labels()
    loss = task_of().loss_sum(logits, labels)
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_nothing_chosen_is_a_loss_of_zero_with_a_gradient_of_zero():
    logits = torch.randn(2, 3, VOCABULARY, requires_grad=True)
    loss = task_of().loss_sum(logits, torch.full((2, 3), IGNORED_LABEL))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()
    metrics = task_of(metrics=["accuracy", "perplexity"])
    assert metrics.metrics(metrics.predictions(logits.detach(), torch.full((2, 3), IGNORED_LABEL))) == {
        "accuracy": 0.0,
        "perplexity": 1.0,
    }


def test_metrics_count_chosen_tokens_not_rows():
    task = task_of(metrics=["perplexity", "accuracy"])
    logits, labels = torch.randn(4, 9, VOCABULARY), some_labels()
    logits.scatter_(-1, labels.clamp(min=0).unsqueeze(-1)[::2], 9.0)  # some are right
    pieces = [task.predictions(logits[part], labels[part]) for part in torch.arange(4).split(3)]
    assert all(
        len(piece["num_right"]) == len(piece["losses"]) == rows for piece, rows in zip(pieces, (3, 1), strict=True)
    )
    metrics = task.metrics({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})
    valid = labels != IGNORED_LABEL
    assert list(metrics) == ["perplexity", "accuracy"]
    assert metrics["accuracy"] == pytest.approx((logits.argmax(-1)[valid] == labels[valid]).double().mean().item())
    assert 0 < metrics["accuracy"] < 1
    assert metrics["perplexity"] == pytest.approx(math.exp(F.cross_entropy(logits[valid], labels[valid])), rel=1e-6)


def test_losses_of_rows_are_computed_for_the_perplexity_alone():
    assert "losses" not in task_of().predictions(torch.randn(4, 9, VOCABULARY), some_labels())
