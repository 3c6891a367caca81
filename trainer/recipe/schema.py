"""The recipe as a strict pydantic model: every key, its type, its range and its default, in one place.

The field descriptions are the reference documentation and the hover text of editors (through `trainer schema`). This
module knows single keys. Rules that span keys are in `rules.py`, those that need the world size in `plan.py`; reading
files is in `loading.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from trainer.recipe.schedules import SCHEDULE_NAMES
from trainer.recipe.strategies import STRATEGY_NAMES


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `count` optimizer steps, or every `count` epochs."""

    count: int
    unit: Literal["steps", "epochs"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


_INTERVAL = re.compile(r"([1-9][0-9]{0,11}) (step|epoch)s?")


def _interval(value: object) -> Interval:
    if isinstance(value, Interval):
        return value
    match = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not an interval")
    return Interval(int(match[1]), "steps" if match[2] == "step" else "epochs")


IntervalField = Annotated[
    Interval,
    BeforeValidator(_interval),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_INTERVAL.pattern}$",
            "patternErrorMessage": 'an interval such as "100 steps" or "1 epoch"',
        }
    ),
]


_DURATION = re.compile(r"([1-9][0-9]{0,8}) (second|minute|hour)s?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Duration:
    """A time, in the unit that the user wrote."""

    count: int
    unit: Literal["second", "minute", "hour"]

    @property
    def seconds(self) -> int:
        """The same in seconds."""
        return self.count * _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count != 1 else ''}"


def _duration(value: object) -> Duration:
    if isinstance(value, Duration):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration")
    return Duration(int(match[1]), match[2])  # type: ignore[arg-type]  # what the pattern allows


DurationField = Annotated[
    Duration,
    BeforeValidator(_duration),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_DURATION.pattern}$",
            "patternErrorMessage": 'a time such as "30 seconds" or "10 minutes"',
        }
    ),
]


class Place(Enum):
    """Marks a text that names a place: what a relative one is relative to."""

    RECIPE = auto()  # a file or folder, relative to the recipe file that names it (command line: the current folder)
    RECIPE_OR_HUB = auto()  # the same where such a folder exists or the text looks like a path; else a hub name
    RUN = auto()  # a folder, relative to the current folder


PathField = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), Place.RECIPE]
HubOrPathField = Annotated[str, Field(min_length=1), Place.RECIPE_OR_HUB]
RunPathField = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), Place.RUN]


class Section(BaseModel):
    """A group of keys; unknown keys are errors and nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


TextColumns = str | Annotated[list[str], Field(min_length=1, max_length=2)]


class SequenceClassification(Section):
    """Put each text, or pair of texts, into one of several classes."""

    type: Literal["sequence_classification"]
    text: TextColumns = Field(description="The column that holds the text, or the two columns of a pair.")
    label: str = Field("label", description="The column that holds the class: a name, or an integer from 0.")
    labels: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="The class names in order; null takes them from the training split"
        " (sorted, or as the data set declares).",
    )
    metrics: list[Literal["accuracy", "f1", "f1_macro", "matthews"]] = Field(
        default=["accuracy"],
        min_length=1,
        description="`f1` is that of class 1 of two; `f1_macro` is the mean over all classes.",
    )


class SequenceRegression(Section):
    """Give each text, or pair of texts, a number."""

    type: Literal["sequence_regression"]
    text: TextColumns = Field(description="The column that holds the text, or the two columns of a pair.")
    label: str = Field("label", description="The column that holds the number.")
    metrics: list[Literal["pearson", "spearman", "mse"]] = Field(
        default=["pearson", "spearman"],
        min_length=1,
        description="Correlations of predicted and true numbers, or their mean squared error.",
    )


class MaskedLM(Section):
    """Guess the tokens that are hidden in each text, or pair of texts, as BERT was pretrained.

    Of the chosen tokens 80 % become the mask token, 10 % a random one, 10 % stay. Each epoch chooses anew; for the
    validation split the choice is the same at every evaluation.
    """

    type: Literal["masked_lm"]
    text: TextColumns = Field(description="The column that holds the text, or the two columns of a pair.")
    mask_probability: float = Field(
        0.15, gt=0, lt=1, description="Of each token but the special ones to be chosen for the model to guess."
    )
    metrics: list[Literal["accuracy", "perplexity"]] = Field(
        default=["accuracy"],
        min_length=1,
        description="The share of chosen tokens that are guessed right; the exponential of their mean loss.",
    )


class ImageClassification(Section):
    """Put each image into one of several classes."""

    type: Literal["image_classification"]
    image: str = Field(
        "image",
        description="The column that holds the image: encoded (PNG, JPEG, ...), or its values from 0 to 255 as lists"
        " [height][width] or [height][width][channels].",
    )
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=3)] | None = Field(
        None, description="Height, width and, where there are several, channels of images that are flat lists."
    )
    label: str = Field("label", description="The column that holds the class: a name, or an integer from 0.")
    labels: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="The class names in order; null takes them from the training split"
        " (sorted, or as the data set declares).",
    )
    metrics: list[Literal["accuracy", "f1", "f1_macro", "matthews"]] = Field(
        default=["accuracy"],
        min_length=1,
        description="`f1` is that of class 1 of two; `f1_macro` is the mean over all classes.",
    )


TaskSection = SequenceClassification | SequenceRegression | MaskedLM | ImageClassification


class Model(Section):
    """The Hugging Face model: pretrained (`name_or_path`) or with random weights (`config`)."""

    name_or_path: HubOrPathField | None = Field(None, description="A name on the hub, or a folder.")
    revision: str | None = Field(None, description="Branch, tag or commit of the hub repository.")
    config: dict[str, Any] | None = Field(
        None, description='The keys of a transformers configuration, with its "model_type": random weights.'
    )
    tokenizer: HubOrPathField | None = Field(
        None, description="A name on the hub, or a folder; null: that of the model."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Every dropout probability of the model; null leaves each as the model's configuration says."
    )


class _DataKeys(Section):
    max_length: int = Field(
        128, ge=1, description="Longest text in tokens; what is longer is cut, and the share that was cut is said."
    )
    group_by_length: bool = Field(
        False,
        description="Put texts of similar length into one batch: less padding,"
        " and still a function of (seed, epoch, step) alone.",
    )
    num_workers: int = Field(
        0, ge=0, le=64, description="Processes per rank that prepare batches; 0 prepares them in the rank itself."
    )
    cache: PathField | None = Field(
        None,
        description="Folder where tokenised texts and resized images are kept; null: the user's cache folder.",
    )


class HubData(_DataKeys):
    """A data set by its name on the hub, or a local folder of the same shape."""

    source: Literal["hub"]
    name: HubOrPathField = Field(
        description="Name on the hub, or a local folder that `datasets.load_dataset` can read."
    )
    subset: str | None = Field(None, description="The configuration of the data set, such as `mrpc` of GLUE.")
    revision: str | None = Field(None, description="Branch, tag or commit of the hub repository.")
    train: str = Field("train", description="Name of the split to learn from.")
    validation: str | None = Field("validation", description="Name of the split to evaluate on.")


class FileData(_DataKeys):
    """JSON Lines, JSON, CSV or Parquet files."""

    source: Literal["files"]
    format: Literal["json", "csv", "parquet"] | None = Field(None, description="null: by the ending of the first file.")
    train: PathField | Annotated[list[PathField], Field(min_length=1)] = Field(
        description="File or files to learn from."
    )
    validation: PathField | Annotated[list[PathField], Field(min_length=1)] | None = Field(
        None, description="File or files to evaluate on."
    )


class FolderData(_DataKeys):
    """A folder that `datasets.DatasetDict.save_to_disk` wrote."""

    source: Literal["folder"]
    path: PathField = Field(description="The folder.")
    train: str = Field("train", description="Name of the split to learn from.")
    validation: str | None = Field("validation", description="Name of the split to evaluate on.")


class Pipeline(Section):
    """Layers spread over ranks as stages, which microbatches go through one after the other."""

    stages: Annotated[int, Field(ge=1)] = Field(1, description="Ranks over which the layers are spread.")
    schedule: Literal[SCHEDULE_NAMES] = Field(  # type: ignore[valid-type]  # the table is the one place that lists them
        "1f1b", description="In which order the stages work on the microbatches."
    )
    microbatches: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Microbatches in one pass through the pipeline; null: all of an optimizer step, at least two for"
        " each stage where the rows suffice.",
    )
    stages_per_rank: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stages that each rank holds; null: as the schedule needs."
    )
    split: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="The first layer of each stage but the first, by its name in the base model; null: balanced by"
        " cost.",
    )


class Parallel(Section):
    """How the training is spread over ranks; never what is learned."""

    strategy: Literal[STRATEGY_NAMES] = Field(  # type: ignore[valid-type]  # the table is the one place that lists them
        "ddp", description="How parameters, gradients and optimizer state lie over the data-parallel ranks."
    )
    shard: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Ranks of one shard group under hsdp; auto: the ranks of one node."
    )
    tensor: Annotated[int, Field(ge=1)] = Field(
        1, description="Ranks over which every large matrix is cut (Megatron-style); they work on the same rows."
    )
    sequence: bool = Field(
        False,
        description="Cut also the positions over tensor ranks, between the matrices of a layer: less memory, the same"
        " traffic.",
    )
    pipeline: Pipeline = Field(
        Pipeline(),
        description="Stages over which the layers are spread, and how microbatches go through them.",
    )
    reshard_after_forward: bool = Field(
        True, description="Under fsdp and hsdp: free gathered weights after the forward pass, and gather them again."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="Keep the optimizer state, or the parameters with it, in CPU memory."
    )
    stall_timeout: DurationField = Field(
        Duration(10, "minute"),
        description="How long no rank may make progress before the run ends and says where each rank stands.",
    )
    join_timeout: DurationField = Field(
        Duration(10, "minute"),
        description="How long a rank waits for all others to be started and reached, before the run ends; who is"
        " missing is said after 20 seconds. A folder that they share has as long to be seen by all, at most a minute.",
    )
    deepspeed: dict[str, Any] = Field(
        default={},
        description="More keys of a DeepSpeed configuration, for zero1 to zero3; the trainer's own are refused.",
    )


class Training(Section):
    """What is learned from: amount, batch, clipping, seed."""

    epochs: Annotated[int, Field(ge=1)] = Field(3, description="Passes over the training split.")
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Optimizer steps in all; null: as many as the epochs hold. The schedule ends here."
    )
    stop_at_step: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Save and leave with exit code 75 after this step, the schedule unchanged (for time-limited jobs).",
    )
    global_batch_size: int = Field(
        32, ge=1, description="Examples in one optimizer step over all ranks; never changes with the layout."
    )
    micro_batch_size: int = Field(
        8, ge=1, description="Most examples in one forward pass of one rank; the accumulation follows from it."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Clip the global gradient norm to this; null: no clipping."
    )
    check_replicas: IntervalField | None = Field(
        None, description="How often to check that ranks which hold the same weights hold the same bits; null: never."
    )
    max_bad_steps: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Steps of the whole run that may be skipped because the loss or the gradient is not finite;"
        " one more ends it. The skips of fp16's loss scale do not count.",
    )
    seed: int = Field(
        42, ge=0, lt=2**63, description="Seeds initialisation, the order of samples, dropout and masked tokens."
    )
    layout_invariant_dropout: bool = Field(
        True,
        description="Dropout masks are a function of (seed, step, sample, place in the model),"
        " the same under every layout; false uses torch's own.",
    )


class AdamW(Section):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(5e-5, gt=0, description="The highest of the schedule.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999], description="Decay of the running means of the gradient and of its square."
    )
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second mean.")


class SGD(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    learning_rate: float = Field(gt=0, description="The highest of the schedule.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    momentum: float = Field(0.0, ge=0, lt=1, description="0 keeps no running gradient.")


class Schedule(Section):
    """The learning rate over the steps: warm up linearly, then decay."""

    name: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="linear and cosine end at 0 with the last step; constant stays."
    )
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = Field(
        0, description="A whole number of steps (100), or a share of all steps (0.1)."
    )


class Evaluation(Section):
    """When the validation split is evaluated, and which metric decides."""

    every: IntervalField | None = Field(
        Interval(1, "epochs"),
        description="null: never, not at the end either. Without a validation split the default is null.",
    )
    best: str | None = Field(
        None, description='The metric that decides which model is best, or "loss"; null: the first of `task.metrics`.'
    )
    patience: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stop after this many evaluations without a better one; null: never."
    )
    batch_size: int = Field(32, ge=1, description="Examples in one forward pass of one rank; changes no metric.")


class Checkpoint(Section):
    """Where the run lies, how often its state is saved, how it goes on."""

    folder: RunPathField = Field(
        "runs/{name}", description="Relative to the current folder; `{name}` is the recipe's name."
    )
    every: IntervalField | None = Field(None, description="null: only when stopped and at the end.")
    keep: int = Field(
        2, ge=1, description="How many checkpoints are kept, the newest; that of the best evaluation stays too."
    )
    asynchronous: bool = Field(
        True,
        description="Train on while a checkpoint is written, from a copy in CPU memory; false: wait until it is there.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on from the newest checkpoint in the folder; never: refuse a folder that holds one.",
    )


class Logging(Section):
    """What is shown and written while training."""

    every: IntervalField = Field(Interval(10, "steps"), description="How often training metrics are shown and written.")
    to: list[Literal["console", "jsonl", "csv", "tensorboard", "wandb", "mlflow"]] = Field(
        default=["console", "jsonl"], description="`metrics.jsonl` is always written."
    )
    project: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,127}$",
                json_schema_extra={
                    "patternErrorMessage": "1 to 128 letters, digits, spaces, `.`, `_` and `-`, a letter or digit first"
                },
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="The project of W&B and the experiment of MLflow; null: as their own settings say.",
    )


class Recipe(Section):
    """What to learn and how to spread it; see RECIPE in the documentation."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
            json_schema_extra={
                "patternErrorMessage": "1 to 100 letters, digits, `.`, `_` and `-`, a letter or digit first"
            },
        ),
    ] = Field(description="Names the run and its folder.")
    task: Annotated[
        TaskSection,
        Field(discriminator="type", description="What is learned, and from which columns."),
    ]
    model: Model
    data: Annotated[
        HubData | FileData | FolderData,
        Field(discriminator="source", description="Where the examples come from, and how they are prepared."),
    ]
    parallel: Parallel = Parallel()
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="bf16, fp16: matrix products in that type; master weights, loss, gradients and norms in fp32.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="Compute each layer again in the backward pass instead of keeping its activations;"
        " selective keeps the matrix products.",
    )
    training: Training = Training()
    optimizer: Annotated[AdamW | SGD, Field(discriminator="name")] = AdamW()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()


def file_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe file, for editors.

    A file may leave keys to the recipe that it `extends` and to the command line, the one that says which kind a
    section is included. So no key is required, and a section may fit several kinds; what is missing in the end,
    `trainer check` says.
    """
    schema = _for_parts(Recipe.model_json_schema())
    schema["properties"] = {
        "$schema": {"type": "string", "description": "Where editors find this schema; the program ignores it."},
        "extends": {
            "type": ["string", "null"],
            "description": "Another recipe, by path or shipped name; merged key by key, this file wins.",
        },
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _for_parts(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            {"oneOf": "anyOf"}.get(key, key): _for_parts(value) for key, value in schema.items() if key != "required"
        }
    if isinstance(schema, list):
        return [_for_parts(item) for item in schema]
    return schema
