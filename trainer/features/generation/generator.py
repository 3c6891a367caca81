"""The generator of texts that is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.features.generation.generation import generate, set_generation
from trainer.features.generation.prompts import ContinuingTask
from trainer.features.generation.section import Generation
from trainer.recipe.plan import RunPlan, axis_degree
from trainer.tasks.causal_lm import CausalLMTask
from trainer.tasks.generated import TextGenerator
from trainer.tasks.task import Task
from trainer.tasks.types import Tokenizer


class _Transformers(TextGenerator):
    """Generation by `generate` of transformers."""

    def require_whole(self, plan: RunPlan) -> None:
        if plan.recipe.data.padding_free:
            raise UsageError(
                "`data.padding_free` must be false to generate texts token by token, but is true; remove it"
            )
        parallel, of_positions = plan.recipe.parallel, "a rank needs the keys and values of all earlier positions"
        for key, degree, needed in (
            ("pipeline.stages", parallel.pipeline.stages, "a rank needs the whole model"),
            *((key, degree, of_positions) for key, degree in axis_degree(parallel).items()),
        ):
            if degree > 1:
                raise UsageError(
                    f"`parallel.{key}` must be 1 to generate texts, for which {needed}, but is {degree}; add"
                    f" parallel.{key}=1"
                )

    def configure(self, model: nn.Module, task: Task, tokenizer: Tokenizer | None) -> None:
        ends = task.end_tokens(tokenizer) if tokenizer else ()
        set_generation(model, task.generation, tokenizer, ends, task.first_tokens)

    def tokens(self, model: nn.Module, inputs: Mapping[str, Tensor], synced: bool, seed: int, rows: Tensor) -> Tensor:
        return generate(model, inputs, synced, seed, rows)

    def texts(self, generated: Tensor, tokenizer: Tokenizer | None) -> list[str]:
        assert tokenizer is not None, "the rows are texts"
        # `IGNORED_LABEL` fills short rows, and is the only negative number.
        rows = [[token for token in row if token >= 0] for row in generated.tolist()]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def continuing(self, task: Task) -> Task:
        assert isinstance(task, CausalLMTask)
        values: dict[str, Any] = {field.name: getattr(task, field.name) for field in fields(CausalLMTask)}
        values["sources"] = {key: column for key, column in task.sources.items() if key != "completion"}
        values["settings"] = task.settings or Generation()
        values |= {"packing": "none", "metric_names": (), "train_on": "all"}
        return ContinuingTask(**values)


TRANSFORMERS = _Transformers()
