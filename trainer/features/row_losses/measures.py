"""Loss, margin, believed label and probabilities of rows, from the scores that a training pass computed.

The margin is the logit of the label minus the largest other logit (Pleiss et al. 2020, arXiv:2001.10528).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.task import Task

Kind = Literal["classes", "tokens", "labels", "losses"]
"""`classes`: a row has one class; `tokens`: each word has one; `labels`: a row has several; `losses`: none of these."""

MOST_CLASSES = 64
"""Probabilities of more classes are not kept."""


def kind_of(task: Task, scores: Tensor, labels: Tensor) -> Kind:
    """Return the kind of the rows with these scores and labels."""
    if task.labels_are_tokens or labels.is_floating_point():
        several = labels.is_floating_point() and scores.dim() == 2 and scores.shape == labels.shape
        return "labels" if several and task.class_names else "losses"
    if scores.dim() == 2 and labels.dim() == 1 and scores.shape[1] > 1:
        return "classes"
    return "tokens" if task.class_names and scores.shape[:-1] == labels.shape else "losses"


@torch.no_grad()
def measured(kind: Kind, task: Task, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the measures of rows, each `[batch]`, and `probabilities` `[batch, classes]` if there are few classes.

    Losses have no class weights and no smoothing. Ranks with shards of the scores must all call it.

    Args:
        task: the task with the loss of evaluations.
        scores: the scores of training `[batch, ...]`.
        labels: the labels `[batch, ...]`.
    """
    if kind == "losses":
        return {
            "loss": torch.stack(
                [_loss(task, scores[row : row + 1], labels[row : row + 1]) for row in range(len(labels))]
            )
        }
    logits = at_least_fp32(scores)
    if kind == "labels":
        return _of_several(logits, labels)
    if kind == "tokens":
        return _of_tokens(logits, labels)
    found = _of_classes(logits, labels)
    if logits.shape[-1] <= MOST_CLASSES:
        found["probabilities"] = logits.softmax(-1).half()
    return found


def _loss(task: Task, scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the labels of one row `[1, ...]`."""
    number = torch.ones(()) if task.rows_are_labels else task.num_valid(labels)
    return task.loss_sum(scores, labels).float() / number.to(scores.device).clamp(min=1)


def _of_classes(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the measures of logits `[..., classes]` for labels `[...]`; an ignored label counts as the first class."""
    known = labels.clamp(min=0)
    own = logits.gather(-1, known.unsqueeze(-1)).squeeze(-1)
    others = logits.scatter(-1, known.unsqueeze(-1), -torch.inf)
    loss = F.cross_entropy(logits.flatten(0, -2), known.flatten(), reduction="none").view(known.shape)
    return {"loss": loss, "margin": own - others.amax(-1), "label": known, "believed": logits.argmax(-1)}


def _of_tokens(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the mean loss of the labelled tokens, and the rest of the token with the smallest margin."""
    found, valid = _of_classes(logits, labels), labels != IGNORED_LABEL
    loss = (found["loss"] * valid).sum(-1) / valid.sum(-1).clamp(min=1)
    margins = found["margin"].masked_fill(~valid, torch.inf)
    position = margins.argmin(-1, keepdim=True)
    at = {name: found[name].gather(-1, position).squeeze(-1) for name in ("label", "believed")}
    return {"loss": loss, "margin": margins.gather(-1, position).squeeze(-1), **at, "position": position.squeeze(-1)}


def _of_several(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the mean loss of all classes, and the class with the smallest margin: the logit with the label's sign.

    `label` is that class if the row has it, else -1, and `believed` the other way round.
    """
    margins = torch.where(labels > 0, logits, -logits)
    margin, place = margins.min(-1)
    has = labels.gather(-1, place.unsqueeze(-1)).squeeze(-1) > 0
    believed = has == (margin > 0)
    none = torch.full_like(place, -1)
    loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(-1)
    return {
        "loss": loss,
        "margin": margin,
        "label": torch.where(has, place, none),
        "believed": torch.where(believed, place, none),
    }
