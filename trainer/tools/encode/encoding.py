"""The work of `trainer encode`: shards of token ids, each finished or absent, and the description of their folder."""

from __future__ import annotations

import glob
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from trainer.base.digests import digest_of, file_digest
from trainer.base.disk import move_over, replace_text
from trainer.base.distribution import installed
from trainer.base.errors import DataError, Problems, UsageError, storage_error
from trainer.base.terminal import say
from trainer.base.text import size as shown_size
from trainer.data.encoding import RowEncoding, encode_rows
from trainer.data.hashing import hash_rows
from trainer.data.sources import Split, Splits
from trainer.data.workers import ordered_results
from trainer.ranks.environment import available_cores, cache_folder
from trainer.recipe.reading.loading import ResolvedRecipe, load_values
from trainer.recipe.schema import FileData, Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.tools.encode.writers import COLUMN, PATTERNS, WRITERS
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import ENCODED, encoding_facts, load_preparation, resolve_task
from trainer.training.row_source import RowPart, RowSource, row_source
from trainer.training.run_data import read_splits

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.data.split import Encoded

PLAN, RECIPE = "plan.json", "recipe.json"
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 4 << 20
_SHOWN_SECONDS = 10.0


@dataclass(frozen=True)
class EncodeRequest:
    """The arguments of `trainer encode`; `num_processes` None: one for each core."""

    output: Path
    to: str = "parquet"
    num_processes: int | None = None
    shard_rows: int = 100_000


@dataclass(frozen=True)
class Shard:
    """A shard to write: its name without an ending, and its rows."""

    name: str
    part: RowPart


@dataclass(frozen=True)
class _Encoder:
    """The function of the processes; it writes a shard, or finds it written."""

    folder: Path
    to: str
    num_tokens: int
    encoding: RowEncoding

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """Return the record of a shard: rows, tokens, and size and SHA-256 of its files."""
        record = self.folder / f"{shard.name}.json"
        if (known := _known(record, shard.part.digest)) is not None:
            return {**known, "was_there": True}
        writer = WRITERS[self.to](self.folder / shard.name, self.num_tokens)
        num_rows = num_tokens = num_cut = 0
        with writer:
            for first_row, rows in shard.part.read():
                encoded = encode_rows(rows, first_row, partial(self._encode, shard.part.where))
                if found := _ids_of(encoded, shard.part.where):
                    writer.add(found)
                num_rows += len(found)
                num_tokens += sum(map(len, found))
                num_cut += sum(encoded.get("cut", ()))
        files = {}
        for new, path in zip(writer.new_paths, writer.paths, strict=True):
            files[path.name] = {"bytes": new.stat().st_size, "sha256": file_digest(new)}
            move_over(new, path)
        found_record = {"rows": num_rows, "tokens": num_tokens, "cut": num_cut, "files": files}
        # Last, so that a shard with a record is complete.
        replace_text(record, json.dumps({"digest": shard.part.digest, **found_record}) + "\n")
        return found_record

    def _encode(self, where: str, rows: Dataset, first_row: int) -> Encoded:
        return self.encoding.encode(rows, where, first_row)


def encode_recipe(resolved: ResolvedRecipe, request: EncodeRequest) -> dict[str, Any]:
    """Write the token ids of a recipe's texts, and return the description of the folder.

    A call with the same arguments goes on where one was killed: it verifies the finished shards, and writes the others.

    Raises:
        TrainerError: the recipe has no texts that become token ids, rows are not valid, or the folder is another one's.
    """
    recipe, folder = _of_documents(resolved.recipe), request.output
    source, problems = row_source(recipe), Problems()
    preparation, task, splits = _loaded(recipe, source, problems)
    cache = Path(recipe.data.cache) if recipe.data.cache else cache_folder()
    encoding = preparation.encoding(task, None)  # type: ignore[arg-type]
    tokenizer = preparation.text_tokenizer
    assert tokenizer is not None, "it was checked"
    fit = encoding_facts(recipe, tokenizer)
    shards = list(_shards(splits, task, partial(_parts_of, source, recipe, task, cache), request.shard_rows))
    plan = {"fit": fit, "to": request.to, "shards": {one.name: one.part.digest for one in shards}}
    started = time.perf_counter()
    try:
        _begin(folder, plan)
        with FileLock(folder / ".lock", timeout=0):
            encoder = _Encoder(folder, request.to, len(tokenizer), encoding)
            records = _records(encoder, shards, request.num_processes or available_cores())
            if not sum(record["rows"] for name, record in records.items() if name.startswith("train-")):
                raise DataError(
                    f"{splits.train.where} must hold a text with a token, but column `{task.columns[0]}` has none; name"
                    " another column"
                )
            found = _description(records, recipe, request, fit, str(tokenizer.name_or_path))
            _write_json(folder / ENCODED, {**found, "made_by": resolved.recipe.model_dump(mode="json")})
            values = _training(resolved.recipe, folder, request.to, [one.name for one in shards])
            _write_json(folder / RECIPE, values)
    except Timeout as error:
        raise UsageError(f"`OUT` is {folder}, where another process encodes; wait for its end") from error
    except OSError as error:
        raise storage_error(
            f"`OUT` {folder} cannot be written: {error.strerror}; make room, or name another folder", error
        ) from error
    load_values(values)  # it names the shards, which exist now
    return {**found, "seconds": round(time.perf_counter() - started, 1), "done_before": _count_there(records)}


def lines(found: Mapping[str, Any], request: EncodeRequest) -> list[str]:
    """Return the description of a folder for the terminal."""
    seconds = max(found["seconds"], 0.1)
    shown = [
        f"encoded   {found['rows']:,} rows, {found['tokens']:,} tokens; {found['cut']:,} rows are cut",
        f"files     {len(found['files']):,} of {shown_size(found['bytes'])} for {found['to']},"
        f" SHA-256 {found['sha256'][:16]}",
    ]
    if found["done_before"]:
        shown.append(f"resumed   {found['done_before']:,} shards were there, and were verified")
    else:
        shown.append(f"time      {seconds:,.1f} s, {found['tokens'] / seconds:,.0f} tokens/s")
    return [*shown, f"wrote     {request.output}", f"next      trainer run {request.output / RECIPE}"]


def _of_documents(recipe: Recipe) -> Recipe:
    """Return a recipe that keeps texts whole; rows of token ids are cut and packed as texts are."""
    if "packing" not in type(recipe.task).model_fields:
        return recipe
    return recipe.model_copy(update={"task": recipe.task.model_copy(update={"packing": "joined"})})


def _loaded(recipe: Recipe, source: RowSource | None, problems: Problems) -> tuple[Preparation, Task, Splits]:
    preparation, task = load_preparation(recipe), build_task(recipe.task)
    if preparation.text_tokenizer is None or len(task.columns) != 1 or not _reads_ids(task):
        raise UsageError(
            f"`task.type` must read token ids of one column of texts, but is {recipe.task.type} with"
            f" {', '.join(task.columns)}; use causal_lm or masked_lm with `task.text`"
        )
    splits = read_splits(recipe, task, None, problems, source)
    problems.raise_all()
    task, _ = resolve_task(task, preparation, splits.train)
    if not hasattr(splits.train.rows.features[task.columns[0]], "dtype"):
        raise UsageError(
            f"`task.text` must name a column of texts, but column `{task.columns[0]}` holds token ids; train from them"
        )
    return preparation, task, splits


def _reads_ids(task: Task) -> bool:
    import datasets

    try:
        task.check_columns({task.columns[0]: datasets.List(datasets.Value("int32"))}, "its rows")
    except DataError:
        return False
    return True


def _parts_of(
    source: RowSource | None, recipe: Recipe, task: Task, cache: Path, split: Split, is_train: bool, most_rows: int
) -> Iterator[RowPart]:
    if source is not None and is_train:
        yield from source.parts(recipe, task.columns, cache, most_rows)
        return
    rows = split.rows.select_columns(list(task.columns))
    ends = [0, *(sum(split.sources[: number + 1]) for number in range(len(split.sources)))] if split.sources else None
    digest = hash_rows(rows)
    for number, (first, end) in enumerate(pairwise(ends or [0, len(rows)])):
        for start in range(first, end, most_rows):
            stop = min(start + most_rows, end)
            yield RowPart(number, split.where, digest_of([digest, start, stop]), partial(_read, rows, start, stop))


def _read(rows: Dataset, start: int, stop: int) -> Iterator[tuple[int, Dataset]]:
    row_bytes = rows.data.nbytes / max(1, rows.data.num_rows)
    at_once = int(min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, row_bytes))))
    for first in range(start, stop, at_once):
        yield first, rows.select(range(first, min(first + at_once, stop)))


def _shards(splits: Splits, task: Task, parts_of: Any, most_rows: int) -> Iterator[Shard]:
    for name, split in (("train", splits.train), ("validation", splits.validation)):
        if split is None:
            continue
        counts: dict[int, int] = {}
        for part in parts_of(split, name == "train", most_rows):
            number = counts[part.source] = counts.get(part.source, -1) + 1
            yield Shard(f"{name}-{part.source:02d}-{number:05d}", part)


def _begin(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder, or check that an earlier call with the same arguments began it.

    Raises:
        UsageError: it holds something else.
    """
    place = folder / PLAN
    if not place.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"`OUT` must be a new folder, or one that `trainer encode` began, but {folder} is neither")
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(place, plan)
        return
    try:
        begun = json.loads(place.read_text(encoding="utf-8"))
    except ValueError:
        begun = {}
    begun = begun if isinstance(begun, dict) else {}
    for key, words in (("fit", "tokenizer, task or length"), ("to", "`--to`"), ("shards", "texts or `--shard-rows`")):
        if begun.get(key) != plan[key]:
            raise UsageError(
                f"`OUT` is {folder}, which was begun with other {words}; name another folder, or remove this one"
            )


def _known(record: Path, digest: str) -> dict[str, Any] | None:
    """Return the record of a finished shard; None: there is none, or its files are not those that were written."""
    try:
        known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        for name, file in known["files"].items():
            path = record.with_name(name)
            if path.stat().st_size != file["bytes"] or file_digest(path) != file["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if known.pop("digest") == digest else None


def _records(encoder: _Encoder, shards: Sequence[Shard], num_processes: int) -> dict[str, dict[str, Any]]:
    shown = time.monotonic()
    records: dict[str, dict[str, Any]] = {}
    results: Any = ordered_results(encoder, shards, num_processes, "--processes")
    with closing(results):  # which ends the processes after an error, too
        for shard, record in zip(shards, results, strict=True):
            records[shard.name] = record
            if time.monotonic() - shown > _SHOWN_SECONDS:
                shown = time.monotonic()
                say(f"encoded {len(records):,} of {len(shards):,} shards", err=True)
    return records


def _ids_of(encoded: Encoded, where: str) -> list[list[int]]:
    """Return the token ids of encoded rows; refuse rows that have more than them."""
    ids: list[list[int]] = encoded.get("input_ids", [])
    kept = {name: values for name, values in encoded.items() if name not in ("input_ids", "cut")}
    for name, values in kept.items():
        if values != ids and any(any(row) for row in values):
            raise UsageError(
                f"`task.text` must name texts that are token ids alone, but {where} also becomes `{name}`; train from"
                " the texts"
            )
    return ids


def _description(
    records: Mapping[str, Mapping[str, Any]], recipe: Recipe, request: EncodeRequest, fit: Mapping[str, Any], name: str
) -> dict[str, Any]:
    files = {name: file for record in records.values() for name, file in record["files"].items()}
    return {
        "fit": dict(fit),
        "tokenizer": name,
        "to": request.to,
        "column": COLUMN,
        **{key: sum(record[key] for record in records.values()) for key in ("rows", "tokens", "cut")},
        "bytes": sum(file["bytes"] for file in files.values()),
        "sha256": digest_of({name: file["sha256"] for name, file in files.items()}),
        "files": files,
        "versions": {package: installed(package) for package in ("recipe-trainer", "tokenizers", "transformers")},
    }


def _count_there(records: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(record.get("was_there", False) for record in records.values())


def _training(recipe: Recipe, folder: Path, to: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of the recipe that trains from the shards."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    data = FileData.model_fields
    kept = {key: value for key, value in values["data"].items() if key in data and key not in ("format", "map", "maps")}
    sources = list(dict.fromkeys(name.rpartition("-")[0] for name in names))

    def patterns(split: str) -> list[str]:
        return [
            f"{glob.escape(str(folder.absolute()))}/{one}-{PATTERNS[to]}" for one in sources if one.startswith(split)
        ]

    train, held = patterns("train"), patterns("validation")
    defaults = {key: field.default for key, field in data.items() if key in ("delimiter", "quotes", "encoding")}
    given = {"source": "files", "train": train if len(train) > 1 else train[0], "validation": held[0] if held else None}
    # Megatron's files are whole ones.
    streaming = {"streaming": False, "shuffle_window": data["shuffle_window"].default} if to == "megatron" else {}
    streaming = streaming if "shuffle_window" in data else {}
    values["data"] = {**kept, **defaults, **given, **streaming}
    values["task"]["text"] = COLUMN
    return values


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=2) + "\n")
