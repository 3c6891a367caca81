"""Metrics of generated texts by the field's own packages, rouge-score and sacrebleu, which this module imports.

The packages are optional; tasks call `require_packages` before the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.tasks.metrics.metric import Metric

_ROUGE, _SACREBLEU = ("rouge_score.rouge_scorer", "rouge-score"), ("sacrebleu", "sacrebleu")
"""The module and the package of a metric."""


def rouge(kind: str, generated: Sequence[str], targets: Sequence[str]) -> float:
    """Return the mean F1 of ROUGE over all rows, of stemmed words (Lin 2004, ACL W04-1013).

    Args:
        kind: `rouge1`, `rouge2`, `rougeL`, or `rougeLsum`, which compares the lines of two texts.
    """
    scorer = _module(_ROUGE).RougeScorer([kind], use_stemmer=True)
    scores = [scorer.score(target, text)[kind].fmeasure for text, target in zip(generated, targets, strict=True)]
    return float(sum(scores) / max(1, len(scores)))


def bleu(generated: Sequence[str], targets: Sequence[str]) -> float:
    """Return BLEU of the whole split, from 0 to 100, with the tokens of mteval-13a (Post 2018, arXiv:1804.08771)."""
    return float(_module(_SACREBLEU).corpus_bleu(list(generated), [list(targets)]).score)


def chrf(generated: Sequence[str], targets: Sequence[str]) -> float:
    """Return chrF2 of the whole split, from 0 to 100 (Popovic 2015, ACL W15-3049)."""
    return float(_module(_SACREBLEU).corpus_chrf(list(generated), [list(targets)]).score)


_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ROUGE1, ROUGE2, ROUGEL, ROUGELSUM = (Metric(partial(rouge, kind)) for kind in _KINDS)
BLEU, CHRF = Metric(bleu), Metric(chrf)
_PACKAGES = {**dict.fromkeys(_KINDS, _ROUGE), "bleu": _SACREBLEU, "chrf": _SACREBLEU}


def require_packages(metrics: Iterable[str]) -> None:
    """Import the packages of these metrics.

    Raises:
        UsageError: a package is not installed.
    """
    for metric in metrics:
        if package := _PACKAGES.get(metric):
            try:
                _module(package)
            except ImportError as error:
                raise UsageError(
                    f"`task.metrics` names {metric}, which needs the package {package[1]}; install it"
                    f" ({install_command('generation')}) or remove the metric ({error})"
                ) from error


def _module(package: tuple[str, str]) -> Any:
    return import_module(package[0])
