"""The work of `trainer predict`: one output row for each input row, in chunks that survive a kill."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.base.errors import DataError, ExitCode, UsageError
from trainer.base.terminal import say
from trainer.data.loader import EvalLoader
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.data.tokenised_split import MOST_UNKNOWN
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import RunPlan, plan_run
from trainer.tasks.generated import required_generator
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.tasks.types import EvaluatedSplit
from trainer.tools.predict.prediction_files import Chunk, InputRows, Output, Request, naming_resumption
from trainer.training.assembly import Assembly, assemble
from trainer.training.preparation import Preparation
from trainer.training.process_group import joined_ranks, open_mesh
from trainer.training.row_encoding import fitted, load_preparation, require_fitting_rotations
from trainer.training.run_data import PreparedData
from trainer.training.whole_split import gathered_rows
from trainer.use.evaluate import progress_bar, with_class_names

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.recipe.reading.loading import ResolvedRecipe


@dataclass(frozen=True)
class Prediction:
    """The job that writes the predictions for the rows of a file."""

    request: Request

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Predict as the rank of `environment`, and return the exit code.

        Raises:
            TrainerError: a user error.
        """
        plan = plan_run(resolved.recipe, environment.world_size, environment.local_world_size)
        with joined_ranks(resolved, plan, environment, partial(self._prepare, plan)) as (device, prepared):
            self._predict(plan, open_mesh(plan.layout, device), prepared)
        return ExitCode.DONE

    def _prepare(self, plan: RunPlan) -> tuple[Preparation, Task]:
        recipe, columns = plan.recipe, self.request.columns
        preparation = load_preparation(recipe)
        task: Task = build_task(with_class_names(recipe).task).without_labels()
        if columns:
            embedding = task.embedding(tuple(dict.fromkeys(columns)))
            if embedding is None:
                raise UsageError(f"`--column` names texts to embed, but `task.type` is {recipe.task.type}; remove it")
            task = embedding
        require_fitting_rotations(recipe, preparation.config, task)
        task = fitted(task, preparation)
        if task.generates:
            required_generator().require_whole(plan)
        return preparation, task

    def _predict(self, plan: RunPlan, mesh: ParallelMesh, prepared: tuple[Preparation, Task]) -> None:
        request, (preparation, task) = self.request, prepared
        # The model is built for the first chunk: an input that is wrong from its start costs no load.
        predictor = Predictor(plan, mesh, preparation, task, request)
        rows = InputRows(request, plan.recipe.data, task.columns, predictor.check)
        with Output(request, plan.recipe) as output, progress_bar(mesh.rank == 0) as bar:
            mesh.on_rank_zero(output.open)
            chunks, chunk = rows.chunks(output.num_done), None
            shown = bar.add_task("rows", total=None, completed=output.num_done)

            def read() -> dict[str, Any] | None:
                nonlocal chunk
                with naming_resumption(request, output.num_done):
                    chunk = next(chunks, None)
                    return None if chunk is None else _shared(chunk, rows)

            # Rank 0 reads and writes. The other ranks get the rows of a chunk, so they need not see the files.
            while (shared := mesh.on_rank_zero(read)) is not None:
                with naming_resumption(request, shared["first_row"]):
                    answers = predictor.answers(**shared) if len(shared["places"]) else None

                # A default argument binds the value of this pass of the loop.
                def write(answers: tuple[dict[str, Tensor], EvaluatedSplit] | None = answers) -> None:
                    assert chunk is not None
                    output.write(chunk, task.readable(*answers) if answers else [])

                mesh.on_rank_zero(write)
                bar.update(shown, completed=output.num_done)
            mesh.on_rank_zero(output.finish)
            for note in predictor.notes(rows.num_empty(), output.num_bad) if mesh.rank == 0 else ():
                say(note, err=True)


def _shared(chunk: Chunk, rows: InputRows) -> dict[str, Any]:
    """Return the arguments of `Predictor.answers` for a chunk, in a form that ranks can share."""
    import pyarrow

    sound, sink = chunk.sound, pyarrow.BufferOutputStream()
    table = rows.table([chunk.rows[place] for place in sound], chunk.first_row).data.table
    # Arrow's own format keeps the types of columns, and unlike a pickle it runs no code on other ranks.
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return {
        # A copy, because torch warns of a buffer that cannot be written.
        "table": torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8),
        "places": torch.tensor(sound, dtype=torch.int64) + chunk.first_row,
        "first_row": chunk.first_row,
    }


@dataclass
class Predictor:
    """The model on the ranks, which is built for the first chunk."""

    _plan: RunPlan
    _mesh: ParallelMesh
    _preparation: Preparation
    _task: Task
    _request: Request
    _parts: Assembly | None = None
    _num_unknown: int = 0
    _num_tokens: int = 0
    _num_cut: int = 0

    def check(self, rows: Dataset, first_row: int) -> None:
        """Encode rows on this rank only; `first_row` is the index in the file of the first one.

        Raises:
            DataError: a row is bad.
        """
        with tempfile.TemporaryDirectory(prefix="trainer-") as cache:
            self._encode(rows, first_row, Path(cache))

    def answers(self, table: Tensor, places: Tensor, first_row: int) -> tuple[dict[str, Tensor], EvaluatedSplit]:
        """Return the task's answers in the order of the rows, on rank 0, and the split. All ranks must call it.

        Args:
            table: the rows in the format of Arrow, as bytes.
            places: their indices in the file, which leave out bad rows, `[rows]`.
            first_row: the index in the file of the first row, which may be bad.
        """
        import datasets
        import pyarrow

        rows = datasets.Dataset.from_buffer(pyarrow.py_buffer(table.numpy().tobytes()))
        # One folder for all ranks, which each of them opens.
        cache = Path(self._mesh.share(tempfile.mkdtemp(prefix="trainer-") if self._mesh.rank == 0 else None))
        try:
            try:
                encoded = self._encode(rows, 0, cache)
            except DataError:
                self._encode(rows, first_row, cache)  # again: the message names the place of the row in the file
                raise
            split = EvaluatedSplit(rows, encoded, self._preparation.text_tokenizer, self._request.where)
            if not len(encoded):  # no text has a token
                return {}, split
            unknown, tokens = encoded.unknown_tokens or (0, 0)
            self._num_unknown += unknown
            self._num_tokens += tokens
            self._num_cut += encoded.num_cut
            if self._parts is None:
                data = PreparedData(self._task, None, self._preparation, encoded, None)
                self._parts = assemble(self._plan, self._mesh, data)
            return self._gathered(self._parts, encoded, places), split
        finally:
            self._mesh.barrier()  # another rank may still open the files
            shutil.rmtree(cache, ignore_errors=True)

    def _encode(self, rows: Dataset, first_row: int, cache: Path) -> EncodedSplit:
        folders = (self._request.input.parent,)
        split = Split(rows, self._request.where, first_row, is_part=True, folders=folders)
        return self._preparation.encode(split, self._task, cache)

    def _gathered(self, parts: Assembly, encoded: EncodedSplit, places: Tensor) -> dict[str, Tensor]:
        mesh = self._mesh
        loader = EvalLoader(
            encoded,
            self._plan.recipe.evaluation.batch_size,
            mesh.index("dp"),
            mesh.size("dp"),
            self._preparation.batching,
            pin_memory=mesh.device.type == "cuda",
        )

        def begin(microbatch: Microbatch) -> Callable[[], dict[str, Tensor]]:
            # Drawn tokens depend on the row of the file, and not on its chunk; windows of a row are no places.
            keyed = places[microbatch.rows] if len(places) == len(encoded) else microbatch.rows
            return parts.engine.begin_answer(replace(microbatch, rows=keyed))

        return gathered_rows(loader, begin, mesh, len(encoded)) or {}

    def notes(self, num_empty: int, num_bad: int) -> Iterator[str]:
        """Yield notes for the user on truncated, empty and bad rows, and on unknown tokens if most are."""
        where = self._request.where
        if self._num_cut:
            length = self._plan.recipe.data.max_length
            yield f"truncated: {self._num_cut:,} rows of {where} have more than {length} tokens"
        if self._num_unknown > MOST_UNKNOWN * self._num_tokens:
            unknown = f"{self._num_unknown:,} of {self._num_tokens:,} tokens"
            yield f"unknown to the tokenizer: {unknown} of {where}; the predictions may be wrong"
        if num_empty:
            yield f"skipped: {num_empty:,} empty lines of {where}"
        if num_bad:
            yield f"bad: {num_bad:,} rows of {where} have an `error`"
