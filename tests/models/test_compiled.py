"""Compiled layers: one graph for each kind of layer, no graph break, the masks and the results of the model itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import families
from tests.helpers.families import CONFIGS, ROWS, VARIANTS, build, has_head, inputs_of
from trainer.base.errors import UsageError
from trainer.models import compiled
from trainer.models.attention import FLAT
from trainer.models.checkpointing import checkpoint_layers
from trainer.models.compiled import CompiledLayers, compilations
from trainer.models.families.table import layers_of
from trainer.models.layer_hooks import flatten_layers
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows

CPU = torch.device("cpu")
HEADS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")
MARKS = {"bert": (), "t5": pytest.mark.slow, "modernbert": pytest.mark.slow}


@pytest.fixture(autouse=True)
def without_earlier_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Training:
    """A tiny model of a family, with or without compiled layers; `flat` ones process tokens without padding."""

    def __init__(
        self, family: str, backend: str | None, how: str = "none", dropout: float = 0.1, flat: bool = False
    ) -> None:
        model_type, variant = (VARIANTS[family][0], family) if family in VARIANTS else (family, "")
        self.head = next(head for head in HEADS if has_head(model_type, head))
        self.model_type, self.keys = model_type, DropoutKeys(0)
        self.model = build(model_type, self.head, dropout, self.keys, variant)
        self.is_flat = flat
        if flat:
            flatten_layers(self.model)
        checkpoint_layers(layers_of(self.model).values(), how, self.keys)
        self.layers = None
        if backend:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiled, "BACKEND", backend)
                self.layers = CompiledLayers(layers_of(self.model).values(), self.keys, CPU)

    def step(self, step: int, more: int = 0, rows: int = ROWS) -> list[Tensor]:
        """Return the loss and the gradients of a step, with `more` positions and some of the rows."""
        inputs = {name: value[:rows] for name, value in inputs_of(self.model_type, self.head).items()}
        if self.model_type != "vit":
            inputs = {name: torch.cat([value, value[:, :more]], 1) for name, value in inputs.items()}
        without_cache = {"use_cache": False} if self.model_type in ("t5", "gpt2", "llama", "qwen3") else {}
        flat, of_rows = None, {}
        if self.is_flat:
            mask = inputs["attention_mask"]
            flat = of_rows[FLAT] = FlatRows.of(mask.sum(-1).tolist(), mask.shape[1], CPU)
        with self.keys.use(MicrobatchKey(step, torch.arange(rows), flat)):
            loss = self.model(**inputs, **of_rows, **without_cache).logits.float().square().mean()
        self.model.zero_grad()
        loss.backward()
        if self.layers is not None:
            self.layers.start()
        return [loss.detach(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]


def assert_same(one: Training, other: Training, *steps: tuple[int, ...]) -> None:
    for step in steps:
        for plain, made in zip(one.step(*step), other.step(*step), strict=True):
            torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=MARKS.get(family, pytest.mark.nightly)) for family in CONFIGS]
)
def test_each_kind_of_layer_of_a_family_is_one_graph(family):
    """With `fullgraph`, torch raises an error at a graph break."""
    before = compilations()
    assert_same(Training(family, None), Training(family, "eager"), (0,), (1,))
    graphs, breaks, _ = (now - then for now, then in zip(compilations(), before, strict=True))
    # Some layers have a second graph for inputs of another layout. ModernBERT has global and local attention, and no
    # norm in its first layer. T5 has two stacks, with the position bias in the first layer of each.
    assert 1 <= graphs <= {"t5": 6, "modernbert": 3, "bart": 3}.get(family, 2)
    assert breaks == 0


@pytest.mark.parametrize(
    "flat", [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=pytest.mark.slow)]
)
def test_further_widths_and_numbers_of_rows_need_no_further_graph(flat: bool):
    one, other = (Training("bert", backend, flat=flat) for backend in (None, "eager"))
    before = compilations()[0]
    assert_same(one, other, (0,), (1,), (2, 1))
    assert compilations()[0] == before + 1
    assert_same(one, other, (3, 3), (4, 5, 2))
    assert compilations()[0] == before + 1


@pytest.mark.parametrize(
    "how", [pytest.param("selective", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.nightly)]
)
def test_recomputed_layers_draw_their_masks_again(how):
    flat = how == "selective"
    assert_same(Training("bert", None, flat=flat), Training("bert", "aot_eager", how, flat=flat), (0,), (1,), (2, 3))


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.slow if family == "bert" else pytest.mark.nightly) for family in CONFIGS],
)
def test_with_inductor(family, monkeypatch):
    monkeypatch.setattr(families, "LENGTH", 30)  # more positions than a vector of the CPU has numbers
    assert_same(Training(family, None), Training(family, "inductor"), (0,), (1,))


def test_masks_of_another_step_are_detected():
    """The comparison can fail."""
    one, other = Training("bert", None), Training("bert", "eager")
    assert_same(one, other, (0,))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other.step(2)[0], one.step(1)[0], rtol=1e-5, atol=1e-6)


def test_an_evaluation_runs_uncompiled():
    training = Training("bert", "eager")
    training.step(0)
    training.model.eval()
    before = compilations()[0]
    with torch.no_grad():
        training.model(**inputs_of("bert"))
    assert compilations()[0] == before


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"`compile` is true.*neither g\+\+ nor clang\+\+"):
        CompiledLayers([nn.Linear(2, 2)], None, CPU)
