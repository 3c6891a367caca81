"""The section `task` of learning from preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, Section, clash, shared
from trainer.recipe.schema.task_keys import DECODER, GenerativeKeys, Start, TaskKeys, Traits

_BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
_NUMBERS = {
    "label_smoothing": ("dpo",),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""The losses that read a number."""


class PreferenceLoss(Section):
    """The loss of preferences, with its numbers.

    The reference of dpo, ipo and kto is the model at the start of the training.
    """

    type: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """For pairs, but kto (Ethayarajh et al. 2024) for single answers with a label. simpo and orpo need no reference."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """Strength of the divergence from the reference; simpo: scale of the rewards; orpo: weight of the odds ratio; ipo:
    tau. null: 2.0 for simpo, else 0.1."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: probability that a preference is wrong (conservative DPO, Mitchell 2023)."""
    gamma: float = Field(0.5, ge=0)
    """simpo: margin of the rewards."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto: weight of answers with a true label."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of answers with a false label."""

    @property
    def scale(self) -> float:
        """The value of `beta`."""
        return _BETAS[self.type] if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model at the start."""
        return self.type not in ("simpo", "orpo")

    def contradictions(self) -> Iterator[Contradiction]:
        for key in self.changed(*_NUMBERS):
            if self.type not in _NUMBERS[key]:
                text = f"applies to the loss {_NUMBERS[key][0]}, but `task.loss.type` is {self.type}; remove it"
                yield clash(text, f"task.loss.{key}", "task.loss.type")


class Preference(GenerativeKeys):
    """Prefer one answer of a prompt to another one: DPO and similar losses; KTO learns from single labelled answers.

    A column holds texts, or messages, which the tokenizer's chat template writes.
    """

    implementation = "trainer.features.preferences.preference:PreferenceTask"
    type: Literal["preference"]
    traits = Traits(chats=True)
    start = replace(DECODER, learning_rate=1e-6)
    also_called = ("dpo", "kto", "orpo", "simpo")
    loss: PreferenceLoss = PreferenceLoss()
    """The loss, with its numbers."""
    prompt: Name | None = "prompt"
    """Column of prompts; null: `chosen` and `rejected` hold whole texts or chats that start alike, and `completion`
    holds whole chats."""
    chosen: Name = "chosen"
    """Column of the better answers."""
    rejected: Name = "rejected"
    """Column of the worse answers."""
    completion: Name = "completion"
    """kto: the column of the answers."""
    label: Name = "label"
    """kto: the column of true or false, 1 or 0, yes or no, or desirable or undesirable."""
    tools: Name | None = None
    """Column of the tools of a chat, as lists of JSON schemas or their text."""
    metrics: list[Literal["reward_accuracy", "reward_margin", "chosen_logps", "rejected_logps", "kl"]] = Field(
        default=["reward_accuracy", "reward_margin", "chosen_logps", "rejected_logps"], min_length=1
    )
    """Share of pairs with a higher reward of the chosen answer (kto: of answers on the right side of the divergence);
    difference of the mean rewards; mean log-probability of an answer; kto: divergence from the reference."""

    @property
    def texts_per_row(self) -> int:
        return 2

    @property
    def joint_loss(self) -> str | None:
        return "`task.loss.type` kto" if self.loss.type == "kto" else None

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from self.loss.contradictions()
        kind = self.loss.type
        unread = ("chosen", "rejected") if kind == "kto" else ("completion", "label")
        for key in self.changed(*unread):
            other = "other losses" if kind == "kto" else "the loss kto"
            yield clash(
                f"applies to {other}, but `task.loss.type` is {kind}; remove it", f"task.{key}", "task.loss.type"
            )
        used = ["prompt", *(("completion", "label") if kind == "kto" else ("chosen", "rejected")), "tools"]
        yield from shared({key: getattr(self, key) for key in used})
        if "kl" in self.metrics and kind != "kto":
            text = f'has "kl", which only the loss kto estimates, but `task.loss.type` is {kind}; remove it'
            yield clash(text, "task.metrics", "task.loss.type")


class RewardModel(TaskKeys):
    """Give a text one number, its reward, that is higher for better texts (Bradley-Terry).

    A column holds texts, or messages, which the tokenizer's chat template writes. `trainer predict` gives the rewards
    of `prompt` with `chosen`.
    """

    implementation = "trainer.features.preferences.reward_model:RewardModelTask"
    type: Literal["reward_model"]
    traits = Traits(chats=True)
    start = Start(model=DECODER.model)
    also_called = ("reward", "reward_modeling")
    prompt: Name | None = "prompt"
    """Column of prompts; null: the other columns hold whole texts or chats."""
    chosen: Name = "chosen"
    """Column of the better answers."""
    rejected: Name = "rejected"
    """Column of the worse answers."""
    margin: Name | None = None
    """Column of the least difference of the two rewards."""
    center_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of both rewards in the loss, which centres them."""
    metrics: list[Literal["accuracy", "reward_margin"]] = Field(default=["accuracy", "reward_margin"], min_length=1)
    """Share of pairs with a higher reward of the chosen answer; mean difference of the rewards."""

    @property
    def texts_per_row(self) -> int:
        return 2

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from shared({key: getattr(self, key) for key in ("prompt", "chosen", "rejected", "margin")})
