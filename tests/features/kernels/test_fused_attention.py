"""The fused attention kernel: where it runs, its plan, and all its tests in Triton's interpreter."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.families import CONFIGS
from tests.helpers.interpreting import run_interpreted
from tests.tools.plan.measured import SMALL_BERT, recipe_of
from trainer.features.context.attention import HEADS_ATTENTION, RING_ATTENTION
from trainer.features.kernels import fused_attention
from trainer.models import attention
from trainer.models.attention import FLAT_ATTENTION, KEYED_ATTENTION, attention_notes
from trainer.parallel import kernel_support
from trainer.recipe.plan import plan_run
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.ledger import ACTIVATIONS
from trainer.tools.plan.simulated_step import plan_step


@pytest.mark.parametrize(
    "marks", [pytest.param("not nightly", marks=pytest.mark.slow), pytest.param("nightly", marks=pytest.mark.nightly)]
)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_in_tritons_interpreter(marks: str):
    run_interpreted(Path(__file__).with_name("interpreted_attention.py"), 550, marks)


def test_without_a_gpu_the_eager_function_runs():
    assert kernel_support.obstacle(torch.device("cpu")) == "the device is a cpu, and the kernel needs an NVIDIA GPU"


def test_layers_that_share_a_mask_list_its_tiles_once(monkeypatch):
    found = []
    monkeypatch.setattr(fused_attention, "visible_tiles", lambda mask, *_: found.append(mask))
    monkeypatch.setitem(kernel_support.KERNELS, "attention", fused_attention)
    heads = torch.zeros(2, 1, 8, 4)
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)

    def list_tiles(inputs: Any) -> None:
        attention._tiles(inputs.mask, attention._expanded(inputs.mask, inputs.shape), inputs)

    inputs = attention._Inputs(heads, heads, heads, mask, None)
    for _ in range(2):
        list_tiles(inputs)
    assert len(found) == 1
    mask[0, ..., -1] = False
    list_tiles(inputs)
    assert len(found) == 2
    list_tiles(inputs._replace(query=torch.zeros(2, 1, 4, 4)))
    assert len(found) == 3


class TestNotes:
    """A run on a GPU names the function that computes its attention."""

    GPU = torch.device("cuda", 0)

    def model(self, implementation: str):
        config = AutoConfig.for_model("bert", hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=9)
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, attn_implementation=implementation)

    MASKS = (
        "attention without dropout reads padded rows by torch's variable-length attention in 16 bits, and other masks"
        " by torch's SDPA"
    )

    def notes(
        self, monkeypatch, *, missing: str = "", capability=(9, 0), implementation: str = KEYED_ATTENTION,
        flash: bool = True,
    ):  # fmt: skip
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(kernel_support, "find_spec", lambda name: None if name == missing else object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        return attention_notes(self.model(implementation), self.GPU)

    def test_the_kernel(self, monkeypatch):
        assert self.notes(monkeypatch) == ["attention with dropout runs in the fused kernel", self.MASKS]
        assert self.notes(monkeypatch, implementation=HEADS_ATTENTION) == self.notes(monkeypatch)
        around = self.notes(monkeypatch, implementation=RING_ATTENTION)
        assert around == ["attention around a ring runs in the fused kernel"]

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"missing": "triton"}, "Triton is not installed"),
            ({"missing": "triton.knobs"}, "Triton is older than 3.4"),
            ({"capability": (7, 5)}, "Tesla T4 is older than"),
        ],
    )
    def test_the_eager_function(self, monkeypatch, options, reason):
        note, without = self.notes(monkeypatch, **options)
        assert note.startswith("attention with dropout stores its probabilities, because ")
        assert reason in note
        if "capability" in options:
            assert without.startswith("attention without dropout passes masks of padding to torch's SDPA, because ")
            assert reason in without
        else:
            assert without == self.MASKS
        (note,) = self.notes(monkeypatch, implementation=RING_ATTENTION, **options)
        assert note.startswith("attention around a ring computes its blocks by operations of torch, because ")
        assert reason in note

    def test_torchs_dropout(self, monkeypatch):
        (note,) = self.notes(monkeypatch, implementation="sdpa")
        assert note == "attention runs in torch's SDPA; a mask of padding or of a window keeps FlashAttention off"

    def test_a_missing_kernel(self, monkeypatch):
        monkeypatch.delitem(kernel_support.KERNELS, "attention")
        assert self.notes(monkeypatch, flash=False) == [
            "attention with dropout stores its probabilities, because no kernel of attention is installed",
            "attention without dropout passes masks of padding to torch's SDPA, because this torch was built without"
            " FlashAttention",
        ]

    def of_rows(self, monkeypatch, flash: bool = True, **options):
        return self.notes(monkeypatch, implementation=FLAT_ATTENTION, flash=flash, **options)

    def test_flat_rows(self, monkeypatch):
        """Without keyed dropout, a model has none of its sites."""
        without = "attention reads flat rows without padding in the fused kernel, where it has no dropout"
        padded = "attention pads flat rows for torch's dropout: only layout-invariant dropout has a kernel"
        torchs = "without dropout in 16 bits, torch's variable-length attention reads flat rows"
        assert self.of_rows(monkeypatch) == [padded, without, torchs]
        assert self.of_rows(monkeypatch, flash=False) == [padded, without]
        monkeypatch.setattr("trainer.models.attention.has_site", lambda module: True)
        assert self.of_rows(monkeypatch) == ["attention reads flat rows without padding in the fused kernel", torchs]
        reason = "the GPU Tesla T4 is older than compute capability 8.0"
        assert self.of_rows(monkeypatch, capability=(7, 5)) == [f"attention pads flat rows, because {reason}"]

    def test_of_other_attention_and_devices_there_are_none(self, monkeypatch):
        assert self.notes(monkeypatch, implementation="eager") == []
        assert attention_notes(self.model(KEYED_ATTENTION), torch.device("cpu")) == []


class TestPlans:
    LENGTH = 256
    RECIPE = recipe_of({"model": {"config": {**SMALL_BERT, "max_position_embeddings": LENGTH}, "tokenizer": "none"}})

    @classmethod
    @cache
    def step(cls, cuda: bool, fused: bool = True, padding_free: bool = False):
        data = cls.RECIPE.data.model_copy(update={"padding_free": padding_free})
        with mock.patch.object(fused_attention, "_BITS_SIZE", 4):  # the recipe is in fp32
            return plan_step(plan_run(cls.RECIPE.model_copy(update={"data": data}), 1), 0, cls.LENGTH, cuda, fused)

    @property
    def pairs(self) -> int:
        """Queries times keys of all layers, heads and rows of a microbatch."""
        layers, heads = SMALL_BERT["num_hidden_layers"], SMALL_BERT["num_attention_heads"]
        return self.RECIPE.training.micro_batch_size * layers * heads * self.LENGTH**2

    @pytest.mark.slow
    def test_of_a_gpu_store_no_probabilities(self):
        """The eager function keeps 9 bytes for each query, key and head of all layers, and the kernel one bit."""
        fused, eager, on_cpu = (
            self.step(*how).peak.by_component[ACTIVATIONS] for how in ((True, True), (True, False), (False, True))
        )
        bits = self.pairs / 8
        assert 9 * self.pairs - bits <= eager - fused < 1.5 * 9 * self.pairs - bits
        assert on_cpu == pytest.approx(eager, rel=0.01)

    @pytest.mark.slow
    def test_count_the_bits_of_masks(self, monkeypatch):
        kept = self.step(True).peak.by_component[ACTIVATIONS]
        monkeypatch.setattr(fused_attention, "keeps_bits", lambda *_: False)
        drawn = type(self).step.__wrapped__(type(self), True).peak.by_component[ACTIVATIONS]
        assert kept - drawn == self.pairs / 8

    @pytest.mark.slow
    def test_count_the_products_of_the_kernels(self):
        """The kernels compute nine products, where the eager function computes six."""
        fused, eager = (sum(self.step(True, how).totals.flops.values()) for how in (True, False))
        head_dim = SMALL_BERT["hidden_size"] // SMALL_BERT["num_attention_heads"]
        microbatches = 4
        assert fused - eager == microbatches * 3 * 2 * self.pairs * head_dim

    @pytest.mark.slow
    def test_of_flat_rows_on_a_gpu_pad_nothing(self):
        """Attention keeps as much as that of padded rows without padding, and computes the same products."""
        found, padded = self.step(True, True, True), self.step(True, True)
        indices = 2 * 8 * self.RECIPE.training.micro_batch_size * self.LENGTH  # rows and positions of the tokens
        assert found.peak.by_component[ACTIVATIONS] < padded.peak.by_component[ACTIVATIONS] + 4 * indices
        assert sum(found.totals.flops.values()) == sum(padded.totals.flops.values())

    @pytest.mark.slow
    def test_of_flat_rows_with_a_window_count_its_pairs(self):
        """Of three layers, two see a window, forward in two products of matrices and backward in seven."""

        length = 24

        def flops(window: int) -> int:
            config = {
                **CONFIGS["modernbert"],
                "model_type": "modernbert",
                "num_hidden_layers": 3,
                "local_attention": window,
            }
            keys = {"model": {"config": config, "tokenizer": "none"}, "data": {"padding_free": True}}
            return sum(plan_step(plan_run(recipe_of(keys), 1), 0, length).totals.flops.values())

        places = torch.arange(length)
        hidden = int(((places[:, None] - places).abs() > 4 // 2).sum())
        rows, hidden_size = 16, CONFIGS["modernbert"]["hidden_size"]
        assert flops(2 * length) - flops(4) == 2 * rows * (2 + 7) * 2 * hidden_size * hidden

    @pytest.mark.parametrize(("name", "runs"), [("A100-80", True), ("H100", True), ("T4", False), ("V100-32", False)])
    def test_know_the_gpus_that_run_it(self, name, runs):
        machine = parse_devices(name).machine
        assert machine is not None
        assert machine.runs_kernels == runs
