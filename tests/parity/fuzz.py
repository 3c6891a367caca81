"""Random recipes under random layouts, each compared with one process.

    python -m tests.parity.fuzz --seed S --cases N

A case is a recipe with its data and one to three layouts (`tests/parity/draws.py`). The run starts under the first
layout, stops and goes on from its checkpoint under the next one. Loss and gradient norm of every step, the
evaluations, and the exported model are compared with a run of one process, whose global batch is one microbatch.
transformers loads both exported models and computes their outputs.

A case beyond the limits counts as rounding if two things hold. One process whose weights are each moved by one rounding
differs from itself by a quarter as much, at the same step or before. And the case equals one process in a finer
precision: 16 bits in fp32, and fp32 in fp64 with ddp in place of ZeRO, which needs fp32. The report counts such cases.
With `--fp64`, all cases are computed in fp64.

`--case K` runs one case, and `--wide --cases 1` a case of BERT-base's width. A failed case prints its recipes and the
command that repeats it. With `--report FILE`, the results go into a file of JSON lines. Cases in the file that did not
fail are not run again, and the table covers the whole file. Several processes may share a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.helpers.families import EXPERTS
from tests.helpers.forking import forking
from tests.helpers.ranks import RankError, RankPools
from tests.parity.draws import FAMILY_CONFIGS, Drawn, draw, wide

_MODELS = [family.replace("-", "_") for family in (*FAMILY_CONFIGS, *EXPERTS)]
PRELOADED = (
    *("deepspeed", "datasets", "sklearn.metrics", "torch.distributed.fsdp", "torch.distributed.pipelining", "peft"),
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
)
TIMEOUT_SECONDS = 300.0
MOST_ATTEMPTS = 200
SMALLEST = 1e-3  # losses and norms below this are compared by their difference, divided by this
# Largest differences: of the losses of steps and evaluations, of norms, and of the outputs of exported models.
LIMITS: dict[str, tuple[float, float, float]] = {
    "fp32": (1e-5, 1e-5, 1e-4),
    "bf16": (2 * 2**-7, 8 * 2**-7, 16 * 2**-7),
    "fp16": (4 * 2**-10, 16 * 2**-10, 16 * 2**-10),
    "fp64": (1e-10, 1e-10, 1e-10),
}
SKIPS = "skips"  # the quantity that is 1 at a step that fp16 skips in one run only
NOISE = 1e-5  # norms below this, also as a share of the largest of a run, are of rounding errors only
FIRST_LOSS, FIRST_NORM = 1e-6, 1e-5  # of the first step in fp32
EXPORTED = 1e-5  # of the loss of an exported model in fp32, computed by transformers
METRICS = 1e-4  # of metrics in fp32 and fp64; a perplexity has the absolute difference of its loss
ROUNDING = {"fp32": 2**-24, "bf16": 2**-8, "fp16": 2**-11}  # largest relative errors of rounding once
NUDGES = 8  # trainings of one process whose weights are moved by one rounding
MOST_OWN = 4  # times the largest difference that these make; layouts round in each step
_BEYOND = "differences beyond the limits"
_WITHOUT_ZERO = ("tensor", "sequence", "pipeline", "context")  # keys that ddp has too


@dataclass
class Trained:
    """The numbers of a part of a training, or the reason why it was refused before its first step."""

    steps: list[tuple[float, float, int]] = field(default_factory=list)  # loss, norm, skipped steps so far
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    refused: str = ""
    diverged: bool = False  # more steps than allowed were not finite


@dataclass
class Result:
    """The result of a case; `differences` are those of each quantity, by step."""

    number: int
    task: str
    family: str
    precision: str
    data: str
    layouts: list[str]
    groups: list[str]  # of the report
    seconds: float = 0.0
    differences: dict[str, list[float]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    compared_steps: int = 0
    all_steps: int = 0
    failure: str = ""
    is_own: bool = False  # one process differs as much from itself if its weights are moved by one rounding
    rounding: str = ""  # the differences beyond the limits that are its own, and that a finer precision does not have

    @property
    def worst(self) -> dict[str, float]:
        """The largest difference of each quantity."""
        return {name: max(values) for name, values in self.differences.items()}


# On the ranks


@dataclass(frozen=True)
class Nudge:
    """Multiplies each weight by 1 + `unit` or 1 - `unit`, by random signs."""

    unit: float
    seed: int

    def __call__(self, model: Any) -> None:
        import torch

        signs = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=signs) * 2 - 1
                parameter.mul_(1 + self.unit * sign.to(parameter.dtype))


def train_part(file: str, model: str | None, in_fp64: bool, nudge: Nudge | None = None) -> Trained:
    """Train the recipe in a file on this rank, from its last checkpoint; export the model if a folder is given."""
    gc.disable()  # passes over all objects take a quarter of the time
    try:
        return _train_part(file, model, in_fp64, nudge)
    finally:
        gc.collect()
        gc.freeze()  # the next pass looks only at objects of its part
        gc.enable()


def _train_part(file: str, model: str | None, in_fp64: bool, nudge: Nudge | None) -> Trained:
    import torch.distributed as dist

    from tests.helpers.training import TinyTraining, _compute_in, _mesh
    from trainer.base.errors import NonFiniteError, TrainerError
    from trainer.observe.meter import Meter
    from trainer.observe.observer import Observer
    from trainer.ranks.stopping import StopRequest
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe
    from trainer.training.assembly import assemble
    from trainer.training.loop import Loop
    from trainer.training.run_data import prepare_data
    from trainer.training.run_parts import best_evaluation

    _quiet()
    trained = Trained()

    class Recorder(Observer):
        def step(self, record: Any) -> None:
            trained.steps.append((record.loss, record.grad_norm, record.skipped_steps or 0))

        def evaluation(self, record: Any) -> None:
            trained.evaluations[record.step] = dict(record.metrics)

    import torch

    try:
        recipe = load_recipe(file).recipe
        plan = plan_run(recipe, dist.get_world_size())
        mesh = _mesh(plan.layout, torch.device("cpu"))
        data = prepare_data(recipe)
        parts = assemble(plan, mesh, data, partial(_compute_in, dtype=torch.float64) if in_fp64 else nudge)
    except TrainerError as error:
        return Trained(refused=f"{type(error).__name__}: {error}")
    training = TinyTraining(parts, parts.train_loader)
    try:
        saver = parts.saver()
        assert saver.resume(recipe.checkpoint.resume) == []
        observers = Recorder() if mesh.rank == 0 else Observer()
        meter = Meter()
        loop = Loop(
            recipe=recipe,
            engine=parts.engine,
            loader=parts.train_loader,
            validation=best_evaluation(parts, observers, lambda: None),
            mesh=mesh,
            observers=observers,
            meter=meter,
            saver=saver,
            steps_per_epoch=parts.steps_per_epoch,
            stop=StopRequest(),
        )
        with suppress(NonFiniteError):
            ending = loop.run()
            assert ending == ("stop_at_step" if recipe.training.stop_at_step else "finished")
            if model is not None:
                parts.export(model)
            return trained
        trained.diverged = True
        return trained
    finally:
        training.close()


def outputs_of(file: str, folders: Sequence[str]) -> list[tuple[float, Any]]:
    """Return loss and outputs of exported models on the validation split, computed by transformers."""
    import torch
    import transformers

    from trainer.data.loader import EvalLoader
    from trainer.recipe.reading.loading import load_recipe
    from trainer.training.run_data import prepare_data

    _quiet()
    recipe = load_recipe(file).recipe
    data = prepare_data(recipe)
    assert data.validation is not None
    task = data.task.for_evaluation()  # without weights of classes and label smoothing
    batching = data.preparation.batching
    (microbatch,) = EvalLoader(
        data.validation, len(data.validation), 0, 1, batching, num_workers=0, pin_memory=False, masking=data.masking
    )
    found = []
    for folder in folders:
        model, loading = getattr(transformers, task.auto_class_name).from_pretrained(folder, output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
        with torch.no_grad():
            # With a cache, transformers does not look for the documents of packed rows.
            cache = {"use_cache": False} if task.auto_class_name == "AutoModelForCausalLM" else {}
            output = model.eval()(**task.model_inputs(microbatch.inputs), **cache)
            scores = task.scores(output, microbatch.inputs, microbatch.labels)
            loss = 0.0 if task.rows_depend or task.inputs_of_start else float(task.loss_sum(scores, microbatch.labels))
        outputs = scores.float()
        if "attention_mask" in microbatch.inputs and outputs.dim() > 2 and not task.rows_are_labels:
            outputs = outputs[microbatch.labels != -100]  # not at padding
        if task.auto_class_name == "AutoModelForQuestionAnswering":
            # The bias of the head adds the same to all positions: its gradient is rounding, which AdamW enlarges.
            outputs = outputs.softmax(1)
        found.append((loss / max(1, int(task.num_valid(microbatch.labels))), outputs.numpy()))
    return found


def _quiet() -> None:
    import logging
    import warnings

    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


# In the parent


def check(file: Path, num_ranks: int) -> str:
    """Return the error of `trainer check` for a recipe, or an empty text."""
    from tests.helpers.training import check_model
    from trainer.base.errors import TrainerError
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe

    try:
        plan = plan_run(load_recipe(str(file)).recipe, num_ranks)
        if plan.pipeline is not None or plan.layout.ranks_per_row > 1:
            check_model(plan)
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Fuzz:
    """Runs cases on pools of ranks that stay warm.

    Args:
        seed: the seed of the draws.
        folder: an empty folder for the files of the cases.
        pools: the pools.
        timeout_seconds: the limit of a part of a case; a rank that hangs is killed with its process group.
        finer: "fp32": all cases compute in fp32; "fp64": in fp64, with ddp in place of ZeRO; "": as drawn.
    """

    def __init__(
        self, seed: int, folder: Path, pools: RankPools, timeout_seconds: float = TIMEOUT_SECONDS, finer: str = ""
    ) -> None:
        self.seed, self.folder, self._pools, self._timeout = seed, folder, pools, timeout_seconds
        self.in_fp64, self._in_fp32 = finer == "fp64", bool(finer)

    def run(self, number: int, first_attempt: int = 0) -> Result:
        """Draw a case until no draw is refused, and run it; in a finer precision too if it may be rounding."""
        refused: list[str] = []
        for attempt in range(first_attempt, MOST_ATTEMPTS):
            result, refusal = self._attempt(number, attempt)
            if not refusal:
                result.refused = refused
                return result
            refused.append(refusal)
        raise AssertionError(f"{MOST_ATTEMPTS} draws of case {number} were refused: {Counter(refused).most_common(3)}")

    def _attempt(self, number: int, attempt: int) -> tuple[Result, str]:
        drawn = self.drawn(number, attempt)
        result, refusal = self.try_case(drawn, number)
        if not refusal and result.is_own:
            finer = Fuzz(
                self.seed, self.folder, self._pools, self._timeout, "fp64" if result.precision == "fp32" else "fp32"
            )
            again, refused = finer._attempt(number, attempt)
            if not again.failure and not refused:
                result.failure, result.rounding = "", result.failure.partition("\n")[0]
        return result, refusal

    def drawn(self, number: int, attempt: int) -> Drawn:
        """Return a draw of a case, in the finer precision; in fp64, with ddp in place of ZeRO."""
        drawn = draw(self.seed, number, attempt)
        if self._in_fp32:
            drawn = replace(drawn, recipe={**drawn.recipe, "precision": "fp32"})
        if not self.in_fp64:
            return drawn
        zero = {"zero1", "zero2", "zero3"}
        parts = []
        for part in drawn.parts:
            parallel = part.sections["parallel"]
            if parallel["strategy"] in zero:
                kept = {key: value for key, value in parallel.items() if key in _WITHOUT_ZERO}
                parallel = {"strategy": "ddp", **kept}
            parts.append(replace(part, sections={**part.sections, "parallel": parallel}))
        return replace(drawn, parts=tuple(parts))

    def try_case(self, drawn: Drawn, number: int) -> tuple[Result, str]:
        """Run a drawn case, and return its result and the reason if it is refused."""
        start = time.monotonic()
        result = Result(
            number,
            drawn.task,
            drawn.family,
            str(drawn.recipe["precision"]),
            drawn.data,
            [_layout(part.num_ranks, part.sections) for part in drawn.parts],
            drawn.traits,
        )
        folder = self.folder / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            refusal = self._run(drawn, folder, result)
        except (AssertionError, RankError) as error:
            refusal, result.failure = "", str(error) or repr(error)
        except Exception:  # a fault of `check`
            refusal, result.failure = "", traceback.format_exc()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result.seconds = time.monotonic() - start
        if result.failure:
            result.failure += "\n" + self._recipes(drawn, number)
        return result, refusal

    def _recipes(self, drawn: Drawn, number: int) -> str:
        texts = [
            f"data: Drawn.write of tests/parity/draws.py: {drawn.data}, {drawn.num_rows} rows, seed {self.seed},"
            f" {drawn.tokens}",
            f"one process: {json.dumps(drawn.recipe)}",
            *(
                f"part {index}, {part.num_ranks} ranks: {json.dumps(drawn.recipe_of(part))}"
                for index, part in enumerate(drawn.parts)
            ),
            f"again: python -m tests.parity.fuzz --seed {self.seed} --case {number}",
        ]
        return "\n".join(texts)

    def _run(self, drawn: Drawn, folder: Path, result: Result) -> str:
        """Run a drawn case, and return the reason if it is refused."""
        drawn.write(folder, self.seed)
        recipes = [drawn.recipe_of(part) for part in drawn.parts]
        files = [folder / f"part-{index}.json" for index in range(len(recipes))]
        one = {**drawn.recipe, "checkpoint": {"folder": str(folder / "one")}}
        one["task"] = {key: value for key, value in one["task"].items() if key != "logits_chunk"}
        one["data"] = {**one["data"], "cache": "one-cache"}  # each computes its own reference of preferences
        reference_file = folder / "one.json"
        reference_file.write_text(json.dumps(one))
        for file, recipe in zip(files, recipes, strict=True):
            recipe["checkpoint"] = {**recipe["checkpoint"], "folder": str(folder / "run")}
            file.write_text(json.dumps(recipe))
        for file, part in zip((reference_file, *files), (None, *drawn.parts), strict=True):
            if problem := check(file, part.num_ranks if part else 1):
                return f"check: {problem}"

        in_fp64 = self.in_fp64  # then the models, which are fp32, are not compared
        expected = self._train(1, reference_file, folder / "one-model", in_fp64)
        if expected.refused:
            return f"start: {expected.refused}"
        found = Trained()
        for index, (file, part) in enumerate(zip(files, drawn.parts, strict=True)):
            is_last = index == len(files) - 1
            trained = self._train(part.num_ranks, file, folder / "model" if is_last else None, in_fp64)
            if trained.refused:
                return f"start: {trained.refused}"
            found.steps += trained.steps
            found.evaluations |= trained.evaluations
            found.diverged = trained.diverged
            if trained.diverged:
                break
        self._compare(found, expected, result)
        # A gradient of rounding errors, as of equal embeddings of all texts, becomes steps of full size under AdamW.
        noise = _noise(expected)
        is_noise = all(noise) or (any(noise) and drawn.recipe["optimizer"]["name"] == "adamw")
        models = not found.diverged and result.compared_steps == result.all_steps and not is_noise and not in_fp64
        if models:
            self._compare_models(reference_file, folder / "model", expected, result)
        loss, norm, outputs = LIMITS["fp64" if in_fp64 else result.precision]
        limits = {"loss": loss, "norm": norm, "evaluation": loss, "transformers": loss, "outputs": outputs, SKIPS: 0.0}
        if result.precision == "fp32" and not in_fp64:
            limits |= {"first loss": FIRST_LOSS, "first norm": FIRST_NORM}
        if result.precision == "fp32":
            limits["metrics"] = METRICS
        beyond = [
            f"{name} {value:.1e}" for name, value in result.worst.items() if not value <= limits.get(name, math.inf)
        ]
        if beyond and not result.failure:
            result.failure = f"{_BEYOND}: {', '.join(beyond)}"
            if not in_fp64 and math.inf not in result.worst.values():
                own = self._own_differences(reference_file, expected, models, result)
                result.is_own = all(
                    difference <= max(limits.get(name, math.inf), MOST_OWN * max(own.get(name, [0.0])[: step + 1]))
                    for name, differences in result.differences.items()
                    for step, difference in enumerate(differences)
                )
        if result.failure:
            result.failure += f"\none process: {expected}\nlayouts: {found}"
        return ""

    def _train(
        self, num_ranks: int, file: Path, model: Path | None, in_fp64: bool, nudge: Nudge | None = None
    ) -> Trained:
        pool = self._pools(num_ranks)
        folder = None if model is None or in_fp64 else str(model)
        results = pool.run(train_part, str(file), folder, in_fp64, nudge, timeout_seconds=self._timeout)
        refusals = {result.refused for result in results}
        assert len(refusals) == 1 or "" not in refusals, f"only some ranks refuse the recipe: {refusals}"
        trained: Trained = results[0]
        return trained

    def _own_differences(
        self, reference_file: Path, expected: Trained, models: bool, result: Result
    ) -> dict[str, list[float]]:
        """Return the largest differences of one process from itself, after each weight was moved by one rounding."""
        folder = reference_file.parent
        recipe = json.loads(reference_file.read_text())
        largest: dict[str, list[float]] = {}
        for seed in range(NUDGES):
            name = f"nudged-{seed}"
            file = folder / f"{name}.json"
            file.write_text(json.dumps({**recipe, "checkpoint": {"folder": str(folder / name)}}))
            nudge = Nudge(ROUNDING[result.precision], seed)
            nudged = self._train(1, file, folder / f"{name}-model", False, nudge)
            own = replace(result, differences={})
            self._compare(nudged, expected, own)
            if models and not nudged.diverged:
                self._compare_models(reference_file, folder / f"{name}-model", expected, own)
            for quantity, differences in own.differences.items():
                paired = zip_longest(largest.get(quantity, []), differences, fillvalue=0.0)
                largest[quantity] = [max(pair) for pair in paired]
        return largest

    def _compare(self, found: Trained, expected: Trained, result: Result) -> None:
        """Compare the steps and evaluations up to the first step that fp16 skips in one run only."""
        skips = [[step[2] for step in trained.steps] for trained in (found, expected)]
        same = next(
            (index for index, (one, other) in enumerate(zip(*skips, strict=False)) if one != other),
            min(map(len, skips)),
        )
        result.all_steps = len(expected.steps)
        result.compared_steps = same
        if same < min(map(len, skips)):
            result.differences[SKIPS] = [*[0.0] * same, 1.0]
        if same == min(map(len, skips)):
            assert found.diverged == expected.diverged, f"one diverged: {found}, {expected}"
            assert len(found.steps) == len(expected.steps), f"{len(found.steps)} steps, {len(expected.steps)} expected"
            assert found.evaluations.keys() == expected.evaluations.keys(), "evaluations at other steps"
        noise = _noise(expected)
        for index, (one, other) in enumerate(zip(found.steps[:same], expected.steps[:same], strict=True)):
            names = ("loss",) if noise[index] else ("loss", "norm")
            for name, value, of_one in zip(names, one, other, strict=False):
                _note(result, name, value, of_one)
                if index == 0:
                    _note(result, f"first {name}", value, of_one)
        for step, metrics in found.evaluations.items():
            if step <= same and step in expected.evaluations:
                for name, value in metrics.items():
                    quantity = "evaluation" if name == "loss" else "metrics"
                    _note(result, quantity, value, expected.evaluations[step][name])

    def _compare_models(self, file: Path, model: Path, expected: Trained, result: Result) -> None:
        import numpy as np

        models = [str(model), str(file.parent / "one-model")]
        own = self._pools(1).run(outputs_of, str(file), models, timeout_seconds=self._timeout)[0]
        (loss, outputs), (_, expected_outputs) = own
        # A model that diverged has the same outputs if the same ones are not finite, as losses of steps in `_note`.
        finite = np.isfinite(outputs) | np.isfinite(expected_outputs)
        outputs, expected_outputs = outputs[finite], expected_outputs[finite]
        scale = max(float(np.abs(expected_outputs).max(initial=0.0)), SMALLEST)
        difference = float(np.abs(outputs - expected_outputs).max(initial=0.0)) / scale
        result.differences["outputs"] = [difference if math.isfinite(difference) else math.inf]
        last = max(expected.evaluations)
        if result.precision == "fp32" and loss:
            _note(result, "transformers", loss, expected.evaluations[last]["loss"])


def _noise(trained: Trained) -> list[bool]:
    """Return for each step whether its gradient is of rounding errors only, as of a batch of equal texts."""
    norms = [norm for _, norm, _ in trained.steps]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    return [norm < NOISE * max(1.0, largest) for norm in norms]


def _note(result: Result, name: str, value: float, expected: float) -> None:
    """Note the relative difference of two numbers."""
    if value == expected or not (math.isfinite(value) or math.isfinite(expected)):
        difference = 0.0
    else:
        difference = abs(value - expected) / max(abs(expected), SMALLEST)
    difference = math.inf if math.isnan(difference) else difference
    result.differences.setdefault(name, []).append(difference)


def _layout(num_ranks: int, sections: dict[str, Any]) -> str:
    parallel = dict(sections["parallel"])
    words = [f"{num_ranks} {parallel.pop('strategy')}"]
    pipeline = parallel.pop("pipeline", None)
    if pipeline:
        words.append(f"{pipeline['stages']} stages {pipeline['schedule']}")
    words += [f"{key} {json.dumps(value)}" for key, value in parallel.items() if value not in (1, False, "none")]
    if sections["activation_checkpointing"] != "none":
        words.append(f"recompute {sections['activation_checkpointing']}")
    return ", ".join(words)


# The report


def table(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of the report: worst differences by group, refusals, and failures."""
    results = list(results)
    names = ("first loss", "first norm", "loss", "norm", "evaluation", "metrics", "transformers", "outputs")
    yield f"{len(results)} cases, {sum(bool(result.failure) for result in results)} failed"
    rounding = [f"{result.number} ({result.rounding})" for result in results if result.rounding]
    yield f"{len(rounding)} within the limits in a finer precision only: {'; '.join(rounding)}"
    skipped = [result for result in results if result.compared_steps < result.all_steps]
    yield f"fp16 skipped other steps than one process in {len(skipped)} cases, which were compared up to there"
    yield " | ".join(("group", "cases", *names))
    for precision, group in sorted({(result.precision, group) for result in results for group in result.groups}):
        members = [result for result in results if result.precision == precision and group in result.groups]
        worst = [max((result.worst.get(name, 0.0) for result in members), default=0.0) for name in names]
        yield " | ".join((f"{precision}, {group}", str(len(members)), *(f"{value:.1e}" for value in worst)))
    refused = Counter(_shape_of(text) for result in results for text in result.refused)
    yield f"{sum(refused.values())} draws were refused:"
    yield from (f"{count:5} {text}" for text, count in refused.most_common())


def _shape_of(refusal: str) -> str:
    """Return a refusal without its numbers and paths, so that equal ones count together."""
    return re.sub(r"/\S+", "PATH", re.sub(r"\d+", "N", refusal))[:200]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases, print the report, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="the number of the only case")
    parser.add_argument("--attempt", type=int, default=0, help="the first draw of the case")
    parser.add_argument("--report", type=Path, help="a file of JSON lines for the results")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for a part of a case")
    parser.add_argument("--fp64", action="store_true", help="compute in fp64, with ddp in place of ZeRO")
    parser.add_argument("--wide", action="store_true", help="run the case of BERT-base's width instead")
    options = parser.parse_args(arguments)
    numbers = [options.case] if options.case is not None else range(options.first, options.first + options.cases)
    forking(PRELOADED)
    results = _read(options.report)
    done = {result.number for result in results.values() if not result.failure}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_scratch()) as folder:
        pools = RankPools()
        fuzz = Fuzz(options.seed, Path(folder), pools, options.timeout, "fp64" if options.fp64 else "")
        try:
            for number in numbers:
                if number in done:
                    continue
                result = fuzz.try_case(wide(), number)[0] if options.wide else fuzz.run(number, options.attempt)
                results[number] = result
                state = "FAILED" if result.failure else "rounding" if result.rounding else "ok"
                worst = " ".join(f"{name} {value:.0e}" for name, value in result.worst.items())
                print(
                    f"{number} {state} {result.seconds:.1f} s: {result.task} {result.family} {result.precision}"
                    f" {result.data}; {' -> '.join(result.layouts)}; {worst}; {len(result.refused)} refused",
                    flush=True,
                )
                if result.failure:
                    print(result.failure, flush=True)
                if options.report is not None:
                    with options.report.open("a") as lines:
                        lines.write(json.dumps(asdict(result)) + "\n")
        finally:
            pools.close()
    results |= _read(options.report)  # with those of other processes
    print("\n".join(table(results.values())))
    return int(any(result.failure for result in results.values()))


def _scratch() -> str | None:
    """Return a folder in memory if there is one, where saves do not wait for a disk; None: the system's folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _read(report: Path | None) -> dict[int, Result]:
    """Return the last result of each case in a report."""
    if report is None or not report.exists():
        return {}
    results = [Result(**json.loads(line)) for line in report.read_text().splitlines()]
    return {result.number: result for result in results}


if __name__ == "__main__":
    sys.exit(main())
