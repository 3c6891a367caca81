"""A stream as the training split of a recipe: its first rows, its checks, and its windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.digests import digest_of
from trainer.base.errors import UsageError
from trainer.checkpoint.counters import Progress
from trainer.data.row_transform import SourceTransform, transform_of
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.features.streams.index import RowReader, first_rows
from trainer.features.streams.section import keys_of
from trainer.features.streams.shards import Shard, find_shards, naming_waits
from trainer.features.streams.stream_order import StreamOrder
from trainer.features.streams.streamed_split import StreamedSplit, StreamSettings, WindowEncoder, indexed, known
from trainer.features.streams.windows import Windows
from trainer.recipe.plan import batch_sizes
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import Preparation
from trainer.training.row_source import RowPart, RowSource

if TYPE_CHECKING:
    from datasets import Dataset


class Stream(StreamedSplit):
    """The windows of a recipe with a stream."""

    @property
    def shares(self) -> Windows:
        return self.windows

    def rows(self, recipe: Recipe, progress: Progress) -> StreamOrder:
        """See `OpenedSplit`."""
        return StreamOrder(self, batch_sizes(recipe).of_step, progress.step, progress.samples, progress.place)


class StreamSource(RowSource):
    """The stream of `data.train`."""

    _sources: tuple[Sequence[Shard], ...] = ()
    _transform: SourceTransform | None = None
    _split: Stream | None = None

    def read(self, recipe: Recipe, columns: Sequence[str]) -> Split:
        data = keys_of(recipe)
        entries = [data.train] if isinstance(data.train, str) else data.train
        with naming_waits("the shards of `data.train`"):
            parts = [entries] if data.mixture is None else [[entry] for entry in entries]
            self._sources = tuple(find_shards(part, data.format) for part in parts)
            for shard, first_row, rows in first_rows([shard for source in self._sources for shard in source]):
                where = f"`{shard}`"
                found = self._transform = transform_of(data).of_source(rows, columns, where)
                if found is None or not found.drops_rows or len(found.of_table(rows, first_row, where)):
                    break  # else the transform keeps none of these
        self._features = rows.features
        return Split(rows, where, is_whole=False)

    def check(self, recipe: Recipe, task: Task) -> None:
        """Refuse epochs if task or map change the number of rows, so that no epoch has known steps.

        Raises:
            UsageError: a key counts epochs.
        """
        drops_rows = self._transform is not None and self._transform.drops_rows
        if task.keeps_rows and task.packer(recipe.data.max_length) is None and not drops_rows:
            return
        why = "because task or map change the number of rows, so the number of steps of an epoch of a stream is unknown"
        if recipe.training.max_steps is None:
            raise UsageError(f"`training.max_steps` must be set with `data.streaming`, {why}")
        for key, every in (
            ("evaluation.every", recipe.evaluation.every if recipe.data.validation is not None else None),
            ("checkpoint.every", recipe.checkpoint.every),
            ("logging.every", recipe.logging.every),
            ("training.check_replicas", recipe.training.check_replicas),
        ):
            if every is not None and every.unit == "epochs":
                raise UsageError(f'`{key}` must count steps, such as "1000 steps", but is {every}, {why}')

    def open(
        self, recipe: Recipe, task: Task, preparation: Preparation, first: Split, encoded: EncodedSplit, cache: Path
    ) -> Stream:
        data, training = keys_of(recipe), recipe.training
        # Torch's loader keeps two batches of each worker ready.
        rows_ahead = (2 * data.num_workers + 2) * training.global_batch_size
        settings = StreamSettings(
            data.shuffle_window,
            data.mixture,
            training.seed,
            run=recipe.checkpoint.folder,
            # One window more than these rows fill, because they may begin in the middle of one.
            behind=1 + -(-rows_ahead // data.shuffle_window),
        )
        encoder = WindowEncoder(preparation.encoding(task, encoded), self._features, self._transform)
        self._split = Stream(self._sources, settings, encoder, encoded, len(first.rows), cache)
        return self._split

    def parts(self, recipe: Recipe, columns: Sequence[str], cache: Path, most_rows: int) -> Iterator[RowPart]:
        read = columns if self._transform is None else self._transform.reads(columns)
        reader_of_columns = partial(RowReader, columns=list(dict.fromkeys(read)), features=known(self._features, read))
        for source, indices in enumerate(indexed(self._sources, cache / "streams")):
            for index in indices:
                for start in range(0, index.num_rows, most_rows):
                    stop = min(start + most_rows, index.num_rows)
                    facts = [Path(index.shard.place).name, index.shard.size, index.checksum, start, stop]
                    rows = partial(self._rows, partial(reader_of_columns, [index]), f"`{index.shard}`", start, stop)
                    yield RowPart(source, f"`{index.shard}`", digest_of(facts), rows)

    def _rows(self, reader: partial[RowReader], where: str, start: int, stop: int) -> Iterator[tuple[int, Dataset]]:
        for first_row, rows in reader().read(0, start, stop):
            made = rows if self._transform is None else self._transform.of_table(rows, first_row, where)
            if len(made):
                yield first_row, made

    def notes(self, recipe: Recipe, num_first: int) -> list[str]:
        head, split = f"the first {num_first:,} rows of the stream stand for it in checks and notes", self._split
        if split is None:
            return [head]
        windows = split.windows
        num_shards = sum(map(len, self._sources))
        rows = f"{windows.num_rows:,} rows in {num_shards:,} shard{'s' * (num_shards > 1)}"
        about = "" if split.keeps_rows else f", about {len(split):,} rows of at most {recipe.data.max_length} tokens"
        size = f"of about {split.head_row_bytes * windows.num_rows / len(windows) / 2**20:,.1f} MiB in `data.cache`"
        return [f"stream: {rows}{about}, shuffled in {len(windows):,} window{'s' * (len(windows) > 1)} {size}", head]
