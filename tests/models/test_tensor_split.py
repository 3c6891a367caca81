"""Every family cut over two ranks: outputs and gradients are those of the whole model."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.helpers.families import (
    CONFIGS,
    EXPERTS,
    HEADS,
    LENGTH,
    NEAR_FAMILIES,
    ROWS,
    SCALED,
    SHIPPED,
    VARIANTS,
    VOCABULARY,
    build,
    has_head,
    inputs_of,
)
from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import TINY_BART, TINY_BERT, check_model, tiny_recipe
from trainer.base.errors import UsageError
from trainer.models.families.table import FAMILIES
from trainer.models.place import ModelCut, StageChoice, place
from trainer.models.tensor_split import split_model
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.placement import Placements, Split
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.shards.slices import join_parts, part_of
from trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainer.recipe.plan import plan_run

CASES = [
    (model_type, head) for model_type in (*CONFIGS, *SHIPPED, *SCALED) for head in HEADS if has_head(model_type, head)
]
DROPPED = ("bert", "albert", "deberta-v2", "distilbert", "modernbert", "gpt2", "t5", "bart")
SEQUENCE = [model_type for model_type, family in FAMILIES.items() if family.tensor and family.tensor.sequence_parallel]
VOCABULARY_HEADS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


def logits_of(output: Any) -> Tensor:
    return torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits


def compare(
    model_type: str, head: str, dropout: float, variant: str = "", sequence: bool = False, length: int = LENGTH
) -> None:
    """On this rank: the whole model beside its part."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    keys = DropoutKeys(seed=0)
    whole, part = (build(model_type, head, dropout, keys, variant) for _ in range(2))
    placements = split_model(part, RowGroups(group), sequence)
    key = MicrobatchKey(0, torch.arange(ROWS))
    inputs = {name: tensor[:, :length] for name, tensor in inputs_of(model_type, head).items()}
    with keys.use(key):
        expected = logits_of(whole(**inputs))
    with keys.use(key):
        logits = logits_of(part(**inputs))
    if head in VOCABULARY_HEADS:
        held = part_of(expected, Split(logits.dim() - 1, "tp"), rank, size)
        assert_close(logits[..., : part_size(rank, size)], held[..., : part_size(rank, size)])
        labels = torch.randint(0, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(2))
        labels[1, 2] = -100
        vocab_parallel_cross_entropy(logits, labels, group, VOCABULARY).backward()
        F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    else:
        assert_close(logits, expected)
        expected.square().sum().backward()
        logits.square().sum().backward()
    assert_gradients(whole, part, placements, rank, size)


def part_size(rank: int, size: int) -> int:
    """Columns of the vocabulary on this rank, without padding."""
    columns = -(-VOCABULARY // size)
    return max(0, min(columns, VOCABULARY - rank * columns))


def assert_gradients(whole: nn.Module, part: nn.Module, placements: Placements, rank: int, size: int) -> None:
    parameters = dict(part.named_parameters())
    assert parameters.keys() == dict(whole.named_parameters()).keys() == placements.keys()
    num_cut = 0
    # Some gradients are zero but for rounding (a key's bias: softmax does not see it), hence the largest of the model.
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for name, parameter in whole.named_parameters():
        assert placements[name].shape == tuple(parameter.shape)
        held, gradient = parameter.data, parameter.grad
        for split in placements[name].splits:
            num_cut += 1
            held = part_of(held, split, rank, size)
            gradient = None if gradient is None else part_of(gradient, split, rank, size)
        assert torch.equal(parameters[name].data, held), name
        if gradient is None:
            assert parameters[name].grad is None, name
        else:
            if "tp" in placements[name].partial_over:
                dist.all_reduce(parameters[name].grad)
            difference = float((parameters[name].grad - gradient).abs().max()) if gradient.numel() else 0.0
            assert difference <= 1e-5 * largest, f"gradient of {name}: {difference:.1e} of {largest:.1e}"
    assert num_cut > 8


def _marks(model_type: str, head: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return no mark for a head of each family, for vocabularies of families that differ, and for each head of BERT."""
    is_first = head == next(other for other in HEADS if has_head(model_type, other))
    differs = model_type in CONFIGS and model_type not in NEAR_FAMILIES
    is_quick = is_first or model_type == "bert" or (differs and head in VOCABULARY_HEADS)
    return () if is_quick else (pytest.mark.slow if differs else pytest.mark.nightly,)


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1].removeprefix('AutoModelFor')}", marks=_marks(*case))
        for case in CASES
    ],
)
def test_outputs_and_gradients_equal_the_whole_model(ranks: RankPools, model_type, head):
    ranks(2).run(compare, model_type, head, 0.0)


@pytest.mark.parametrize("model_type", DROPPED)
def test_dropout_masks_are_parts_of_the_masks_of_one_process(ranks: RankPools, model_type):
    ranks(2).run(compare, model_type, "AutoModelForSequenceClassification", 0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_modules_of_the_same_family(ranks: RankPools, variant):
    model_type, _ = VARIANTS[variant]
    head = "AutoModelForSeq2SeqLM" if model_type == "t5" else "AutoModelForMaskedLM"
    ranks(2).run(compare, model_type, head, 0.1, variant)


STAGED = [model_type for model_type in CONFIGS if FAMILIES[model_type].stages]


def run_parts_of_stages(model_type: str, sequence: bool) -> None:
    """On this rank: its part of each of two stages, one after the other, beside the whole model."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    head = "AutoModelForImageClassification" if model_type == "vit" else "AutoModelForSequenceClassification"
    whole = build(model_type, head, 0.0, DropoutKeys(seed=0))
    inputs: dict[str, Any] = inputs_of(model_type, head)
    if "use_cache" in inspect.signature(type(whole).forward).parameters:
        inputs["use_cache"] = False
    expected = whole(**inputs).logits
    expected.square().sum().backward()
    received: Any = ()
    parts = []
    for stage in (0, 1):
        module: Any = build(model_type, head, 0.0, DropoutKeys(seed=0))
        made = place(module, ModelCut(RowGroups(group), sequence, choice=StageChoice(stage, 2)))
        assert made.stage is not None
        received = made.stage.run(module.forward, received, inputs)
        parts.append((module, made))
    assert_close(received.logits, expected)
    received.logits.square().sum().backward()
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    compared = 0
    for module, made in parts:
        for name, parameter in module.named_parameters():
            placement = made.placements[name]
            gradient = whole.get_parameter(name).grad if not placement.stages else None
            if gradient is None:
                continue
            for split in placement.splits:
                gradient = part_of(gradient, split, rank, size)
            if "tp" in placement.partial_over:
                dist.all_reduce(parameter.grad)
            difference = float((parameter.grad - gradient).abs().max()) if gradient.numel() else 0.0
            assert difference <= 1e-5 * largest, f"gradient of {name}: {difference:.1e} of {largest:.1e}"
            compared += 1
    assert compared > 8


@pytest.mark.parametrize(
    ("model_type", "sequence"),
    [
        pytest.param(
            model_type,
            sequence,
            marks=pytest.mark.nightly
            if model_type in NEAR_FAMILIES
            else ()
            if model_type == "bert" or (sequence and model_type in ("t5", "llama"))
            else pytest.mark.slow,
        )
        for sequence in (False, True)
        for model_type in STAGED
        if model_type in SEQUENCE or not sequence
    ],
)
def test_stages_over_tensor_ranks_are_the_whole_model(ranks: RankPools, model_type, sequence):
    ranks(2).run(run_parts_of_stages, model_type, sequence)


class TestRefusals:
    """Before a rank starts: `trainer check` asks with a model on the meta device."""

    @pytest.mark.parametrize(
        ("config", "parallel", "words"),
        [
            ({"model_type": "llama", **CONFIGS["llama"]}, {"tensor": 4}, "2 key and value heads, but is 4; use 1 or 2"),
            (TINY_BERT, {"tensor": 3}, "4 attention heads, but is 3; use 1, 2 or 4"),
            (TINY_BERT, {"tensor": 5}, "4 attention heads, but is 5; use 1, 2 or 4"),
            (
                {**TINY_BERT, "intermediate_size": 66},
                {"tensor": 4},
                "66 features of bert.encoder.layer.0.intermediate.dense, but is 4; use 1 or 2",
            ),
            ({"model_type": "resnet"}, {"tensor": 2}, "tensor parallelism does not support the family resnet"),
            (
                {"model_type": "t5", **CONFIGS["t5"]},
                {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
                "is zero_bubble, which the family t5 does not support",
            ),
            (
                TINY_BART,
                {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
                "is zero_bubble, which the family bart does not support",
            ),
        ],
    )
    def test_models_that_cannot_be_split(self, config, parallel, words):
        keys = {"task": {"type": "image_classification"}} if config["model_type"] == "resnet" else {}
        recipe = tiny_recipe(model={"config": config}, data={"max_length": 16}, parallel=parallel, **keys)
        plan = plan_run(recipe, parallel.get("tensor", 2))
        with pytest.raises(UsageError) as caught:
            check_model(plan)
        assert words in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1

    def test_a_model_that_can_be_cut(self):
        assert check_model(plan_run(tiny_recipe(data={"max_length": 16}, parallel={"tensor": 2}), 2)).stages is None
        bart = {"task": {"type": "seq2seq_lm"}, "model": {"config": TINY_BART}, "data": {"max_length": 16}}
        assert check_model(plan_run(tiny_recipe(**bart, parallel={"tensor": 2}), 2)).stages is None


def test_every_family_has_a_case():
    assert CONFIGS.keys() == {model_type for model_type, family in FAMILIES.items() if family.tensor} - EXPERTS.keys()
    assert not SHIPPED.keys() & FAMILIES.keys()
    assert set(HEADS) == {head for _, head in CASES}


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("bert", "AutoModelForMaskedLM"),
        pytest.param("deberta-v2", "AutoModelForTokenClassification", marks=pytest.mark.slow),
        ("t5", "AutoModelForSeq2SeqLM"),
    ],
)
def test_four_ranks_with_dropout(ranks: RankPools, model_type, head):
    ranks(4).run(compare, model_type, head, 0.1)


class TestSequenceParallel:
    """Between the matrices of a layer a rank works on its positions only, which the ranks need not divide (7)."""

    @pytest.mark.parametrize(
        "model_type",
        [pytest.param(name, marks=pytest.mark.nightly if name in NEAR_FAMILIES else ()) for name in SEQUENCE],
    )
    def test_is_the_whole_model(self, ranks: RankPools, model_type):
        head = next(head for head in HEADS if has_head(model_type, head))
        ranks(2).run(compare, model_type, head, 0.1, sequence=True)

    @pytest.mark.parametrize(
        ("model_type", "head"),
        [
            ("bert", "AutoModelForMaskedLM"),
            ("gpt2", "AutoModelForCausalLM"),
            ("t5", "AutoModelForSeq2SeqLM"),
        ],
    )
    def test_before_a_head_over_the_vocabulary(self, ranks: RankPools, model_type, head):
        ranks(2).run(compare, model_type, head, 0.1, sequence=True)

    @pytest.mark.parametrize("length", [pytest.param(7, marks=pytest.mark.slow), 3, 1])
    def test_on_more_ranks_than_positions(self, ranks: RankPools, length):
        ranks(4).run(compare, "bert", "AutoModelForTokenClassification", 0.1, sequence=True, length=length)

    @pytest.mark.parametrize(
        "model_type", ["albert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deberta-v2", "olmo"))]
    )
    def test_is_refused_where_a_family_has_none(self, ranks: RankPools, model_type):
        with pytest.raises(RankError, match=rf"`parallel\.sequence` is true, but the family {model_type} has no"):
            ranks(2).run(compare, model_type, "AutoModelForSequenceClassification", 0.0, sequence=True)

    def test_leaves_a_rank_less_to_keep(self, ranks: RankPools):
        """Bytes that autograd keeps for the backward pass: norms, dropout and residuals are of half the positions."""
        for cut, whole in zip(ranks(2).run(kept_bytes, True), ranks(2).run(kept_bytes, False), strict=True):
            assert cut < 0.95 * whole, (cut, whole)


def kept_bytes(sequence: bool) -> int:
    keys = DropoutKeys(0)
    model = build("bert", "AutoModelForSequenceClassification", 0.1, keys)
    split_model(model, RowGroups(dist.group.WORLD), sequence)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        keys.use(MicrobatchKey(0, torch.arange(ROWS))),
    ):
        logits = model(**inputs_of("bert")).logits
    assert logits.requires_grad
    return sum(size for storage, size in kept.items() if storage not in weights)


def test_parts_joined_are_the_whole(ranks: RankPools):
    parts = ranks(2).run(held_by_rank, "gpt2", "AutoModelForSequenceClassification")
    whole = dict(build("gpt2", "AutoModelForSequenceClassification", 0.0, DropoutKeys(0)).named_parameters())
    placements = parts[0][1]
    for name, parameter in whole.items():
        pieces = [weights[name] for weights, _ in parts]
        for split in placements[name].splits:
            assert torch.equal(join_parts(pieces, split, parameter.shape[split.dim]), parameter)
        if not placements[name].splits:
            assert all(torch.equal(piece, parameter) for piece in pieces)


def held_by_rank(model_type: str, head: str) -> tuple[dict[str, Tensor], Placements]:
    model = build(model_type, head, 0.0, DropoutKeys(0))
    placements = split_model(model, RowGroups(dist.group.WORLD))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, placements
