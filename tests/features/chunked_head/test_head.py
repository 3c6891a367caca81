"""The head of a language model that computes losses of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.training import TINY_TASKS, build_tiny, tiny_recipe
from trainer.base.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.training.run_parts import notes_of

LLAMA = TINY_TASKS["causal_lm"].model
GEMMA = {"tokenizer": "none", "config": {**LLAMA["config"], "model_type": "gemma2", "head_dim": 8}}
HEAD_ADAPTER = {**LLAMA, "adapter": {"type": "lora", "targets": ["lm_head"]}}


def built(task: str, chunk: Any, model: dict[str, Any] | None = None, **keys: Any) -> Any:
    tiny = TINY_TASKS[task]
    section = {**tiny.keys, "metrics": ["accuracy", "perplexity"], "logits_chunk": chunk}
    if task.startswith("preference"):
        del section["metrics"]
    return build_tiny(tiny_recipe(task=section, model=model or tiny.model, **keys))


@contextmanager
def products_of(training: Any) -> Iterator[list[int]]:
    """List the rows of each product with the weight of the head in this context."""
    head, rows, matrix = training.model.get_output_embeddings(), [], nn.functional.linear

    def spied(inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        if weight.shape == head.weight.shape:
            rows.append(inputs.flatten(0, -2).shape[0])
        return matrix(inputs, weight, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", spied)
        yield rows


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "seq2seq_lm"])
def test_evaluations_in_chunks_equal_whole_logits(task: str):
    whole, chunks = built(task, None), built(task, 7)
    microbatch = next(iter(whole.loader)).microbatches[0]
    expected = whole.engine.eval_step(microbatch)
    with products_of(chunks) as rows:
        found = chunks.engine.eval_step(microbatch)
    assert len(rows) > 1
    assert max(rows) == 7
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert found.predictions["num_right"].equal(expected.predictions["num_right"])
    torch.testing.assert_close(found.predictions["losses"], expected.predictions["losses"], rtol=1e-6, atol=1e-6)


_AHEAD, _AGAIN = "with loss and gradient in the forward pass", "in the forward pass and again in the backward pass"
WAYS: dict[str, tuple[str, Any, dict[str, Any], int, str]] = {
    "whole": ("causal_lm", "auto", {}, 1, "and their gradient takes their place"),
    "chunks": ("causal_lm", 7, {}, 1, f"7 tokens at a time, .*, {_AHEAD}"),
    "fp16": ("causal_lm", 7, {"precision": "fp16"}, 2, f"7 tokens at a time, .*, {_AGAIN}"),
    "preferences": ("preference_orpo", 7, {}, 2, f"7 tokens at a time, .*, {_AGAIN}"),
    "null": ("causal_lm", None, {}, 1, ""),
    "gemma2": ("causal_lm", "auto", {"model": GEMMA}, 1, "whole and copied in fp32, because a model of type gemma2"),
}
"""The task, the chunk, the keys, the passes that compute logits, and the words of the note."""


@pytest.mark.parametrize("name", WAYS)
def test_a_note_tells_the_way_that_is_taken(name: str):
    task, chunk, keys, passes, words = WAYS[name]
    training = built(task, chunk, **keys)
    notes = [note for note in notes_of(training.parts) if "logits" in note]
    assert len(notes) == bool(words)
    assert all(re.search(words, note) for note in notes)
    batch = next(iter(training.loader))
    with products_of(training) as rows:
        training.engine.train_step(batch)
    labelled = sum(one.labels.numel() for one in batch.microbatches)
    assert (max(rows) <= 7) == (chunk == 7)
    assert sum(rows) / labelled == pytest.approx(passes, rel=0.3)


def test_tokens_without_a_label_have_no_logits():
    training = built("masked_lm", "auto")
    (microbatch,) = next(iter(training.loader)).microbatches
    with products_of(training) as rows:
        training.engine.eval_step(microbatch)
    assert rows == [64]
    assert microbatch.labels.numel() > 64 >= int((microbatch.labels != IGNORED_LABEL).sum())


@pytest.mark.parametrize(("model", "why"), [(GEMMA, "of type gemma2"), (HEAD_ADAPTER, "an adapter")])
def test_models_that_change_their_logits_keep_them_whole(model: dict[str, Any], why: str):
    with pytest.raises(UsageError, match=f"`task.logits_chunk` is a number, .*{why}"):
        built("causal_lm", 7, model)
    auto, whole = built("causal_lm", "auto", model), built("causal_lm", None, model)
    batch = next(iter(whole.loader))
    assert auto.engine.train_step(batch).loss == whole.engine.train_step(batch).loss


@pytest.mark.parametrize("model_type", ["bert", pytest.param("modernbert", marks=pytest.mark.nightly)])
def test_the_transform_of_a_masked_model_gets_labelled_tokens_only(model_type: str):
    tiny = TINY_TASKS["masked_lm"]
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    special = dict.fromkeys(names, 0) if model_type == "modernbert" else {}
    model = {**tiny.model, "config": {**tiny.model["config"], "model_type": model_type, **special}}
    sizes = {"max_steps": 1, "global_batch_size": 32, "micro_batch_size": 32}
    keys = {"optimizer": {"name": "sgd", "learning_rate": 1.0}, "training": sizes}
    seen: dict[str, int] = {}
    updated = []
    for name, chunk in {"whole": None, "labelled": "auto"}.items():
        training = built("masked_lm", chunk, model, **keys)
        first = training.model.get_submodule({"bert": "cls.predictions.transform", "modernbert": "head"}[model_type])
        first.dense.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].flatten(0, -2).shape[0]})
        )
        batch = next(iter(training.loader))
        training.engine.train_step(batch)
        updated.append({name: tensor.detach().clone() for name, tensor in training.model.named_parameters()})
    num_labels = int((batch.microbatches[0].labels != IGNORED_LABEL).sum())
    assert seen["whole"] == batch.microbatches[0].labels.numel() > 64
    assert seen["labelled"] == -(-num_labels // 64) * 64 < seen["whole"]
    for name, tensor in updated[0].items():
        torch.testing.assert_close(updated[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
