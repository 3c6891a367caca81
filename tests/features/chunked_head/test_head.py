"""The head of a language model that computes losses in blocks of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.training import TINY_TASKS, build_tiny, tiny_recipe
from trainer.base.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL

LLAMA = TINY_TASKS["causal_lm"].model
GEMMA = {"tokenizer": "none", "config": {**LLAMA["config"], "model_type": "gemma2", "head_dim": 8}}
HEAD_ADAPTER = {**LLAMA, "adapter": {"type": "lora", "targets": ["lm_head"]}}


def built(task: str, chunk: Any, model: dict[str, Any] | None = None, **keys: Any) -> Any:
    tiny = TINY_TASKS[task]
    section = {**tiny.keys, "metrics": ["accuracy", "perplexity"], "vocabulary_chunk": chunk}
    return build_tiny(tiny_recipe(task=section, model=model or tiny.model, **keys))


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "seq2seq_lm"])
def test_evaluations_in_blocks_equal_whole_logits(task: str):
    whole, blocks = built(task, None), built(task, 7)
    widths, matrix = [], nn.functional.linear

    def spied(inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.append(len(weight))
        return matrix(inputs, weight, *others)

    microbatch = next(iter(whole.loader)).microbatches[0]
    expected = whole.engine.eval_step(microbatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", spied)
        found = blocks.engine.eval_step(microbatch)
    vocabulary = len(blocks.model.get_output_embeddings().weight)
    assert widths.count(7) == vocabulary // 7
    assert vocabulary not in widths
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert found.predictions["num_right"].equal(expected.predictions["num_right"])
    torch.testing.assert_close(found.predictions["losses"], expected.predictions["losses"], rtol=1e-6, atol=1e-6)


def test_tokens_without_a_label_have_no_logits():
    training = built("masked_lm", "auto")
    (microbatch,) = next(iter(training.loader)).microbatches
    head, rows = training.model.get_output_embeddings(), []
    matrix = nn.functional.linear

    def spied(inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(weight) == len(head.weight):
            rows.append(inputs.shape[0])
        return matrix(inputs, weight, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", spied)
        training.engine.eval_step(microbatch)
    assert rows == [64]
    assert microbatch.labels.numel() > 64 >= int((microbatch.labels != IGNORED_LABEL).sum())


@pytest.mark.parametrize(("model", "why"), [(GEMMA, "of type gemma2"), (HEAD_ADAPTER, "an adapter")])
def test_models_that_change_their_logits_keep_them_whole(model: dict[str, Any], why: str):
    with pytest.raises(UsageError, match=f"`task.vocabulary_chunk` is a number, .*{why}"):
        built("causal_lm", 7, model)
    auto, whole = built("causal_lm", "auto", model), built("causal_lm", None, model)
    batch = next(iter(whole.loader))
    assert auto.engine.train_step(batch).loss == whole.engine.train_step(batch).loss
