"""Losses of preferences, from the log-probabilities of whole answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.features.preferences.section import PreferenceLoss


@dataclass(frozen=True)
class Answers:
    """The log-probabilities of the answers of rows.

    Each is `[rows, 2]`: the chosen and the rejected answer; for KTO, the own answer and that of another row.

    Attributes:
        logps: the sums over the tokens of an answer.
        reference: the same under the reference; zeros without one.
        lengths: the number of tokens of an answer.
        nll: the mean loss of a labelled token, prompts included if they are labelled.
        desirable: KTO: 1 for desirable rows, else 0 `[rows]`.
    """

    logps: Tensor
    reference: Tensor
    lengths: Tensor
    nll: Tensor
    desirable: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> Answers:
        """Return the answers in scores `[rows, 2, 5]`."""
        logps, reference, lengths, nll, desirable = scores.unbind(-1)
        return cls(logps, reference, lengths, nll, desirable[:, 0])

    @property
    def ratios(self) -> Tensor:
        """The logarithm of policy / reference for each answer `[rows, 2]`."""
        return self.logps - self.reference

    @property
    def means(self) -> Tensor:
        """The mean log-probability of a token of each answer `[rows, 2]`."""
        return self.logps / self.lengths


def rewards(answers: Answers, loss: PreferenceLoss) -> Tensor:
    """Return the implicit reward of each answer `[rows, 2]`."""
    return loss.scale * (answers.ratios if loss.has_reference else answers.means)


def pair_losses(answers: Answers, loss: PreferenceLoss) -> Tensor:
    """Return the loss of each pair `[rows]`.

    `dpo`: Rafailov et al. 2023 (arXiv:2305.18290), equation 7, with label smoothing that of Mitchell 2023. `ipo`: Azar
    et al. 2023 (arXiv:2310.12036), equation 17, of mean log-ratios, as its authors use it. `simpo`: Meng et al. 2024
    (arXiv:2405.14734), equation 6. `orpo`: Hong et al. 2024 (arXiv:2403.07691), equation 6.
    """
    chosen, rejected = rewards(answers, loss).unbind(1)
    match loss.type:
        case "dpo":
            margin, wrong = chosen - rejected, loss.label_smoothing
            return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
        case "ipo":
            # Means and not sums, or long answers would dominate the squares.
            ratios = answers.ratios / answers.lengths
            return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * loss.scale)).square()
        case "simpo":
            return -F.logsigmoid(chosen - rejected - loss.gamma)
        case "orpo":
            log_odds = answers.means - _log_complement(answers.means)
            return answers.nll[:, 0] - loss.scale * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    raise AssertionError(f"{loss.type} is no loss of pairs")


def divergence(answers: Answers) -> Tensor:
    """Return the estimate of the divergence from the reference, from answers to other prompts, a scalar.

    Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1. It has no gradient.
    """
    # The mean over the global batch, which is why rows of KTO depend on each other.
    return answers.ratios[:, 1].detach().mean().clamp(min=0)


def labelled_losses(answers: Answers, loss: PreferenceLoss, kl: Tensor) -> Tensor:
    """Return the KTO loss of each row `[rows]`: equation 8 of Ethayarajh et al. 2024, without its constant.

    Args:
        kl: the estimate of `divergence`.
    """
    distance = loss.scale * (answers.ratios[:, 0] - kl)
    is_desirable = answers.desirable > 0.5
    weights = torch.where(is_desirable, loss.desirable_weight, loss.undesirable_weight)
    return weights * (1 - torch.sigmoid(torch.where(is_desirable, distance, -distance)))


def _log_complement(logp: Tensor) -> Tensor:
    """Return log(1 - exp(logp)); a certain answer would give an infinite gradient."""
    return torch.log(-torch.expm1(logp.clamp(max=-1e-7)))
