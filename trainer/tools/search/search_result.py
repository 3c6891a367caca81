"""The result of a search: plain values for `search.json`, lines, and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import plotly.graph_objects as go
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import binomtest, t

from trainer.base.disk import replace_text
from trainer.base.text import aligned
from trainer.observe.metrics_file import decode_number, encode_number
from trainer.observe.summary import format_decimal, format_seconds
from trainer.tools.report import MISSING
from trainer.tools.report.figures import Curve, bars, curves, parallel
from trainer.tools.report.page import Section, Table, render
from trainer.tools.search.study import REASON, SECONDS, STEP, WORDS, Ranked, Study, Yardsticks

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "not ended",
}
_CONFIDENCE = 0.95
_SHOWN = 5  # trials in the terminal
_WIDE = 30  # the ratio of the ends of a range that is drawn by logarithms


def result_of(ranked: Sequence[Ranked], study: Study, metric: str, yardsticks: Yardsticks) -> dict[str, Any]:
    """Return the trials of a search, the best one, the importance of the keys, and the score of a third split.

    `ranked` are the complete trials, the best first.
    """
    complete = [_complete(one, metric) for one in ranked]
    others = [_values(one) for one in study.trials if one.state != TrialState.COMPLETE]
    return {
        "metric": metric,
        "larger_is_better": study.sign > 0,
        "best": complete[0] if complete else None,
        "trials": [*complete, *others],
        "importance": study.importance(),
        "test": study.score or None,
        "baseline": yardsticks.baseline,
        "remarks": list(_remarks(complete, metric, study.sign, yardsticks)),
    }


def _complete(one: Ranked, metric: str) -> dict[str, Any]:
    values, means = [score[metric] for score in one.scores], one.means
    return {
        **_values(one.trial),
        "value": one.trial.value,
        "loss": encode_number(means["loss"]),
        "seeds": values,
        "mean": means[metric],
        "half": _half(values),
    }


def _remarks(complete: Sequence[Mapping[str, Any]], metric: str, sign: int, yardsticks: Yardsticks) -> Iterator[str]:
    """Yield the reasons to doubt the best trial: equal or close trials, and a baseline that it does not beat."""
    if not complete:
        return
    best, rows, baseline = complete[0], yardsticks.rows, yardsticks.baseline
    yield from _ties(complete, metric)
    # Equal values of few seeds do not mean that there is no error.
    of_seeds = bool(best["half"])
    half = best["half"] if of_seeds else _half_of_share(best["mean"], yardsticks)
    if half is None:
        if any(one["mean"] != best["mean"] for one in complete):
            on_rows = f" on {rows:,} validation rows" if rows else ""
            yield (
                f"the error of the best {metric}{on_rows} is unknown, so differences may be noise;"
                " `--seeds` measures it"
            )
    elif close := sum(0 < abs(one["mean"] - best["mean"]) <= half for one in complete):
        count = "another trial is" if close == 1 else f"{close} other trials are"
        of_rows = "" if of_seeds else f" with {rows:,} validation rows"
        yield (
            f"{count} within the error of the best {metric}, ± {format_decimal(half)} at {_CONFIDENCE:.0%}{of_rows};"
            " more seeds (`--seeds`) or rows may tell them apart"
        )
    if baseline is not None and max(sign * one["mean"] for one in complete) <= sign * baseline:
        ignoring = "the majority class" if metric == "accuracy" else "a prediction that ignores the input"
        yield f"no trial beats {ignoring}: {metric} {format_decimal(baseline)}"


def _ties(complete: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Yield how the best of equal trials was chosen."""
    best = complete[0]
    equal = [one for one in complete if (one["mean"], len(one["seeds"])) == (best["mean"], len(best["seeds"]))]
    # `complete` is sorted by these numbers and then by the loss, so the best stands first among its equals.
    same_loss = [one for one in equal if one["loss"] == best["loss"]]
    decides = "the loss decides" if same_loss == [best] else "the first one with the lowest loss is taken"
    both = metric if metric == "loss" or len(same_loss) < len(equal) else f"{metric} and loss"
    if len(complete) > 1 and all(one["mean"] == best["mean"] for one in complete):
        yield f"the trials do not differ in {both}; {decides}"
    elif len(equal) > 1:
        yield f"{len(equal)} trials have the best {both}; {decides}"


def _values(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": _STATES[trial.state],
        "overrides": list(trial.user_attrs.get(WORDS, ())),
        "step": trial.user_attrs.get(STEP),
        "seconds": trial.user_attrs.get(SECONDS),
        "reason": trial.user_attrs.get(REASON),
        "curve": [[step, encode_number(value)] for step, value in sorted(trial.intermediate_values.items())],
    }


def _half(values: Sequence[float]) -> float | None:
    """Return half of the width of the 95 % interval of a mean (Student's t); None for one value."""
    if len(values) < 2:
        return None
    return float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5)


def _half_of_share(share: float, of: Yardsticks) -> float | None:
    """Return the longer side of the 95 % interval of a share of rows (Wilson 1927); None if it is no share."""
    if not of.rows or not of.is_share:
        return None
    ends = binomtest(round(share * of.rows), of.rows).proportion_ci(_CONFIDENCE, "wilson")
    return float(max(share - ends.low, ends.high - share))


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the best trials and the importance of each key as lines."""
    states = [one["state"] for one in result["trials"]]
    found = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    shown = [f"trials    {', '.join(found) or 'none'}"]
    rows = [
        (str(one["trial"]), _value(one), *_loss(one, result), str(one["step"]), " ".join(one["overrides"]))
        for one in result["trials"]
        if one["state"] == "complete"
    ]
    if rows:
        header = ("trial", *_measures(result), "step", "overrides")
        shown += [f"  {line}" for line in aligned([header, *rows[:_SHOWN]])]
    shown += [f"note      {text}" for text in result["remarks"]]
    if result["importance"]:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in result["importance"].items())
        shown.append(f"matters   {shares}")
    if test := result["test"]:
        metrics = "  ".join(f"{name} {format_decimal(decode_number(value))}" for name, value in test["metrics"].items())
        shown.append(f"test      trial {test['trial']} on {test['split']}: {metrics}")
    return shown


def _measures(result: Mapping[str, Any]) -> list[str]:
    """Return the metric, and the loss, which decides between equal values."""
    return list(dict.fromkeys((result["metric"], "loss")))


def _loss(trial: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return the loss of a trial, unless it is the metric."""
    shown = MISSING if trial.get("loss") is None else format_decimal(decode_number(trial["loss"]))
    return [shown] if _measures(result)[1:] else []


def _value(trial: Mapping[str, Any]) -> str:
    if trial["state"] != "complete":
        return MISSING
    if trial["half"] is None:
        return format_decimal(trial["value"])
    return f"{format_decimal(trial['mean'])} ± {format_decimal(trial['half'])} ({len(trial['seeds'])} seeds)"


def write_page(result: Mapping[str, Any], folder: Path) -> None:
    """Write `search.html` into a folder."""
    header = ("trial", *_measures(result), "step", "state", "overrides", "time", "reason")
    rows = [
        (
            str(one["trial"]),
            _value(one),
            *_loss(one, result),
            str(one["step"] or MISSING),
            one["state"],
            " ".join(one["overrides"]),
            MISSING if one["seconds"] is None else format_seconds(one["seconds"]),
            one["reason"] or "",
        )
        for one in result["trials"]
    ]
    sections = [Section("Trials", [Table(header, rows), *result["remarks"]]), Section("Keys", list(_keys(result)))]
    found = [one for one in result["trials"] if one["curve"]]
    if found:
        drawn = [
            Curve(
                f"trial {one['trial']}", [step for step, _ in one["curve"]], [decode_number(v) for _, v in one["curve"]]
            )
            for one in sorted(found, key=lambda one: int(one["trial"]))
        ]
        sections.append(Section("Curves", [curves(f"validation {result['metric']}", drawn)]))
    if test := result["test"]:
        scores = [(name, format_decimal(decode_number(value))) for name, value in test["metrics"].items()]
        title = f"Trial {test['trial']} on {test['split']}"
        sections.append(Section("Third split", [Table(("metric", "value"), scores, title)]))
    replace_text(folder / "search.html", render(f"Search in {folder.name}", sections), alone=False)


def _keys(result: Mapping[str, Any]) -> Iterator[go.Figure]:
    complete = [one for one in result["trials"] if one["state"] == "complete"]
    if result["importance"]:
        shares = [100 * share for share in result["importance"].values()]
        yield bars("importance of the keys", list(result["importance"]), [("share", shares)], "%")
    if complete:
        words = [dict(word.split("=", 1) for word in one["overrides"]) for one in complete]
        columns = [(key, [row[key] for row in words]) for key in words[0]]
        columns.append((result["metric"], [f"{one['mean']:.6g}" for one in complete]))
        places = zip(*(_places(texts) for _, texts in columns), strict=True)
        texts = zip(*(texts for _, texts in columns), strict=True)
        names = [f"trial {one['trial']}" for one in complete]
        found = list(zip(names, places, texts, strict=True))
        yield parallel("values of the complete trials; the best one on top", [key for key, _ in columns], found)


def _places(texts: Sequence[str]) -> list[float]:
    """Return the place of each value from 0 to 1: numbers by size, over wide ranges by their logarithm."""
    try:
        values = list(map(float, texts))
    except ValueError:
        names = list(dict.fromkeys(texts))
        values = [float(names.index(text)) for text in texts]
    if min(values) > 0 and max(values) > _WIDE * min(values):
        values = list(map(math.log, values))
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]
