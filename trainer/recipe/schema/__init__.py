"""The recipe as a strict pydantic model: type, range and default of every key, and the rules of each section.

Field descriptions are the reference documentation and, through `trainer schema`, the hover text of editors. A rule over
the keys of one section is beside it, in `contradictions`; rules over several sections are in `reading/rules.py`, and
those that need the number of ranks in `plan.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.recipe.schema.checkpoint import Checkpoint
from trainer.recipe.schema.data import Data, DataKeys, FileData, FolderData, HubData
from trainer.recipe.schema.evaluation import Evaluation
from trainer.recipe.schema.fields import Duration, Interval, NameKey, PathBase, text_pattern
from trainer.recipe.schema.language import CausalLM
from trainer.recipe.schema.logging import Logging
from trainer.recipe.schema.model import Adapter, Model
from trainer.recipe.schema.optimizer import SGD, AdamW, AdamWKeys, OptimizerKeys, OptimizerSection
from trainer.recipe.schema.parallel import Communication, Parallel, Pipeline
from trainer.recipe.schema.schedule import Linear, ScheduleKeys, ScheduleSection
from trainer.recipe.schema.section import Section
from trainer.recipe.schema.task import SequenceClassification, SequenceRegression, TaskSection
from trainer.recipe.schema.task_keys import ClassificationKeys, GenerativeKeys, TaskKeys, TextKeys, Traits
from trainer.recipe.schema.training import Training


class Recipe(Section):
    """A training: task, model and data, and their distribution over ranks."""

    name: Annotated[
        str,
        text_pattern(
            r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", "1 to 100 letters, digits, `.`, `_` and `-`, a letter or digit first"
        ),
    ]
    """Name of the run and its folder."""
    task: Annotated[TaskSection, Field(discriminator="type", description="The task, its columns and metrics.")]
    model: Model
    data: Annotated[
        Data, Field(discriminator="source", description="The source of the examples, and their preparation.")
    ]
    parallel: Parallel = Parallel()
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of matrix products; loss, gradients, norms and by default weights are in fp32."""
    tf32: bool = False
    """Allow TF32 on GPUs: fp32 matrix products and convolutions with 10 bits of mantissa. It is refused on devices
    without TF32."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute the activations of each layer in the backward pass; selective keeps the matrix products."""
    compile: bool = False
    """Compile each kind of layer once with torch.compile; evaluations run uncompiled."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Launch the passes of a microbatch as one CUDA graph, captured for each shape of microbatches; needs `ddp` and
    NVIDIA GPUs. Evaluations run without graphs. "auto" captures them on GPUs that wait for the host, where it can."""
    training: Training = Training()
    optimizer: Annotated[OptimizerSection, Field(discriminator="name")] = AdamW()
    schedule: Annotated[ScheduleSection, Field(discriminator="name")] = Linear()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    expects: dict[NameKey, Any] | None = None
    """Expected metrics at the last evaluation: an interval [low, high] of each mean over seeds, their `source`, and the
    number of `seeds`. `trainer reproduce` checks them. A recipe does not inherit them."""


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file, for editors.

    No key is required, and a section may match several kinds, because the recipe that a file `extends` and the command
    line may set the others. `trainer check` reports missing keys.
    """
    schema = _for_parts(Recipe.model_json_schema())
    schema["properties"] = {
        "$schema": {"type": "string", "description": "The schema, for editors; the trainer ignores it."},
        "extends": {
            "type": ["string", "null"],
            "description": "Another recipe, by path or shipped name, merged key by key; keys of this file take"
            " precedence.",
        },
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _for_parts(schema: Any) -> Any:
    if isinstance(schema, dict):
        renamed = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items() if key != "required"}
        return {key: _for_parts(value) for key, value in renamed.items()}
    if isinstance(schema, list):
        return [_for_parts(item) for item in schema]
    return schema
