"""Conversion of name, folder, evaluation, checkpoints and logs."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import get_args

from trainer.recipe.schema import Duration, Interval, Logging, Recipe
from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.sources import Item, Tool

_TA, _DS = Tool.TRAINING_ARGUMENTS, Tool.DEEPSPEED
METRICS = {"matthews_correlation": "matthews", "spearmanr": "spearman", "pearsonr": "pearson"}
"""Names of metrics that differ from those of a recipe."""


def running(draft: Draft) -> None:
    _name(draft)
    _folder(draft)
    _evaluation(draft)
    _checkpoints(draft)
    _logging(draft)
    timeout = draft.sources.written(_TA, "ddp_timeout")
    if timeout is not None and not timeout.is_default:
        draft.take("parallel.stall_timeout", str(Duration(draft.whole(timeout, 600), "second")), timeout)


def _name(draft: Draft) -> None:
    run, folder = draft.sources.given(_TA, "run_name"), draft.sources.given(_TA, "output_dir")
    item = run or folder
    if item is None:
        draft.refuse("name", "the name of the run")
        return
    text = draft.text(item, "run")
    wanted = PurePath(text).name if item is folder else text
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:100]
    if re.fullmatch(str(Recipe.model_fields["name"].metadata[0].pattern), name):
        draft.take("name", name, item, note="" if name == text else f"from {text}")
    else:
        draft.refuse("name", "the name of the run", item)


def _folder(draft: Draft) -> None:
    if item := draft.sources.given(_TA, "output_dir"):
        draft.take("checkpoint.folder", draft.text(item), item)
    item = draft.sources.given(_TA, "resume_from_checkpoint")
    if item is not None and item.value in (True, "True", "true"):
        draft.take("checkpoint.resume", "auto", item)
    else:
        text = "the trainer cannot resume a checkpoint of the Trainer; to start from its weights, set"
        draft.say(item, Outcome.NONE, f"{text} `model.name_or_path`")
    item = draft.sources.written(_TA, "overwrite_output_dir")
    if draft.flag(item):
        draft.say(item, Outcome.DIFFERS, "nothing is overwritten; with `checkpoint.resume` auto the run resumes")


# When


def _interval(draft: Draft, strategy: Item, steps: Item | None, path: str) -> None:
    kind = draft.text(strategy, "no")
    if kind in ("no", "epoch"):
        draft.unread(f"{strategy.key} is {kind}", steps)
        draft.take(path, None if kind == "no" else "1 epoch", strategy)
    elif kind == "steps" and steps is not None:
        number, total = draft.number(steps, 500), draft.value("training.max_steps")
        if number >= 1:
            draft.take(path, str(Interval(math.ceil(number), "steps")), strategy, steps)
        elif number > 0 and isinstance(total, int):
            # `TrainerState.compute_steps` of transformers rounds a fraction of the steps up.
            draft.take(path, str(Interval(math.ceil(total * number), "steps")), strategy, steps)
        else:
            text = f"{steps.key} is a fraction {number:g} of the steps; write the number of steps"
            draft.refuse(path, text, strategy, steps)
    else:
        draft.refuse(path, f"{strategy.key} {kind} has no counterpart; write an interval, or null", strategy)


def _evaluation(draft: Draft) -> None:
    sources, path = draft.sources, "evaluation.every"
    strategy, old = sources.get(_TA, "eval_strategy"), sources.written(_TA, "evaluation_strategy")
    if old is not None and (strategy is None or strategy.origin is None):
        strategy = old
    elif old is not None:
        draft.unread("eval_strategy has precedence", old)
    if strategy is None:
        return
    steps, wanted = sources.written(_TA, "eval_steps"), sources.written(_TA, "do_eval")
    # TrainingArguments takes `logging_steps` if `eval_steps` is missing or 0.
    if strategy.value == "steps" and (steps is None or not steps.value):
        draft.unread("logging_steps applies", steps)
        steps = sources.get(_TA, "logging_steps")
    if strategy.value == "no" and wanted is not None and draft.flag(wanted):
        draft.unread("eval_strategy is no", steps)
        note = "the example scripts evaluate once after training"
        draft.take(path, _end(draft), strategy, wanted, note=note)
    else:
        draft.say(wanted, Outcome.SAME, "the interval determines it")
        _interval(draft, strategy, steps, path)
    _best(draft, strategy)


def _end(draft: Draft) -> str | Todo:
    steps, epochs = draft.value("training.max_steps"), draft.value("training.epochs")
    if isinstance(steps, int):
        return f"{steps} steps"
    if isinstance(epochs, int):
        return str(Interval(epochs, "epochs"))
    return Todo("once after training; write the length of the training")


def _best(draft: Draft, strategy: Item) -> None:
    written = draft.sources.written
    load, metric = written(_TA, "load_best_model_at_end"), written(_TA, "metric_for_best_model")
    wanted = draft.flag(load)
    if strategy.value == "no":
        draft.unread("there are no evaluations", load, metric)
        return
    if metric is not None and metric.value:
        name = draft.text(metric).removeprefix("eval_")
        draft.take("evaluation.best", METRICS.get(name, name), metric)
        direction = written(_TA, "greater_is_better")
        given = direction is not None and direction.value is not None
        agrees = not given or draft.flag(direction) != name.endswith("loss")
        draft.say(direction, Outcome.SAME if agrees else Outcome.NONE, "each metric defines its better direction")
    elif wanted and load is not None:
        draft.take("evaluation.best", "loss", load, note="the default metric of the Trainer")
    if wanted:
        draft.say(load, Outcome.DIFFERS, "the best model is in `best/` of the run, the last in `model/`")


def _checkpoints(draft: Draft) -> None:
    strategy, path = draft.sources.get(_TA, "save_strategy"), "checkpoint.every"
    if strategy is None:
        return
    steps = draft.sources.get(_TA, "save_steps")
    if strategy.value == "best":
        draft.unread("save_strategy is best", steps)
        draft.take(path, None, strategy, note="the best model is always exported to `best/`", differs=True)
    else:
        _interval(draft, strategy, steps, path)
    keep = draft.sources.get(_TA, "save_total_limit")
    # The Trainer keeps all checkpoints with a limit of 0 or below.
    if keep is not None and keep.value is not None and draft.whole(keep) > 0:
        draft.take("checkpoint.keep", draft.whole(keep), keep)
    elif strategy.value != "no":
        draft.say(keep, Outcome.DIFFERS, "the Trainer keeps every checkpoint; a run keeps `checkpoint.keep`")


# Logs


def _logging(draft: Draft) -> None:
    strategy, path = draft.sources.get(_TA, "logging_strategy"), "logging.every"
    printed = draft.sources.written(_DS, "steps_per_print")
    if strategy is not None:
        draft.unread("logging_steps has precedence", printed)
        if strategy.value == "no":
            draft.unread("logging_strategy is no", draft.sources.written(_TA, "logging_steps"))
            draft.say(strategy, Outcome.NONE, "metrics are always written; see `logging.every`")
        else:
            _interval(draft, strategy, draft.sources.get(_TA, "logging_steps"), path)
    elif printed is not None and not printed.is_auto and not printed.is_default:
        draft.take(path, str(Interval(draft.positive(printed), "steps")), printed)
    _loggers(draft)


def _named_loggers(draft: Draft) -> dict[str, Item]:
    """Return the names of loggers, known or not, with the key that turns each on; a key of DeepSpeed wins."""
    named: dict[str, Item] = {}
    item = draft.sources.written(_TA, "report_to")
    if item is not None and not item.is_default:
        names = item.value if isinstance(item.value, list) else [item.value]
        named |= {str(name): item for name in names if name != "none"}
    for section, name in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("csv_monitor", "csv")):
        switch = draft.sources.written(_DS, f"{section}.enabled")
        if switch is not None and draft.flag(switch):
            named[name] = switch
    return named


def _loggers(draft: Draft) -> None:
    named = _named_loggers(draft)
    words: tuple[str, ...] = get_args(get_args(Logging.model_fields["to"].annotation)[0])
    known = {name: item for name, item in named.items() if name in words}
    if known:
        to = [name for name in words if name in (*Logging().to, *known)]
        draft.take("logging.to", to, *{item.key: item for item in known.values()}.values())
    project = draft.sources.written(_DS, "wandb.project")
    if project is not None and "wandb" in known:
        draft.take("logging.project", project.value, project)
    else:
        draft.unread("nothing is logged to W&B", project)
    for name, item in named.items():
        if name not in known:
            others = [other for other, its in named.items() if its is item and other in known]
            text = f"{name} is not supported: {', '.join(words)}"
            draft.say(item, Outcome.NONE, text + (f"; `logging.to` has {', '.join(others)}" if others else ""))
