"""Rules that span several keys of a recipe and need neither the world size nor the data.

Rules check valid sections with absolute paths. To add a rule, write a generator and its row in `RULES`. Two conditions
that exclude each other are a row of `recipe/combinations.py`.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from trainer.base.disk import FOLDER_FIX, no_file
from trainer.base.text import has_secret, leaves
from trainer.recipe.combinations import EXCLUSIONS
from trainer.recipe.deepspeed_config import refused_keys
from trainer.recipe.reading.parser import KeyPath, dotted, shown_value
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import (
    CausalLM,
    Checkpoint,
    ClassificationKeys,
    Distillation,
    Embedding,
    Evaluation,
    FileData,
    FolderData,
    Generation,
    HubData,
    ImageKeys,
    Logging,
    Model,
    MultipleChoice,
    Parallel,
    QuestionAnswering,
    Schedule,
    Section,
    Seq2SeqLM,
    SequenceClassification,
    TaskSection,
    TokenClassification,
    Training,
)

Data = HubData | FileData | FolderData

_TAUGHT = ("sequence_classification", "token_classification", "image_classification", "causal_lm", "masked_lm")
"""Tasks with one distribution for each label, which a teacher of the same task has too."""


@dataclass(frozen=True)
class Contradiction:
    """Keys that do not combine; reported at the first key."""

    keys: tuple[KeyPath, ...]
    text: str  # follows the first key


def contradictions(sections: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Yield the contradictions in these sections; rules on other sections are skipped."""
    for row in EXCLUSIONS:
        if row.sections <= sections.keys() and (text := row.message(sections)) is not None:
            yield _clash(text, row.first.key, row.second.key)
    for names, rule in RULES:
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))
    for name, section in sections.items():
        yield from _secrets(section.model_dump(mode="json") if isinstance(section, Section) else section, (name,))


def _secrets(value: Any, path: tuple[str, ...]) -> Iterator[Contradiction]:
    """Refuse addresses with secrets, because a run writes its recipe to files and sends it to tracking services."""
    for inner, leaf in leaves(value, path):
        if has_secret(str(leaf)):
            yield Contradiction(
                (inner,),
                "must hold no password, signature or token, which the run would write to its files; give it in the"
                " environment (HF_TOKEN, FSSPEC_FTP_PASSWORD, AWS_SECRET_ACCESS_KEY) or in fsspec's configuration",
            )


def _clash(text: str, *keys: str) -> Contradiction:
    return Contradiction(tuple(tuple(key.split(".")) for key in keys), text)


def _weights(model: Model) -> Iterator[Contradiction]:
    if model.name_or_path is None and model.config is None:
        yield _clash("is missing; set it, or `model.config` for random weights", "model.name_or_path", "model.config")
    if model.name_or_path is not None and model.config is not None and "model_type" in model.config:
        yield _clash(
            "with a `model_type` and `model.name_or_path` exclude each other: random or pretrained"
            " weights; set one of them to null",
            "model.config",
            "model.name_or_path",
        )
    if model.config is not None and model.is_random:
        yield from _random_weights(model, model.config)


def _random_weights(model: Model, config: dict[str, Any]) -> Iterator[Contradiction]:
    if not isinstance(config.get("model_type"), str):
        yield _clash('must hold a "model_type", such as "bert"', "model.config")
    if model.revision is not None:
        yield _clash(
            "applies to a hub repository, but the weights are random (`model.config`); remove it", "model.revision"
        )


def _adapter(model: Model, parallel: Parallel) -> Iterator[Contradiction]:
    if model.adapter is None:
        return
    if model.freeze is not None:
        yield _clash(
            "has no use with `model.adapter`, which freezes all other weights; remove it",
            "model.freeze",
            "model.adapter",
        )
    if parallel.strategy == "dp":
        yield _clash(
            "is not supported by `parallel.strategy` dp; use ddp, which runs on any number of processes",
            "model.adapter",
            "parallel.strategy",
        )


def _reader(model: Model, parallel: Parallel) -> Iterator[Contradiction]:
    if parallel.load == "broadcast" and model.config is not None and model.is_random:
        yield _clash(
            'is "broadcast", which sends weights of files, but the weights are random (`model.config`); remove it',
            "parallel.load",
            "model.config",
        )


def _tokenizer(task: TaskSection, model: Model) -> Iterator[Contradiction]:
    reads_text = not isinstance(task, ImageKeys)
    if reads_text and model.config is not None and model.is_random and model.tokenizer is None:
        yield _clash(
            "is missing, and random weights (`model.config`) have no tokenizer; set it",
            "model.tokenizer",
            "model.config",
        )
    if not reads_text and model.tokenizer is not None:
        yield _clash(f"applies to texts, but `task.type` is {task.type}; remove it", "model.tokenizer", "task.type")


def _is_changed(section: Section, key: str) -> bool:
    """Return whether a key has another value than its default, which `trainer check --json` and exports write too."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _text_lengths(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    if not isinstance(task, ImageKeys):
        return
    for key in ("max_length", "group_by_length", "pad_to", "packing"):
        if _is_changed(data, key):
            yield _clash(f"applies to texts, but `task.type` is {task.type}; remove it", f"data.{key}", "task.type")


def _padded_lengths(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    if isinstance(task, ImageKeys):
        return
    lengths = {"data.max_length": data.max_length}
    if isinstance(task, Seq2SeqLM):
        lengths["task.max_target_length"] = task.max_target_length
    for key, length in lengths.items():
        if length % data.pad_to:
            below = next(size for size in range(data.pad_to, 0, -1) if not any(n % size for n in lengths.values()))
            yield _clash(
                f"must divide `{key}` {length}, so that no row is padded beyond it, but is {data.pad_to}; use {below}",
                "data.pad_to",
                key,
            )


def _microbatches(task: TaskSection, training: Training) -> Iterator[Contradiction]:
    key, rows = "training.micro_batch_tokens", "training.micro_batch_size"
    if training.micro_batch_tokens is None:
        if training.micro_batch_size is None:
            yield _clash(f"is null, and `{key}` too; set one of them", rows, key)
    elif isinstance(task, ImageKeys):
        yield _clash(f"applies to texts, but `task.type` is {task.type}; use `{rows}`", key, "task.type")
    elif training.micro_batch_size is not None and _is_changed(training, "micro_batch_size"):
        yield _clash(f"is set, but `{rows}` is {training.micro_batch_size}; set one of them to null", key, rows)


def _folder(key: str, place: str | None) -> Iterator[Contradiction]:
    if place and os.path.isabs(place) and not os.path.isdir(place):
        yield _clash(f"is a folder that does not exist: {place}", key)


def _model_folders(model: Model) -> Iterator[Contradiction]:
    yield from _folder("model.name_or_path", model.name_or_path)
    yield from _folder("model.tokenizer", model.tokenizer)
    if model.revision and model.name_or_path and os.path.isabs(model.name_or_path):
        yield _clash("applies to a hub repository, but `model.name_or_path` is a folder; remove it", "model.revision")


def _data_places(data: Data) -> Iterator[Contradiction]:
    if isinstance(data, FileData):
        for split in ("train", "validation"):
            yield from _files(split, getattr(data, split))
    elif isinstance(data, FolderData):
        yield from _folder("data.path", data.path)
    else:
        yield from _folder("data.name", data.name)
        if data.revision is not None and os.path.isabs(data.name):
            yield _clash("applies to a hub repository, but `data.name` is a folder; remove it", "data.revision")


def _mixture(data: Data, task: TaskSection) -> Iterator[Contradiction]:
    if isinstance(data, FileData) and data.mixture is not None:
        if getattr(task, "class_weights", None) == "balanced":
            text = "counts every row once, but `data.mixture` changes how often each is read; write the weights"
            yield _clash(f'is "balanced", which {text}', "task.class_weights", "data.mixture")
        number = len(data.train) if isinstance(data.train, list) else 1
        if number == 1 or len(data.mixture) != number:
            entries = f"{number} entries; give each one weight"
            if number == 1:
                entries = "one entry; list at least two files or patterns there"
            text = f"has the weights {data.mixture}, but `data.train` has {entries}"
            yield _clash(text, "data.mixture", "data.train")


def _files(split: str, places: float | str | list[str] | None) -> Iterator[Contradiction]:
    for index, place in enumerate(places if isinstance(places, list) else [places]):
        if isinstance(place, str) and not os.path.isfile(place):
            path: KeyPath = ("data", split, index) if isinstance(places, list) else ("data", split)
            if not glob.has_magic(place):
                text = f"is a file that does not exist: {place}"
                if os.path.exists(place):
                    text = f"must name files, but `{place}` {no_file(Path(place))}"
                    text += FOLDER_FIX if os.path.isdir(place) else "; copy its rows to a file"
                yield Contradiction((path,), text)
            elif not glob.glob(place, recursive=True):
                yield Contradiction((path,), f"is a pattern that no file matches: {place}")


def _columns(task: TaskSection) -> Iterator[Contradiction]:
    label = getattr(task, "label", None)
    if isinstance(task, ImageKeys):
        if label == task.image:
            text = f"is {shown_value(label)}, which is also `task.image`; set the column of the label"
            yield _clash(text, "task.label", "task.image")
        return
    if isinstance(task, Embedding):
        yield from _repeated("task.texts", [*task.texts, *([task.score] if task.score else [])])
        return
    if isinstance(task, Seq2SeqLM):
        if task.target == task.source:
            text = f"is {shown_value(task.target)}, which is also `task.source`; set the column of the target"
            yield _clash(text, "task.target", "task.source")
        return
    if isinstance(task, TokenClassification):
        yield from _columns_of_words(task)
        return
    if isinstance(task, CausalLM):
        yield from _examples(task)
        return
    if isinstance(task, MultipleChoice):
        choices = [task.choices] if isinstance(task.choices, str) else task.choices
        yield from _repeated("task.choices", choices)
        question = [] if task.question is None else [task.question]
        taken = {"context": [task.context], "question": question, "choices": choices, "label": [task.label]}
        yield from _shared(taken)
        return
    if isinstance(task, QuestionAnswering):
        answers = [task.answers] if isinstance(task.answers, str) else task.answers
        yield from _repeated("task.answers", answers)
        yield from _shared({"question": [task.question], "context": [task.context], "answers": answers})
        return
    columns = [task.text] if isinstance(task.text, str) else task.text
    if len(set(columns)) < len(columns):
        yield _clash(f"has the column {shown_value(columns[0])} twice; a pair needs two columns", "task.text")
    if label in columns:
        text = f"is {shown_value(label)}, which is also in `task.text`; set the column of the label"
        yield _clash(text, "task.label", "task.text")


def _shared(taken: Mapping[str, list[str]]) -> Iterator[Contradiction]:
    """Yield the columns that several keys of `task` name; `taken` are the columns of each key."""
    for one, other in combinations(taken, 2):
        for name in {*taken[one]} & {*taken[other]}:
            text = f"has the column {shown_value(name)}, which is also `task.{one}`; name another"
            yield _clash(text, f"task.{other}", f"task.{one}")


def _beams(task: TaskSection) -> Iterator[Contradiction]:
    generation = getattr(task, "generation", None)
    if not isinstance(generation, Generation):
        return
    for key in ("length_penalty", "early_stopping"):
        if _is_changed(generation, key) and generation.num_beams == 1:
            yield _clash(
                "applies to a beam search, but `task.generation.num_beams` is 1; remove it, or use 2 or more",
                f"task.generation.{key}",
                "task.generation.num_beams",
            )
    if generation.do_sample and generation.num_beams > 1:
        yield _clash(
            f"draws tokens, but `task.generation.num_beams` is {generation.num_beams}; set one of them only",
            "task.generation.do_sample",
            "task.generation.num_beams",
        )
    for key in ("temperature", "top_k", "top_p"):
        if _is_changed(generation, key) and not generation.do_sample:
            yield _clash(
                "applies to drawn tokens, but `task.generation.do_sample` is false; remove it, or set that to true",
                f"task.generation.{key}",
                "task.generation.do_sample",
            )
    if generation.min_new_tokens >= generation.max_new_tokens:
        yield _clash(
            f"must be below `task.generation.max_new_tokens` ({generation.max_new_tokens}), but is"
            f" {generation.min_new_tokens}",
            "task.generation.min_new_tokens",
            "task.generation.max_new_tokens",
        )


def _stages_of_generation(task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if not isinstance(getattr(task, "generation", None), Generation) or parallel.pipeline.stages == 1:
        return
    if texts := [name for name in task.metrics if name not in ("accuracy", "perplexity")]:
        yield _clash(
            f"has {shown_value(texts[0])}, a metric of generated texts, for which a rank needs the whole model, but"
            f" `parallel.pipeline.stages` is {parallel.pipeline.stages}; use accuracy or perplexity, and evaluate the"
            " exported model without stages",
            "task.metrics",
            "parallel.pipeline.stages",
        )


def _columns_of_words(task: TokenClassification) -> Iterator[Contradiction]:
    pairs = (("words", "tags"), ("text", "spans"))
    keys = tuple(f"task.{key}" for key in ("words", "tags", "text", "spans"))
    written = [key for pair in pairs for key in pair if getattr(task, key) is not None]
    if tuple(written) not in pairs:
        found = ", ".join(f"`task.{key}`" for key in written) or "none"
        yield _clash(f"must be set with `task.tags`, or `task.text` with `task.spans`, but set is {found}", *keys)
    elif getattr(task, written[0]) == getattr(task, written[1]):
        text = f"is {shown_value(getattr(task, written[1]))}, which is also `task.{written[0]}`; name another column"
        yield _clash(text, f"task.{written[1]}", f"task.{written[0]}")


def _examples(task: CausalLM) -> Iterator[Contradiction]:
    pair = {"prompt": task.prompt, "completion": task.completion}
    given = [key for key, value in {"text": task.text, **pair, "messages": task.messages}.items() if value is not None]
    keys = [f"task.{key}" for key in given]
    if not given:
        yield _clash("is missing; set it, or `task.messages`, or `task.prompt` and `task.completion`", "task.text")
    elif given in (["prompt"], ["completion"]):
        missing = "completion" if given == ["prompt"] else "prompt"
        yield _clash(f"is missing; a {given[0]} needs its {missing}", f"task.{missing}", *keys)
    elif given not in (["text"], ["messages"], ["prompt", "completion"]):
        yield _clash("must be the only source of examples; set the others to null", *keys)
    elif given == ["prompt", "completion"] and task.prompt == task.completion:
        text = f"is {shown_value(task.completion)}, which is also `task.prompt`; set the column of the completion"
        yield _clash(text, "task.completion", "task.prompt")
    if task.train_on != "all" and given != ["messages"]:
        yield _clash("applies to chats only; remove it", "task.train_on", *keys)
    if task.packing == "joined" and given != ["text"]:
        text = 'is "joined", which applies to texts only; use "documents"'
        yield _clash(text, "task.packing", *keys)


def _chunks(task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if getattr(task, "loss_chunk_tokens", None) is not None and parallel.strategy == "dp":
        text = "is set, but the strategy dp runs copies of the head at the same time; set it to null, or use ddp"
        yield _clash(text, "task.loss_chunk_tokens", "parallel.strategy")


def _teacher(distillation: Distillation | None, task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if distillation is None:
        return
    yield from _folder("distillation.teacher", distillation.teacher)
    if distillation.revision is not None and os.path.isabs(distillation.teacher):
        text = "applies to a hub repository, but `distillation.teacher` is a folder; remove it"
        yield _clash(text, "distillation.revision")
    if task.type not in _TAUGHT:
        text = f"is for {', '.join(_TAUGHT)}, but `task.type` is {task.type}; remove it"
        yield _clash(text, "distillation", "task.type")
    if getattr(task, "multi_label", False):
        text = "compares the probabilities of one class for each row, but `task.multi_label` is true; remove it"
        yield _clash(text, "distillation", "task.multi_label")
    if getattr(task, "loss_chunk_tokens", None) is not None:
        text = "needs the logits of all tokens, but `task.loss_chunk_tokens` is set; set that to null"
        yield _clash(text, "distillation", "task.loss_chunk_tokens")
    if parallel.strategy == "dp":
        text = "is not supported by `parallel.strategy` dp; use ddp, which runs on any number of processes"
        yield _clash(text, "distillation", "parallel.strategy")


def _labels(task: TaskSection) -> Iterator[Contradiction]:
    yield from _repeated("task.metrics", task.metrics)
    weights = getattr(task, "class_weights", None)
    for name, weight in weights.items() if isinstance(weights, dict) else ():
        if weight <= 0:
            yield _clash(f"has the weight {weight} for {shown_value(name)}; use a number above 0", "task.class_weights")
    if isinstance(task, ClassificationKeys) and task.positive is not None and "f1" not in task.metrics:
        yield _clash('applies to the metric "f1" only; add it to `task.metrics`, or remove this', "task.positive")
    if not isinstance(task, ClassificationKeys | TokenClassification) or task.labels is None:
        return
    yield from _repeated("task.labels", task.labels)
    several = isinstance(task, SequenceClassification) and task.multi_label
    if isinstance(task, ClassificationKeys) and not several and "f1" in task.metrics and len(task.labels) != 2:
        yield _clash(
            f'has "f1", which needs two classes, but `task.labels` has {len(task.labels)}; use "f1_macro"',
            "task.metrics",
            "task.labels",
        )


def _several_labels(task: TaskSection) -> Iterator[Contradiction]:
    if not isinstance(task, SequenceClassification):
        return
    one_class = "applies to one class for each row, but `task.multi_label` is true"
    if task.multi_label:
        for metric in task.metrics:
            if metric in ("f1", "matthews"):
                text = f'has "{metric}", which {one_class}; use "f1_micro" or "f1_macro"'
                yield _clash(text, "task.metrics", "task.multi_label")
        for key in ("class_weights", "label_smoothing"):
            if getattr(task, key) != type(task).model_fields[key].default:
                yield _clash(f"{one_class}; remove it", f"task.{key}", "task.multi_label")
    elif task.threshold != type(task).model_fields["threshold"].default:
        text = "applies to several labels for each row, but `task.multi_label` is false; remove it, or set that to true"
        yield _clash(text, "task.threshold", "task.multi_label")


def _similarities(task: TaskSection) -> Iterator[Contradiction]:
    if not isinstance(task, Embedding):
        return
    if task.loss == "multiple_negatives":
        if task.score is not None:
            yield _clash(
                f"is {shown_value(task.score)}, but the loss multiple_negatives reads no score; remove it, or use the"
                " loss cosent or cosine",
                "task.score",
                "task.loss",
            )
        if "spearman" in task.metrics:
            yield _clash(
                'has "spearman", which needs scores, but the loss is multiple_negatives; use "mrr"',
                "task.metrics",
                "task.loss",
            )
        return
    if task.mask_duplicates:
        yield _clash(f"does not apply to the loss {task.loss}; remove it", "task.mask_duplicates", "task.loss")
    if task.score is None:
        yield _clash(f"is missing, but the loss {task.loss} needs it; set it", "task.score", "task.loss")
    if len(task.texts) != 2:
        yield _clash(
            f"must name two columns for the loss {task.loss}, but names {len(task.texts)}; remove the others",
            "task.texts",
            "task.loss",
        )
    for metric in task.metrics:
        if metric != "spearman":
            yield _clash(
                f'has "{metric}", which needs positives, but the loss is {task.loss}, with scores; set it to'
                ' ["spearman"]',
                "task.metrics",
                "task.loss",
            )
    if task.loss == "cosine" and task.temperature != Embedding.model_fields["temperature"].default:
        yield _clash("does not apply to the loss cosine; remove it", "task.temperature", "task.loss")


def _losses_of_copies(task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if isinstance(task, Embedding) and task.loss != "cosine" and parallel.strategy == "dp":
        yield _clash(
            f"is dp, in which each copy of the model computes the loss of its own rows, but the loss {task.loss}"
            " compares all rows of the batch; use ddp",
            "parallel.strategy",
            "task.loss",
        )


def _rows_to_compare(task: TaskSection, training: Training) -> Iterator[Contradiction]:
    if not isinstance(task, Embedding) or training.global_batch_size > 1:
        return
    if task.loss == "cosent" or (task.loss == "multiple_negatives" and len(task.texts) == 2):
        yield _clash(
            f"must be at least 2 for the loss {task.loss}, which compares rows with each other, but is 1",
            "training.global_batch_size",
            "task.loss",
        )


def _windows(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    if not isinstance(task, QuestionAnswering | TokenClassification) or task.stride is None:
        return
    if task.stride >= data.max_length:
        yield _clash(
            f"must be below `data.max_length` {data.max_length}, the size of the windows that share these tokens, but"
            f" is {task.stride}",
            "task.stride",
            "data.max_length",
        )


def _without_question(task: TaskSection) -> Iterator[Contradiction]:
    if not isinstance(task, MultipleChoice) or task.question is not None:
        return
    for key in ("question_texts", "blank"):
        if getattr(task, key) is not None:
            yield _clash("applies to questions, but `task.question` is null; set that", f"task.{key}", "task.question")


def _no_answers(task: TaskSection) -> Iterator[Contradiction]:
    if not isinstance(task, QuestionAnswering) or task.unanswerable:
        return
    reason = "applies to questions without an answer, but `task.unanswerable` is false; remove it, or set that to true"
    if task.null_threshold != 0:
        yield _clash(reason, "task.null_threshold", "task.unanswerable")
    for metric in task.metrics:
        if "_answer_" in metric:
            yield _clash(f"has {shown_value(metric)}, which {reason}", "task.metrics", "task.unanswerable")


def _repeated(key: str, values: list[Any]) -> Iterator[Contradiction]:
    for value in (value for value, count in Counter(values).items() if count > 1):
        yield _clash(f"has {shown_value(value)} more than once; remove one", key)


def _deepspeed_keys(parallel: Parallel) -> Iterator[Contradiction]:
    for path, reason in refused_keys(parallel.deepspeed):
        yield Contradiction((("parallel", "deepspeed", *path),), reason)


def _pipeline(parallel: Parallel) -> Iterator[Contradiction]:
    pipeline = parallel.pipeline
    if pipeline.stages == 1:
        for key in type(pipeline).model_fields:
            if not _is_changed(pipeline, key):
                continue
            yield _clash(
                "applies to a pipeline, but `parallel.pipeline.stages` is 1; increase it, or remove this key",
                f"parallel.pipeline.{key}",
                "parallel.pipeline.stages",
            )
        return
    num_stages = pipeline.stages * (pipeline.stages_per_rank or SCHEDULES[pipeline.schedule].stages_per_rank)
    if pipeline.split is not None and len(pipeline.split) != num_stages - 1:
        yield _clash(
            f"must name the first layer of each of the {num_stages} stages except the first, but has"
            f" {len(pipeline.split)} names instead of {num_stages - 1}",
            "parallel.pipeline.split",
            "parallel.pipeline.stages",
        )


def _steps(training: Training) -> Iterator[Contradiction]:
    stop, last = training.stop_at_step, training.max_steps
    if stop is not None and last is not None and stop > last:
        yield _clash(
            f"must be at most `training.max_steps` {last}, but is {stop}", "training.stop_at_step", "training.max_steps"
        )


def _warmup(training: Training, schedule: Schedule) -> Iterator[Contradiction]:
    warmup, last = schedule.warmup, training.max_steps
    if isinstance(warmup, int) and last is not None and warmup >= last:
        yield _clash(
            f"must be below `training.max_steps` {last}, but is {warmup}; a number below 1 is a fraction of the steps",
            "schedule.warmup",
            "training.max_steps",
        )


def _best_metric(task: TaskSection, evaluation: Evaluation) -> Iterator[Contradiction]:
    allowed = [*task.metrics, "loss"]
    if evaluation.best is not None and evaluation.best not in allowed:
        yield _clash(
            f"must be one of `task.metrics` or loss ({', '.join(allowed)}), but is {shown_value(evaluation.best)}",
            "evaluation.best",
            "task.metrics",
        )


def _nothing_evaluated(data: Data, evaluation: Evaluation) -> Iterator[Contradiction]:
    written = evaluation.model_fields_set
    if data.validation is None and "every" in written and evaluation.every is not None:
        yield _clash(
            f'is "{evaluation.every}", but `data.validation` is null; set a validation split, or set this key to null',
            "evaluation.every",
            "data.validation",
        )
    if data.validation is None or evaluation.every is None:
        reason = "`data.validation` is null" if data.validation is None else "`evaluation.every` is null"
        for key in ("best", "patience"):
            if key in written and getattr(evaluation, key) is not None:
                yield _clash(
                    f"requires evaluations, but {reason}", f"evaluation.{key}", "evaluation.every", "data.validation"
                )


def _folder_name(checkpoint: Checkpoint) -> Iterator[Contradiction]:
    for placeholder in re.findall(r"\{.*?\}", checkpoint.folder):
        if placeholder != "{name}":
            yield _clash(f"has {shown_value(placeholder)}; the only placeholder is {{name}}", "checkpoint.folder")


def _often_in_memory(checkpoint: Checkpoint) -> Iterator[Contradiction]:
    memory, every = checkpoint.memory, checkpoint.every
    if (
        memory is not None
        and every is not None
        and memory.every.unit == every.unit
        and memory.every.count >= every.count
    ):
        text = f'must be more often than `checkpoint.every`, which is "{every}", but is "{memory.every}"; lower it'
        yield _clash(text, "checkpoint.memory.every", "checkpoint.every")


def _project(logging: Logging) -> Iterator[Contradiction]:
    if logging.project is not None and not {"wandb", "mlflow"} & set(logging.to):
        yield _clash(
            'applies only to "wandb" and "mlflow", but `logging.to` has neither; add one, or set this key to null',
            "logging.project",
            "logging.to",
        )


def _profiled_steps(logging: Logging, training: Training) -> Iterator[Contradiction]:
    if logging.profile is None:
        return
    first, last = logging.profile.steps
    if first > last:
        yield _clash(
            f"must be the first and the last step, but is [{first}, {last}]; use [{last}, {first}]",
            "logging.profile.steps",
        )
    elif training.max_steps is not None and first > training.max_steps:
        text = f"begins at step {first}, but `training.max_steps` is {training.max_steps}; use an earlier step"
        yield _clash(text, "logging.profile.steps", "training.max_steps")


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Contradiction]]], ...] = (
    (("task",), _columns),
    (("task",), _labels),
    (("task",), _several_labels),
    (("task", "parallel"), _chunks),
    (("distillation", "task", "parallel"), _teacher),
    (("task",), _similarities),
    (("task", "training"), _rows_to_compare),
    (("task", "parallel"), _losses_of_copies),
    (("task",), _beams),
    (("task", "parallel"), _stages_of_generation),
    (("task",), _no_answers),
    (("task",), _without_question),
    (("task", "data"), _windows),
    (("model",), _weights),
    (("model", "parallel"), _adapter),
    (("model", "parallel"), _reader),
    (("task", "model"), _tokenizer),
    (("task", "data"), _text_lengths),
    (("task", "data"), _padded_lengths),
    (("task", "training"), _microbatches),
    (("model",), _model_folders),
    (("data",), _data_places),
    (("data", "task"), _mixture),
    (("parallel",), _pipeline),
    (("parallel",), _deepspeed_keys),
    (("training",), _steps),
    (("training", "schedule"), _warmup),
    (("task", "evaluation"), _best_metric),
    (("data", "evaluation"), _nothing_evaluated),
    (("checkpoint",), _folder_name),
    (("checkpoint",), _often_in_memory),
    (("logging",), _project),
    (("logging", "training"), _profiled_steps),
)
"""Rules, each with the sections that are its arguments."""


def message(contradiction: Contradiction) -> str:
    return f"`{dotted(contradiction.keys[0])}` {contradiction.text}"
