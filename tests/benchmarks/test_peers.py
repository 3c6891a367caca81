"""Losses of the peers' loops, for every task that they train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks.gpu import BASE, MASKED_WORDS, MODERN, Case, random_batches, shrunk
from tests.benchmarks.peers import PEERS, FlatBatches, PeerTraining, name_ranks, with_torchs_dropout
from tests.helpers.ranks import RankPools
from trainer.models.fill import build_model
from trainer.models.place import PlacedModel
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch, RankBatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.plan.simulated_step import planned_model, planned_task
from trainer.training.assembly import assemble, train_batches
from trainer.training.describing import describe_model
from trainer.training.process_group import open_mesh
from trainer.training.run_data import prepare_data

STEPS = 2
IN_CI = ("bert_sample_mlm", "qa_sample")
SAMPLES = (*IN_CI, "ner_sample", "choice_sample", "gpt2_sample", "sft_sample", "t5_sample", "vit_sample")


def losses(sample: str, folder: Path, peers: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the losses of the first steps of a sample, trained by the engine and by peers, on this rank of two."""
    rank = torch.distributed.get_rank()
    name_ranks(LaunchEnvironment("none", rank=rank, local_rank=rank, world_size=2, local_world_size=2))
    overrides = ["model.dropout=0", f"data.cache={folder}", f"training.max_steps={STEPS}"]
    recipe = load_recipe(sample, overrides).recipe
    plan, data = plan_run(recipe, 2), prepare_data(recipe)
    task, mesh = data.task, open_mesh(plan.layout, torch.device("cpu"))
    training = assemble(plan, mesh, data)
    found = {"ours": [training.engine.train_step(batch).loss for batch in training.train_loader]}
    for peer in peers:
        described = describe_model(with_torchs_dropout(recipe), task, data.preparation.padding_token)
        built = build_model(described)
        of_peer = found[peer] = []
        one = PeerTraining(recipe, plan, task, built, STEPS, STEPS)
        PEERS[peer](one, train_batches(plan, mesh, data), lambda batch, loss, norm, into=of_peer: into.append(loss))
    return found


@pytest.mark.parametrize(
    "sample", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in SAMPLES]
)
@pytest.mark.slow
def test_all_learn_the_same(sample: str, ranks: RankPools, tmp_path: Path):
    further = {"bert_sample_mlm": ("transformers", "accelerate"), "qa_sample": ("accelerate_fsdp2", "deepspeed")}
    peers = ("pytorch", *further.get(sample, ()))
    ours, *others = ranks(2).run(losses, sample, tmp_path, peers)[0].values()
    assert len(others) == len(peers)
    assert len(ours) == STEPS
    for other in others:
        # the second step is after an update by Adam, which enlarges rounding
        assert other == [pytest.approx(ours[0], rel=1e-6), pytest.approx(ours[1], rel=1e-5)]


COMPILED = {"compiled": Case("BERT-base", BASE, 16, 4), "sparse": Case(MASKED_WORDS, MODERN, 16, 4)}


def losses_of_loops(name: str) -> list[list[float]]:
    """Return the losses of a plain loop and of a compiled one, on one process."""
    case = COMPILED[name]
    case = shrunk(replace(case, variant="without padding, no dropout", precision="fp32"))
    case = replace(case, config={**case.config, "num_hidden_layers": 1})
    recipe = case.recipe()
    plan = plan_run(recipe, 1)
    task = planned_task(plan)
    found = []
    for peer in ("pytorch", name):
        built = build_model(planned_model(plan))
        of_peer: list[float] = []
        one = PeerTraining(recipe, plan, task, built, STEPS, STEPS)
        batches = random_batches(case, recipe, task, built.model.config)
        PEERS[peer](one, batches, lambda batch, loss, norm, into=of_peer: into.append(loss))
        found.append(of_peer)
    return found


@pytest.mark.parametrize("name", ["compiled", "sparse"])
@pytest.mark.nightly
def test_a_compiled_loop_learns_the_same(name: str, ranks: RankPools):
    plain, compiled = ranks(1).run(losses_of_loops, name)[0]
    assert len(compiled) == STEPS
    assert compiled == [pytest.approx(plain[0], rel=1e-6), pytest.approx(plain[1], rel=1e-5)]


def test_rows_without_labels_and_fillers_count_nothing():
    recipe = load_recipe("bert_sample_mlm", ["training.max_steps=1"]).recipe
    plan = plan_run(recipe, 1)
    training = PeerTraining(recipe, plan, prepare_data(recipe).task, PlacedModel(torch.nn.Linear(1, 1)), 1, 1)
    rows = Microbatch({}, torch.tensor([[3, IGNORED_LABEL]]), torch.zeros(1))
    filler = replace(rows, filler=True)
    assert training.num_labels(RankBatch([rows, filler], 1, 2)) == 1
    hidden = replace(rows, labels=torch.full((1, 2), IGNORED_LABEL))
    assert training.num_labels(RankBatch([hidden], 1, 2)) == 1, "a loss of 0, not 0 / 0"
    assert training.loss_sum(SimpleNamespace(logits=torch.randn(1, 2, 8)), filler) == 0


def test_trainer_refuses_a_batch_that_is_not_full():
    training = SimpleNamespace(plan=SimpleNamespace(batch=SimpleNamespace(num_microbatches=2)))
    rows = Microbatch({}, torch.zeros(1), torch.zeros(1))
    for microbatches in ([rows], [rows, replace(rows, filler=True)]):
        with pytest.raises(ValueError, match="needs 2 full microbatches, but step 1 has fewer"):
            list(FlatBatches([RankBatch(microbatches, 1, 1)], training))
