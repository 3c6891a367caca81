"""The matrix of layouts and precisions that must give the same training, and its tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tests.helpers.families import CONFIGS, EXPERTS, NEAR_FAMILIES
from tests.helpers.training import (
    NUM_ROWS,
    RANK_STRATEGIES,
    TINY_BERT,
    TINY_RESNET,
    TINY_VIT,
    Curve,
    parallel_keys,
    sgd_sections,
    tiny_recipe,
    train_tiny,
)
from tests.helpers.turns import once
from trainer.base.extensions import registered
from trainer.models.families.table import FAMILIES
from trainer.recipe.registered import optimizer_sections
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES

GLOBAL_BATCH_SIZE = 12
SHORT = 6  # steps; an epoch has five
FEW_ROWS, FEW_STEPS = 26, 4  # an epoch has two whole batches and an incomplete one; one step is of the next epoch
# Without T5, which needs end-of-sequence tokens (its cases are in `pipeline_matrix`), image models, and experts.
OTHER_FAMILIES = ("t5", "bart", "vit", "resnet", *EXPERTS)
TEXT_FAMILIES = [model_type for model_type in FAMILIES if model_type not in ("bert", *OTHER_FAMILIES)]
# Strategies that sum gradients and gather weights as FSDP or ZeRO-3 does, wherever layouts also cut the model.
NEAR_STRATEGIES = ("hsdp", "zero1", "zero2")
DROPOUT_FAMILIES = ("bert", "roberta", "albert", "distilbert", "gpt2", "t5", "bart", "vit")
# Also compared after one step of gradient descent: the model that runs with all strategies, and convolutions.
SGD_FAMILIES = ("bert", "resnet")
IMAGE_FAMILIES = {"vit": TINY_VIT, "resnet": TINY_RESNET}

# Matrices of 4,096 elements, from which on their moments have 8 bits.
WIDE = {"bert": {"hidden_size": 64, "intermediate_size": 96}, "gpt2": {"n_embd": 64}}


def model_config(model_type: str, num_layers: int | None = None) -> dict[str, Any]:
    tiny = {"bert": TINY_BERT, **IMAGE_FAMILIES}
    config = tiny.get(model_type) or {"model_type": model_type, **(CONFIGS | EXPERTS)[model_type]}
    return config if num_layers is None else {**config, "num_hidden_layers": num_layers}


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences from one process, relative for loss and norm of a step, absolute for weights."""

    loss: float
    grad_norm: float
    sgd_weights: float  # after one step with learning rate 1


# The documentation guarantees the fp32 tolerances. The others are the largest differences measured over the matrix,
# rounded up to a simple fraction of the type's epsilon. Products are rounded to this type, in an order that depends on
# the layout; sums, loss and norm are fp32.
_BF16, _FP16 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float16).eps
TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4, 1e-5),
    "muon": Tolerance(1e-4, 1e-3, 1e-5),
    "bf16": Tolerance(_BF16 / 8, _BF16, _BF16),
    "fp16": Tolerance(_FP16 / 8, _FP16, _FP16),
}


@dataclass(frozen=True)
class Case:
    """One layout with the options of its training."""

    strategy: str
    world_size: int
    accumulates: bool  # three microbatches per step, or four if 3 does not divide a rank's rows; else one
    precision: str
    checkpointing: str
    dropout: float
    tensor: int = 1
    sequence: bool = False
    model_type: str = "bert"
    stages: int = 1
    schedule: str = "1f1b"
    task: str = "sequence_classification"
    num_layers: int | None = None  # None: the number in the family's tiny configuration
    is_extra: bool = False  # not part of the covering array of `matrix`
    is_nightly: bool = False  # only in `make test-nightly`
    gradients: str = "fp32"  # the type in which they are sent
    optimizer: str = "adamw"
    context: int = 1
    weights: str = "fp32"  # how they are stored
    has_few_rows: bool = False  # in addition to the layouts that cut the model

    def __str__(self) -> str:
        words = [self.strategy, f"{self.world_size}ranks", self.precision]
        words += [f"tensor{self.tensor}"] * (self.tensor > 1) + ["sequence"] * self.sequence
        words += [f"context{self.context}"] * (self.context > 1)
        words += [f"pipeline{self.stages}", self.schedule] * (self.stages > 1)
        words += [self.model_type] * (self.model_type != "bert") + [self.task] * (self.task == "masked_lm")
        words += [f"gradients_{self.gradients}"] * (self.gradients != "fp32")
        words += [self.optimizer] * (self.optimizer != "adamw") + [self.weights] * (self.weights != "fp32")
        words += ["accumulated"] * self.accumulates + [f"recompute_{self.checkpointing}"] * (
            self.checkpointing != "none"
        )
        return "-".join(words + ["dropout"] * (self.dropout > 0))

    @property
    def is_fast(self) -> bool:
        """Whether `make test` runs the case: two ranks with a BERT and AdamW, and one cut beside DDP in fp32."""
        is_whole = self.tensor == self.context == self.stages == 1
        if is_whole and not self.accumulates and self.checkpointing == "none":
            return False  # steps with accumulation hold those without
        if self.is_extra and self.strategy in NEAR_STRATEGIES:
            return False
        if self.stages > 1 and self.schedule == "1f1b" and self.task != "masked_lm":
            return False  # the stages of masked_lm also share a weight
        is_cut = self.strategy == "ddp" and self.precision == "fp32" and self.schedule in ("1f1b", "zero_bubble")
        is_plain = self.optimizer == "adamw" and self.gradients == self.weights == "fp32"
        is_plain = is_plain and not (self.stages > 1 and self.accumulates)
        return self.world_size == 2 and self.model_type == "bert" and is_plain and (is_whole or is_cut)

    @property
    def is_registered(self) -> bool:
        """Whether the features that the case needs are there: each folder in `features/` can be deleted."""
        rows = {(row.kind, row.name) for row in registered()}
        return (
            self.model_type in FAMILIES
            and self.strategy in STRATEGIES
            and self.optimizer in optimizer_sections()
            and (self.weights == "fp32" or ("keys", "weights") in rows)
            and (self.context == 1 or ("axis", "parallel.context") in rows)
        )

    @property
    def tolerance(self) -> str:
        """The name of the case's tolerance: that of the fewest bits."""
        if self.optimizer in TOLERANCES:
            return self.optimizer
        return self.precision if self.gradients == "fp32" else self.gradients

    @property
    def num_rows(self) -> int:
        """The number of rows of the data: few where layouts cut the model, because their steps take long."""
        is_cut = self.tensor > 1 or self.stages > 1 or self.context > 1
        return FEW_ROWS if is_cut or self.has_few_rows else NUM_ROWS

    @property
    def num_steps(self) -> int:
        """The number of steps to train, at most 20.

        One case of each strategy has 20 steps of AdamW in fp32, or 10 if four ranks accumulate. The others cover an
        epoch, with its incomplete last batch, and one step of the next. 3 steps cover gradient, moments and schedule
        if only the model family differs from another case.
        """
        if self.num_rows == FEW_ROWS:
            is_family = self.model_type not in ("bert", *IMAGE_FAMILIES) and self.world_size == 2
            return 3 if is_family else FEW_STEPS
        is_plain = self.model_type == "bert" and self.tolerance == self.precision and self.optimizer == "adamw"
        if is_plain and (self.world_size == 1 or (self.precision == "fp32" and not self.is_extra)):
            return 10 if self.world_size == 4 and self.accumulates else 20
        return SHORT

    def recipe(self, sgd: bool = False) -> Recipe:
        """Return a recipe of 20 steps with AdamW, or of one step of gradient descent without clipping."""
        data_ranks = self.world_size // self.tensor // self.context // self.stages
        share = GLOBAL_BATCH_SIZE // data_ranks
        pipeline = {"stages": self.stages, "schedule": self.schedule} if self.stages > 1 else {}
        if self.stages > 1 and self.accumulates:  # two passes; a microbatch has one row if rows are few
            per_rank = SCHEDULES[self.schedule].stages_per_rank
            pipeline["microbatches"] = max(self.stages * per_rank, share // 6)
        # Most other families name their dropouts differently, and some have none.
        has_dropout = self.model_type in DROPOUT_FAMILIES
        return _recipe(
            sgd,
            task={"type": "image_classification" if self.model_type in IMAGE_FAMILIES else self.task},
            model={
                "config": model_config(self.model_type, self.num_layers)
                | (WIDE[self.model_type] if self.optimizer == "adamw_8bit" else {}),
                "dropout": self.dropout if has_dropout else None,
            },
            training={
                "micro_batch_size": max(1, share // 12 if self.stages > 1 else share // 3)
                if self.accumulates
                else share
            },
            parallel=parallel_keys(self.strategy, data_ranks)
            | {"tensor": self.tensor, "sequence": self.sequence, "pipeline": pipeline}
            | ({"context": self.context} if self.context > 1 else {})
            | {"communication": {"gradients": self.gradients}},
            optimizer={"name": self.optimizer},
            schedule={"name": "constant"} if self.optimizer == "schedule_free_adamw" else {},
            precision=self.precision,
            **({} if self.weights == "fp32" else {"weights": self.weights}),
            activation_checkpointing=self.checkpointing,
        )


def _recipe(sgd: bool, training: dict[str, Any], **sections: Any) -> Recipe:
    if sgd:
        training = {**training, "max_steps": 1, "max_grad_norm": None}
        sections |= sgd_sections()
    return tiny_recipe(training=training, **sections)


def matrix() -> Iterator[Case]:
    """Iterate over cases of every strategy with 2, 3 or 4 ranks; 3 ranks do not divide the tensors evenly.

    Ranks, accumulation, precision, recomputation and dropout are independent factors. The cases are a covering array:
    each pair of levels of two factors, and each level with each strategy, occurs in a case. Every strategy also has a
    case with accumulation in fp32, which has the smallest tolerance.
    """
    for index, strategy in enumerate(RANK_STRATEGIES):
        for level, precision in enumerate(("fp32", "bf16", "fp16")):
            world_size = (2, 3, 4)[(level + index) % 3]
            checkpointing = ("none", "selective", "full")[(level + 2 * index) % 3]
            accumulates, dropout = bool((level + index // 3) % 2), 0.1 * ((level + index) % 2)
            yield Case(strategy, world_size, accumulates, precision, checkpointing, dropout)
            if precision == "fp32" and not accumulates:
                yield Case(strategy, 2, True, precision, "none", 0.1, is_extra=True)


def tensor_matrix() -> Iterator[Case]:
    """Iterate over cases with tensor ranks: every strategy, and every family in `TEXT_FAMILIES` on two ranks."""
    shapes = [  # ranks, tensor degree, sequence parallel, accumulates, checkpointing, precision
        (2, 2, True, True, "full", "fp32"),
        (4, 2, False, False, "none", "fp16"),
        (4, 2, False, True, "selective", "bf16"),
        (4, 4, True, False, "none", "fp32"),
    ]
    for strategy in RANK_STRATEGIES:
        if STRATEGIES[strategy].no_tensor:
            continue
        for index, (world_size, tensor, sequence, accumulates, checkpointing, precision) in enumerate(shapes):
            dropout = 0.1 if (index + RANK_STRATEGIES.index(strategy)) % 2 else 0.0
            # Without data ranks, strategies differ in their engine only.
            is_nightly = world_size == tensor and strategy != "ddp"
            is_nightly = is_nightly or (precision == "fp16" and strategy != "ddp")
            is_nightly = is_nightly or strategy in ("hsdp", "zero1")
            how = {"tensor": tensor, "sequence": sequence, "is_nightly": is_nightly}
            yield Case(strategy, world_size, accumulates, precision, checkpointing, dropout, **how)
    for model_type in TEXT_FAMILIES:
        sequence = FAMILIES[model_type].tensor.sequence_parallel
        dropout = 0.1 if model_type in DROPOUT_FAMILIES else 0.0
        # Without accumulation: it is part of the engine and does not depend on the family.
        how = {"tensor": 2, "sequence": sequence, "is_nightly": model_type in NEAR_FAMILIES}
        yield Case("ddp", 2, False, "fp32", "full", dropout, model_type=model_type, **how)


def context_matrix() -> Iterator[Case]:
    """Iterate over cases with context ranks: every strategy, stages, precisions, and each family that has them."""

    def case(strategy: str, world_size: int, context: int = 2, **facts: Any) -> Case:
        given = {"accumulates": False, "precision": "fp32", "checkpointing": "none", "dropout": 0.1} | facts
        return Case(strategy, world_size, context=context, **given)

    for strategy in RANK_STRATEGIES:
        if not STRATEGIES[strategy].no_tensor:
            yield case(strategy, 4, accumulates=True, is_nightly=strategy != "fsdp")
    yield case("ddp", 2, accumulates=True, checkpointing="selective")
    yield case("ddp", 4, 4, task="masked_lm", precision="bf16", is_nightly=True)
    yield case("zero2", 2, precision="bf16", checkpointing="full")
    interleaved = {"stages": 2, "num_layers": 4, "schedule": "interleaved_1f1b", "checkpointing": "full"}
    yield case("fsdp", 8, **interleaved, is_nightly=True)
    # Three ranks do not divide the four heads, and four do not divide the two key and value heads of a Llama.
    yield case("ddp", 3, 3, task="masked_lm", accumulates=True, checkpointing="selective")
    yield case("ddp", 3, 3, model_type="modernbert", dropout=0.0)  # with a sliding window
    yield case("ddp", 4, 4, model_type="llama", dropout=0.0, precision="bf16", checkpointing="full")
    yield case("fsdp", 6, 3, precision="fp16", checkpointing="full", is_nightly=True)
    yield case("zero3", 6, 3, precision="fp16", is_nightly=True)
    yield case("zero1", 6, 3, task="masked_lm", checkpointing="full", is_nightly=True)
    yield case("zero2", 6, 3, accumulates=True, precision="bf16", is_nightly=True)
    yield case("zero2", 8, 4, model_type="llama", dropout=0.0, is_nightly=True)
    yield case("zero3", 6, 3, accumulates=True, checkpointing="selective", is_nightly=True)
    yield case("hsdp", 6, 3, accumulates=True, is_nightly=True)
    yield case("hsdp", 8, 4, model_type="llama", dropout=0.0, checkpointing="selective", is_nightly=True)
    yield case("ddp", 6, 3, stages=2, num_layers=4, task="masked_lm", is_nightly=True)
    yield case("ddp", 4, stages=2, num_layers=4, task="masked_lm")
    # Tensor ranks beside context ranks: two head groups or a ring, which cuts the heads of each tensor rank.
    both = partial(case, tensor=2)
    yield both("ddp", 4, accumulates=True)
    yield both("ddp", 4, sequence=True, task="masked_lm", checkpointing="full", is_nightly=True)
    yield both("ddp", 4, model_type="llama", dropout=0.0, sequence=True, is_nightly=True)
    yield both("ddp", 4, model_type="gpt2", is_nightly=True)
    yield both("ddp", 6, 3, sequence=True, task="masked_lm")
    yield both("fsdp", 8, accumulates=True, dropout=0.0, is_nightly=True)
    yield both("zero2", 8, sequence=True, is_nightly=True)
    yield both("zero3", 8, is_nightly=True)
    # `test_tasks.py` has these eight ranks, and those of FSDP with tensor ranks and stages, each time.
    yield both("ddp", 8, stages=2, num_layers=4, sequence=True, task="masked_lm", is_nightly=True)
    for model_type in (*TEXT_FAMILIES, "vit"):
        if model_type in FAMILIES and FAMILIES[model_type].tensor.context_parallel:
            dropout = 0.1 if model_type in DROPOUT_FAMILIES else 0.0
            yield case("ddp", 2, model_type=model_type, dropout=dropout, is_nightly=model_type in NEAR_FAMILIES)


def pipeline_matrix() -> Iterator[Case]:
    """Iterate over cases with stages: schedules, strategies (also with tensor ranks), families and tied weights."""

    def case(strategy: str, world_size: int, stages: int, schedule: str = "1f1b", **facts: Any) -> Case:
        given = {"accumulates": False, "precision": "fp32", "checkpointing": "none", "dropout": 0.1} | facts
        return Case(strategy, world_size, stages=stages, schedule=schedule, **given)

    for schedule in SCHEDULES:
        yield case("ddp", 2, 2, schedule, num_layers=4)
    yield case("ddp", 2, 2, "1f1b", num_layers=4, dropout=0.0, accumulates=True)
    how = {"checkpointing": "full", "accumulates": True, "is_nightly": True}
    yield case("ddp", 2, 2, "gpipe", num_layers=4, precision="bf16", **how)
    yield case("ddp", 2, 2, "1f1b", num_layers=4, precision="fp16", checkpointing="selective")
    yield case("ddp", 4, 2, "zero_bubble", num_layers=4, precision="fp16", checkpointing="full", is_nightly=True)
    yield case("ddp", 3, 3, "gpipe", num_layers=4, dropout=0.0, is_nightly=True)
    yield case("ddp", 4, 4, "1f1b", num_layers=5)
    yield case("ddp", 4, 2, "interleaved_1f1b", num_layers=4, tensor=2, sequence=True, is_nightly=True)
    how = {"accumulates": True, "dropout": 0.0, "is_nightly": True}  # in bf16: `weights_matrix`
    yield case("fsdp", 4, 2, "1f1b", num_layers=4, precision="fp16", **how)
    yield case("fsdp", 4, 2, "interleaved_1f1b", num_layers=4, checkpointing="full")
    for strategy in ("ddp", "fsdp", "hsdp"):
        how = {"tensor": 2, "sequence": True, "num_layers": 4, "checkpointing": "full"}
        yield case(strategy, 8, 2, "1f1b", **how, is_nightly=True)
    # T5 has two encoder and two decoder layers.
    for task, model_type, layers in (("masked_lm", "bert", 4), ("sequence_classification", "t5", None)):
        for schedule in ("1f1b", "interleaved_1f1b"):
            how = {"is_nightly": schedule != "1f1b" and model_type == "bert"}  # T5 has tied weights too
            yield case("ddp", 2, 2, schedule, task=task, model_type=model_type, num_layers=layers, **how)
        how = {"dropout": 0.0, "is_nightly": True}  # tied weights with shards: `weights_matrix`
        yield case("fsdp", 4, 2, "1f1b", task=task, model_type=model_type, num_layers=layers, **how)
    yield case("ddp", 4, 2, "1f1b", task="masked_lm", num_layers=4, tensor=2, sequence=True)
    for model_type in TEXT_FAMILIES:
        if FAMILIES[model_type].stages is not None:
            dropout = 0.1 if model_type in DROPOUT_FAMILIES else 0.0
            yield case("ddp", 2, 2, model_type=model_type, dropout=dropout, is_nightly=model_type in NEAR_FAMILIES)


def communication_matrix() -> Iterator[Case]:
    """Iterate over cases with gradients that are sent in 16 bits, for each place in which they are sent."""
    case = partial(Case, accumulates=True, checkpointing="none", dropout=0.1, has_few_rows=True)
    for index, strategy in enumerate(RANK_STRATEGIES):
        precision = ("bf16", "fp32")[index % 2]
        how = {"gradients": "bf16", "is_nightly": strategy == "zero1"}  # ZeRO-2 sends them in the same way
        yield case(strategy, 4 if STRATEGIES[strategy].groups else 2, precision=precision, **how)
    yield case("ddp", 2, precision="fp16", gradients="fp16")
    yield from (
        case("ddp", 2, tensor=2, sequence=True, precision="bf16", gradients="bf16"),
        case("zero2", 4, tensor=2, sequence=True, precision="fp32", gradients="bf16", is_nightly=True),
        case("fsdp", 4, tensor=2, sequence=True, precision="bf16", gradients="bf16", is_nightly=True),
    )
    staged = partial(case, stages=2, num_layers=4)
    yield staged("ddp", 2, task="masked_lm", precision="bf16", gradients="bf16")
    yield staged("ddp", 4, precision="fp32", gradients="bf16", is_nightly=True)
    yield staged("fsdp", 4, precision="fp16", gradients="fp16", is_nightly=True)


def optimizer_matrix() -> Iterator[Case]:
    """Iterate over cases of the optimizers that need whole matrices or average weights, for each way to cut them."""
    for optimizer in ("muon", "adafactor"):
        facts = {"accumulates": False, "precision": "fp32", "checkpointing": "none", "dropout": 0.1}
        case = partial(Case, **facts, optimizer=optimizer, has_few_rows=True)
        yield case("ddp", 2)
        # `test_learning.py` has Muon on three ranks, which do not divide the matrices, and Adafactor on tensor ranks.
        yield case("fsdp", 3, is_nightly=optimizer == "muon")
        blocks = {"model_type": "gpt2", "is_nightly": optimizer == "adafactor"}  # those of q, k and v
        yield case("fsdp", 4, tensor=2, sequence=True, **blocks)
        yield case("ddp", 2, tensor=2, task="masked_lm", is_nightly=optimizer == "adafactor")
        yield case("ddp", 2, stages=2, task="masked_lm", is_nightly=optimizer == "adafactor")
    facts = {"accumulates": False, "precision": "fp32", "checkpointing": "none", "dropout": 0.1}
    case = partial(Case, **facts, optimizer="adamw_8bit")
    yield case("fsdp", 3, is_nightly=True)  # shards end inside of blocks, as in `test_learning.py`
    yield case("hsdp", 4, is_nightly=True)
    yield case("fsdp", 4, tensor=2, sequence=True, model_type="gpt2", is_nightly=True)
    yield case("ddp", 2, tensor=2, task="masked_lm")  # columns, and a vocabulary that is padded
    yield case("ddp", 2, stages=2, task="masked_lm", is_nightly=True)
    facts = {"checkpointing": "none", "dropout": 0.1, "optimizer": "schedule_free_adamw", "has_few_rows": True}
    case = partial(Case, precision="fp32", accumulates=True, **facts)
    yield case("ddp", 2, tensor=2, task="masked_lm")
    yield case("fsdp", 3)
    yield case("hsdp", 4, is_nightly=True)
    yield case("zero2", 2)
    yield case("ddp", 2, stages=2, task="masked_lm", is_nightly=True)  # `test_learning.py` has stages
    yield Case("zero1", 2, True, "bf16", **facts, is_nightly=True)
    yield Case("fsdp", 4, True, "fp16", tensor=2, sequence=True, **facts, is_nightly=True)


def weights_matrix() -> Iterator[Case]:
    """Iterate over cases with weights in bf16, for each way to cut them and each way to sum their gradients."""
    for weights in ("bf16_compensated", "bf16_stochastic"):
        facts = {"precision": "bf16", "checkpointing": "none", "dropout": 0.1, "weights": weights, "has_few_rows": True}
        case = partial(Case, accumulates=True, **facts)
        # Both kinds round the same sums, so that one of them runs under each cut, and the other one under some.
        is_nightly = weights == "bf16_stochastic"
        yield case("ddp", 2)
        yield case("fsdp", 3)  # which does not divide the matrices
        yield case("hsdp", 4, num_layers=4, is_nightly=True)
        yield case("fsdp", 4, tensor=2, sequence=True, model_type="gpt2", is_nightly=is_nightly)  # blocks of q, k and v
        yield case("ddp", 2, tensor=2, task="masked_lm", is_nightly=is_nightly)
        how = {"stages": 2, "num_layers": 4, "task": "masked_lm"}
        yield case("ddp", 4, schedule="zero_bubble", **how, is_nightly=True)
        yield case("fsdp", 4, **how, is_nightly=is_nightly)
        yield Case("ddp", 4, False, context=2, **facts, is_nightly=is_nightly)


def image_cases() -> Iterator[Case]:
    """Iterate over cases of a ViT (every kind of engine, tensor ranks) and of a ResNet (FSDP, stages)."""
    for strategy, accumulates, checkpointing in (
        ("ddp", True, "none"),
        ("fsdp", True, "full"),
        ("zero2", False, "none"),
    ):
        yield Case(strategy, 2, accumulates, "fp32", checkpointing, 0.1, model_type="vit")
    yield Case("ddp", 2, True, "fp32", "full", 0.1, tensor=2, sequence=True, model_type="vit")
    resnet = partial(Case, precision="fp32", dropout=0.0, model_type="resnet")
    yield resnet("fsdp", 2, True, checkpointing="full")
    for schedule in SCHEDULES:
        is_nightly = schedule != "zero_bubble"  # which orders most
        how = {"schedule": schedule, "is_nightly": is_nightly}
        yield resnet("ddp", 2, False, checkpointing="none", stages=2, **how)
    yield resnet("fsdp", 4, True, checkpointing="full", stages=2, is_nightly=True)
    yield resnet("ddp", 6, True, checkpointing="none", stages=3, is_nightly=True)


@dataclass
class Outcome:
    """The curves of one rank."""

    curve: Curve
    sgd: Curve | None  # None for families not in `SGD_FAMILIES`
    sgd_fp64: Curve | None


def train(case: Case) -> Outcome:
    """Train a case on this rank."""
    if case.model_type not in SGD_FAMILIES or case.optimizer != "adamw" or case.weights != "fp32":
        return Outcome(train_tiny(case.recipe(), num_rows=case.num_rows, num_steps=case.num_steps), None, None)
    # Not with ZeRO, whose master weights are fp32, and not on four ranks, which take long on few cores.
    in_fp64 = (
        case.precision == case.gradients == "fp32" and not STRATEGIES[case.strategy].package and case.world_size < 4
    )
    return Outcome(
        train_tiny(case.recipe(), num_rows=case.num_rows, num_steps=case.num_steps),
        train_tiny(case.recipe(sgd=True), num_rows=case.num_rows),
        train_tiny(case.recipe(sgd=True), torch.float64, num_rows=case.num_rows) if in_fp64 else None,
    )


@cache
def reference(precision: str, dropout: float, model_type: str = "bert", **facts: Any) -> Outcome:
    """Train on one process, in one microbatch, without recomputation. `facts` are further fields of the `Case`."""
    case = Case("ddp", 1, False, precision, "none", dropout, model_type=model_type, **facts)
    return once(f"parity {case!r}", lambda: train(case))


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def largest_difference(curve: Curve, expected: Curve) -> float:
    assert curve.weights.keys() == expected.weights.keys()
    return max((curve.weights[name] - weight).abs().max().item() for name, weight in expected.weights.items())


def assert_same_curve(curve: Curve, expected: Curve, tolerance: Tolerance = TOLERANCES["fp32"]) -> None:
    """Compare loss and gradient norm of each step. `expected` may have more steps."""
    assert 0 < len(curve.losses) <= len(expected.losses)
    for step in range(len(curve.losses)):
        loss = relative(curve.losses[step], expected.losses[step])
        norm = relative(curve.grad_norms[step], expected.grad_norms[step])
        assert loss <= tolerance.loss, f"loss of step {step + 1} is off by {loss:.1e}"
        assert norm <= tolerance.grad_norm, f"norm of step {step + 1} is off by {norm:.1e}"


def assert_parity(outcomes: list[Outcome], case: Case) -> None:
    """Compare the outcomes of a layout with those of one process, and replicas with each other.

    Args:
        outcomes: The outcomes of all ranks.
        case: The case that they trained.
    """
    same = {"task": case.task, "num_layers": case.num_layers, "has_few_rows": case.num_rows == FEW_ROWS}
    same |= {"gradients": case.gradients} if case.gradients != "fp32" else {}
    same |= {"optimizer": case.optimizer} if case.optimizer != "adamw" else {}
    same |= {"weights": case.weights} if case.weights != "fp32" else {}
    expected, tolerance = reference(case.precision, case.dropout, case.model_type, **same), TOLERANCES[case.tolerance]
    digests: dict[str, str] = {}
    for outcome in outcomes:
        assert len(outcome.curve.losses) == case.num_steps
        assert_same_curve(outcome.curve, expected.curve, tolerance)
        if outcome.sgd is not None:
            assert expected.sgd is not None
            assert relative(outcome.sgd.grad_norms[0], expected.sgd.grad_norms[0]) <= tolerance.grad_norm
            assert largest_difference(outcome.sgd, expected.sgd) <= tolerance.sgd_weights, "weights after one step"
        if outcome.sgd_fp64 is not None:
            assert expected.sgd_fp64 is not None
            assert largest_difference(outcome.sgd_fp64, expected.sgd_fp64) <= 1e-11, "weights after one step in fp64"
        for part, digest in outcome.curve.digests.items():
            assert digests.setdefault(part, digest) == digest, f"ranks that hold the same part ({part}) differ"
