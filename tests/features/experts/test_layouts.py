"""Trainings with expert ranks against those of one process: loss, norm, weights, and the weights of one SGD step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.families import EXPERTS
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, parallel_keys, sgd_sections, tiny_recipe, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference, relative
from trainer.base.errors import RecipeError, UsageError
from trainer.features.experts.axis import divide_experts, require_division
from trainer.features.experts.products import use_products
from trainer.parallel.groups import planned_group
from trainer.parallel.placement import whole
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

NUM_ROWS, NUM_STEPS = 26, 4  # two whole batches of 12 rows, an incomplete one, and one step of the next epoch


@dataclass(frozen=True)
class Layout:
    """A layout of a mixture of experts."""

    ranks: int
    expert: int
    strategy: str = "ddp"
    model_type: str = "mixtral"
    sections: dict[str, Any] = field(default_factory=dict)  # further keys of the recipe
    parallel: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 24
    batch: int = 12
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.model_type, self.strategy, f"{self.ranks}ranks", f"expert{self.expert}"]
        words += [f"{key}={value}" for key, value in (self.parallel | self.sections | self.config).items()]
        return "-".join(words + ["accumulated"] * (self.micro_batch_size < 12)).replace(" ", "").replace("'", "")

    def recipe(self, sgd: bool = False, alone: bool = False) -> Recipe:
        """Return the recipe on the ranks, or that of one process with the same training."""
        # One process rounds gradients as ranks do that send them in 16 bits.
        parallel = {key: value for key, value in self.parallel.items() if key == "communication"}
        if not alone:
            others = self.parallel.get("pipeline", {}).get("stages", 1)
            others *= self.parallel.get("tensor", 1) * self.parallel.get("context", 1)
            parallel = parallel_keys(self.strategy, self.ranks // others) | {"expert": self.expert} | self.parallel
        training = {"micro_batch_size": 24 if alone else self.micro_batch_size, "global_batch_size": self.batch}
        sections = {
            key: value for key, value in self.sections.items() if not alone or key in ("precision", "optimizer")
        }
        if sgd:
            training |= {"max_steps": 1, "max_grad_norm": None}
            sections |= sgd_sections()
        config = {"model_type": self.model_type, **EXPERTS[self.model_type], "initializer_range": 0.2, **self.config}
        model = {"config": config, "tokenizer": "none"}
        task = {"type": "causal_lm", "text": "text"}
        return tiny_recipe(task=task, model=model, parallel=parallel, training=training, **sections)

    @property
    def is_exact(self) -> bool:
        return self.tolerance == "fp32"

    @property
    def tolerance(self) -> str:
        optimizer = self.sections.get("optimizer", {}).get("name")
        rounded = self.parallel.get("communication", {}).get("gradients")
        return optimizer or rounded or self.sections.get("precision", "fp32")


def train(layout: Layout, alone: bool = False) -> list[Curve]:
    """Train some steps of AdamW and, in fp32, one of gradient descent, in fp32 and in fp64."""
    curves = [train_tiny(layout.recipe(alone=alone), num_rows=NUM_ROWS, num_steps=NUM_STEPS)]
    if layout.is_exact:
        recipe = layout.recipe(sgd=True, alone=alone)
        curves += [train_tiny(recipe, num_rows=NUM_ROWS), train_tiny(recipe, torch.float64, num_rows=NUM_ROWS)]
    return curves


def reference(layout: Layout) -> list[Curve]:
    key = (layout.model_type, layout.config, layout.batch, layout.tolerance)
    return once(f"experts {key}", lambda: train(layout, alone=True))


_IN_FP32 = ("deepseek_v2", "deepseek_v3", "olmoe")


def compare(ranks: RankPools, layout: Layout) -> None:
    expected = reference(layout)
    digests: dict[str, str] = {}
    for curve, *sgd in ranks(layout.ranks).run(train, layout):
        assert len(curve.losses) == NUM_STEPS
        assert_same_curve(curve, expected[0], TOLERANCES[layout.tolerance])
        # DeepSeek's router and OLMoE's norms compute in fp32, also in a model in fp64.
        bounds = (1e-5, 1e-11 if layout.model_type not in _IN_FP32 else 1e-7) if sgd else ()
        for one, other, most in zip(sgd, expected[1:], bounds, strict=True):
            assert relative(one.losses[0], other.losses[0]) < 1e-6
            assert relative(one.grad_norms[0], other.grad_norms[0]) < 1e-6
            assert largest_difference(one, other) <= most
        for part, digest in curve.digests.items():
            assert digests.setdefault(part, digest) == digest, f"ranks that hold the same part ({part}) differ"


@pytest.mark.parametrize("layout", [Layout(2, 2)], ids=str)
def test_expert_ranks_train_as_one_process(ranks: RankPools, layout: Layout):
    compare(ranks, layout)


SIX = {"num_local_experts": 6}
STAGES = {"pipeline": {"stages": 2}}
ZERO_BUBBLE = {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}
HOW = {"activation_checkpointing": "full"}
MUON = {"optimizer": {"name": "muon", "learning_rate": 1e-3}}  # experts and routers train with AdamW
SLOW = [
    Layout(3, 3, config=SIX),
    Layout(4, 2, "fsdp", micro_batch_size=2),
    Layout(4, 2, "hsdp"),
    Layout(4, 2, parallel={"tensor": 2}, model_type="qwen2_moe"),
    Layout(2, 1, parallel={"tensor": 2}, model_type="olmoe"),
    Layout(4, 2, parallel=STAGES, model_type="qwen3_moe", micro_batch_size=3),
    Layout(4, 2, parallel={"context": 2}, model_type="qwen2_moe", micro_batch_size=3),
    Layout(2, 2, sections=HOW),
    Layout(2, 2, "fsdp", sections={"precision": "fp16", "activation_checkpointing": "selective"}),
    Layout(2, 2, model_type="deepseek_v3", sections={"data": {"padding_free": True}}, micro_batch_size=3),
]
NIGHTLY = [
    Layout(2, 2, "fsdp"),
    Layout(4, 2, micro_batch_size=2),
    Layout(4, 4, "fsdp", sections=HOW),
    Layout(6, 2, "hsdp", parallel={"shard": 2}, micro_batch_size=2),
    Layout(6, 3, config=SIX, micro_batch_size=1),
    Layout(4, 2, "fsdp", parallel={"tensor": 2}, model_type="deepseek_v2"),
    Layout(2, 1, parallel={"tensor": 2}, model_type="deepseek_v3"),
    Layout(2, 1, parallel={"tensor": 2}, model_type="deepseek_v3", config={"q_lora_rank": None}),
    Layout(4, 2, "fsdp", parallel={"tensor": 2}, model_type="gpt_oss", micro_batch_size=3),
    Layout(4, 2, "fsdp", parallel={"tensor": 2}, model_type="olmoe", sections=HOW),
    Layout(4, 1, parallel={"tensor": 2, "pipeline": {"stages": 2}}, model_type="gpt_oss"),
    Layout(3, 1, "fsdp", parallel={"context": 3}, sections=HOW),
    Layout(8, 2, "fsdp", parallel={"context": 2, "tensor": 2}, model_type="olmoe", micro_batch_size=3),
    Layout(4, 2, parallel={"context": 2}, model_type="qwen3_moe", sections={"data": {"padding_free": True}}),
    Layout(4, 2, "fsdp", parallel=STAGES, micro_batch_size=3, sections=HOW),
    Layout(4, 2, parallel=ZERO_BUBBLE, config={"num_hidden_layers": 4}, micro_batch_size=3),
    Layout(8, 4, "hsdp", parallel={"shard": 4}, micro_batch_size=1, batch=24),
    Layout(8, 2, "hsdp", parallel={"shard": 4}, micro_batch_size=3, batch=24),
    Layout(8, 2, "fsdp", parallel={"tensor": 2, "pipeline": {"stages": 2}}, model_type="qwen3_moe"),
    Layout(2, 2, parallel={"communication": {"gradients": "bf16"}}),
    Layout(2, 2, sections=MUON),
    Layout(4, 2, "fsdp", sections=MUON, model_type="qwen3_moe", micro_batch_size=1),
    *(Layout(2, 2, model_type=name) for name in EXPERTS if name != "mixtral"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW, ids=str)
def test_further_layouts_train_as_one_process(ranks: RankPools, layout: Layout):
    compare(ranks, layout)


def test_wrong_degrees_are_refused():
    model = build_experts("mixtral")
    use_products(model)
    with pytest.raises(UsageError, match=r"must divide the model's 4 experts, but is 3; use 1, 2 or 4$"):
        divide_experts(model, planned_group(3), whole(model))
    with pytest.raises(UsageError, match=r"is 2, but the family bert has no experts .*; set it to 1"):
        require_division(AutoConfig.for_model("bert"), 2)


@pytest.mark.parametrize(
    ("keys", "processes", "words"),
    [
        (["expert=3"], 4, r"`parallel\.expert` must divide the 4 processes, but is 3; use 3 processes or a multiple"),
        (["expert=2", "tensor=2"], 6, r"`parallel\.tensor` times `parallel\.expert` 2 must divide the 6 processes"),
        (
            ["expert=2", "strategy=hsdp", "shard=3"],
            6,
            r"must be a multiple of `parallel\.expert` 2, but is 3; use 6",
        ),
        (["expert=2", "strategy=zero1"], 2, r"`parallel\.strategy` zero1: DeepSpeed sums all gradients"),
    ],
)
def test_wrong_layouts_are_refused(keys: list[str], processes: int, words: str):
    with pytest.raises(RecipeError, match=words):
        plan_run(load_recipe("gpt2_sample", [f"parallel.{key}" for key in keys]).recipe, processes)


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        (["strategy=ddp"], {"dp_replicate": 4}),
        (["strategy=fsdp"], {"dp_shard": 4}),
        (["strategy=hsdp", "shard=4"], {"dp_replicate": 2, "dp_shard": 2}),
        (["strategy=fsdp", "tensor=2"], {"dp_shard": 2, "tp": 2}),
    ],
)
def test_expert_ranks_are_data_ranks(keys: list[str], layout: dict[str, int]):
    plan = plan_run(load_recipe("gpt2_sample", [f"parallel.{key}" for key in (*keys, "expert=2")]).recipe, 8)
    assert {axis: size for axis, size in plan.layout.sizes.items() if size > 1} == layout | {"ep": 2}
    assert plan.batch.data_parallel_size == plan.layout.data_parallel_size == 8 // layout.get("tp", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", NIGHTLY, ids=str)
def test_still_further_layouts_train_as_one_process(ranks: RankPools, layout: Layout):
    compare(ranks, layout)
