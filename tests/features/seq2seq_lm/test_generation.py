"""Generated texts depend neither on the ranks nor on the batch size nor on the padding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BART, TINY_T5, TINY_TASKS, TinyTraining, tiny_recipe, tiny_training
from trainer.base.errors import UsageError
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch

NUM_ROWS, MOST_TOKENS, END = 11, 9, 126
GREEDY, BEAMS = {"num_beams": 1}, {"num_beams": 3, "length_penalty": 0.5}
MODEL = {"config": {**TINY_T5, "eos_token_id": END, "initializer_factor": 3.0}}  # a token that it generates
Texts = dict[int, list[int]]
tiny_targets = TINY_TASKS["seq2seq_lm"].split


def recipe_of(generation: dict[str, Any], **sections: Any):
    keys = {"max_new_tokens": MOST_TOKENS, **generation}
    return tiny_recipe(
        task={"type": "seq2seq_lm", "metrics": ["rouge1"], "generation": keys},
        training={"max_steps": 40, "micro_batch_size": 4},
        model=MODEL,
        **sections,
    )


def evaluate(training: TinyTraining, batch_size: int, multiple_of: int = 1) -> Texts:
    """Return the generated tokens of this rank's rows."""
    mesh, padding = training.mesh, Padding(0, multiple_of=multiple_of)
    found: Texts = {}
    for microbatch in EvalLoader(tiny_targets(NUM_ROWS), batch_size, mesh.index("dp"), mesh.size("dp"), padding):
        tokens = training.engine.eval_step(microbatch).predictions.get("generated")
        if tokens is not None:
            for row, of_row in zip(microbatch.rows.tolist(), tokens.tolist(), strict=True):
                found[row] = [token for token in of_row if token != IGNORED_LABEL]
    return found


def generated(batch_size: int, generation: dict[str, Any], multiple_of: int = 1, **sections: Any) -> tuple[Texts, ...]:
    """Return the texts of this rank's rows before a step of training and after it."""
    with tiny_training(recipe_of(generation, **sections)) as training:
        before = evaluate(training, batch_size, multiple_of)
        training.steps(1)
        return before, evaluate(training, batch_size, multiple_of)


def by_hand(model: Any, microbatch: Microbatch) -> list[int]:
    """Return the most probable tokens of one row, each from a whole forward pass without a cache."""
    tokens = [0]
    while len(tokens) <= MOST_TOKENS and tokens[-1] != END:
        inputs: dict[str, Tensor] = {**microbatch.inputs, "decoder_input_ids": torch.tensor([tokens])}
        tokens.append(int(model(**inputs).logits[0, -1].argmax()))
    return [token for token in tokens[1:] if token != END]


@cache
def alone(beams: bool) -> tuple[Texts, ...]:
    return generated(1, BEAMS if beams else GREEDY)


@torch.no_grad()
def test_greedy_tokens_equal_single_forward_passes():
    with tiny_training(recipe_of(GREEDY)) as training:
        found = evaluate(training, 4)
        expected = {
            int(microbatch.rows): by_hand(training.model, microbatch)
            for microbatch in EvalLoader(tiny_targets(NUM_ROWS), 1, 0, 1, Padding(0))
        }
    assert found == expected
    lengths = {len(tokens) for tokens in found.values()}
    assert {0, MOST_TOKENS} <= lengths, "texts end at different places"


def test_beams_find_other_texts():
    assert alone(True)[0] != alone(False)[0] != alone(False)[1]


@pytest.mark.parametrize("beams", [False, True], ids=["greedy", "beams"])
def test_batch_size_and_padding_change_no_text(beams):
    assert generated(4, BEAMS if beams else GREEDY, multiple_of=16) == alone(beams)


@pytest.mark.parametrize(
    ("world_size", "parallel", "beams"),
    [
        pytest.param(3, {"strategy": "ddp"}, True, marks=pytest.mark.slow),
        (2, {"strategy": "fsdp"}, True),
        pytest.param(3, {"strategy": "fsdp"}, False, marks=pytest.mark.nightly),
        pytest.param(2, {"strategy": "zero1"}, False, marks=pytest.mark.nightly),
        pytest.param(2, {"strategy": "zero3"}, True, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "ddp", "tensor": 2}, True, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "ddp", "tensor": 2, "sequence": True}, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.get("strategy") + "+tensor" * ("tensor" in value) if isinstance(value, dict) else None,
)
def test_ranks_change_no_text(ranks: RankPools, world_size, parallel, beams):
    """Ranks have different numbers of rows and of tokens, and one has only fillers at the end."""
    answers = ranks(world_size).run(generated, 2, BEAMS if beams else GREEDY, parallel=parallel)
    for moment, expected in enumerate(alone(beams)):
        found = [answer[moment] for answer in answers]
        assert {row: text for texts in found for row, text in texts.items()} == expected
        if "tensor" in parallel:
            assert all(texts == expected for texts in found)


class Waits(TorchDispatchMode):
    """Counts values that the host reads and tensors that it makes from numbers; a host waits for a GPU in each."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("generation", [GREEDY, BEAMS, {"do_sample": True}], ids=["greedy", "beams", "sampled"])
@pytest.mark.parametrize("model", [TINY_T5, TINY_BART], ids=["t5", "bart"])
def test_the_host_waits_once_for_each_token(generation, model):
    """Whether all texts have ended; masks and draws of a token cause no further wait."""
    found = []
    for tokens in (4, 9):
        recipe = recipe_of({**generation, "max_new_tokens": tokens, "min_new_tokens": tokens})
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": model})})
        with tiny_training(recipe) as training:
            (microbatch,) = EvalLoader(tiny_targets(3), 3, 0, 1, Padding(0))
            with Waits() as waits:
                tokens_of_rows = training.engine.eval_step(microbatch).predictions["generated"]
        assert tokens_of_rows.shape == (3, tokens)
        found.append(waits.num)
    assert found[1] - found[0] == 9 - 4


def bart(**parallel: Any) -> tuple[list[float], list[Texts]]:
    """Return the losses of two steps, and the texts of this rank's rows after them."""
    recipe = recipe_of(BEAMS, parallel=parallel)
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"config": {**TINY_BART, "init_std": 0.5}})},
    )
    with tiny_training(recipe) as training:
        losses = [result.loss for result in training.steps(2)]
        return losses, [evaluate(training, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"strategy": "fsdp"}, {"strategy": "ddp", "tensor": 2, "sequence": True}])
def test_bart_is_the_same_in_parts(ranks: RankPools, parallel):
    losses, (texts,) = bart(strategy="ddp")
    assert len({tuple(text) for text in texts.values()}) > 1
    answers = ranks(2).run(bart, **parallel)
    assert all(found == pytest.approx(losses, rel=1e-5) for found, _ in answers)
    assert {row: text for _, (found,) in answers for row, text in found.items()} == texts


def refused_by_stages() -> str:
    with pytest.raises(UsageError) as raised, tiny_training(recipe_of(GREEDY, parallel={"pipeline": {"stages": 2}})):
        pass
    return str(raised.value)


def test_stages_generate_no_text(ranks: RankPools):
    assert all("a rank needs the whole model" in text for text in ranks(2).run(refused_by_stages))
