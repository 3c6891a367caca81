"""The recipe as a strict pydantic model: type, range and default of every key.

Field descriptions are the reference documentation and, through `trainer schema`, the hover text of editors. Rules that
span keys are in `recipe/reading/rules.py`; rules that need the world size are in `plan.py`.
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
    """A period of `count` optimizer steps or epochs."""

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


_DURATION = re.compile(r"([1-9][0-9]{0,8}) (second|minute|hour)s?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Duration:
    """A time, in the unit of the recipe."""

    count: int
    unit: Literal["second", "minute", "hour"]

    @property
    def seconds(self) -> int:
        return self.count * _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count != 1 else ''}"


def _duration(value: object) -> Duration:
    if isinstance(value, Duration):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration")
    return Duration(int(match[1]), match[2])  # type: ignore[arg-type]  # the pattern allows only these units


def _text_schema(pattern: re.Pattern[str], rule: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern.pattern}$", "patternErrorMessage": rule})


IntervalField = Annotated[
    Interval,
    BeforeValidator(_interval),
    PlainSerializer(str, return_type=str),
    _text_schema(_INTERVAL, 'an interval such as "100 steps" or "1 epoch"'),
]
DurationField = Annotated[
    Duration,
    BeforeValidator(_duration),
    PlainSerializer(str, return_type=str),
    _text_schema(_DURATION, 'a time such as "30 seconds" or "10 minutes"'),
]


def _pattern(pattern: str, rule: str) -> Any:
    return Field(pattern=pattern, json_schema_extra={"patternErrorMessage": rule})


class Place(Enum):
    """The base of relative paths in a key."""

    RECIPE = auto()  # the folder of the recipe file; on the command line, the current folder
    RECIPE_OR_HUB = auto()  # the same if the folder exists or the text looks like a path; else a name on the hub
    RUN = auto()  # the current folder


PathField = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), Place.RECIPE]
HubOrPathField = Annotated[str, Field(min_length=1), Place.RECIPE_OR_HUB]
RunPathField = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), Place.RUN]
Revision = Annotated[str | None, Field(description="Branch, tag or commit of the hub repository.")]


Share = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


TextColumns = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=2)],
    Field(description="The column that holds the text, or the two columns of a pair."),
]


class TextKeys(Section):
    """Keys that all tasks on texts share."""

    type: str
    text: TextColumns


class ImageKeys(Section):
    """Keys that all tasks on images share."""

    type: str
    image: str = Field(
        "image",
        description="The column that holds the image: encoded (PNG, JPEG, ...), or values from 0 to 255 as lists"
        " [height][width] or [height][width][channels].",
    )
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=3)] | None = Field(
        None, description="Height, width and, if there are several, channels of images that are flat lists."
    )


class ClassificationKeys(Section):
    """Keys that all classifications share."""

    label: str = Field(
        "label",
        description="The column that holds the class: a name, an integer from 0, or one that `task.labels` names.",
    )
    labels: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="The class names in order; null: the names in the training split, in the order of a fine-tuned"
        " checkpoint that has the same names, else sorted or as the data set declares.",
    )
    metrics: list[Literal["accuracy", "f1", "f1_macro", "f1_micro", "matthews"]] = Field(
        default=["accuracy"],
        min_length=1,
        description="`f1` is that of one of two classes, `positive`; `f1_macro` is the mean over all classes;"
        " `f1_micro` counts all decisions together.",
    )
    positive: str | None = Field(
        None, description="The class that `f1` counts as positive; null: class 1, the second one."
    )
    class_weights: Literal["balanced"] | dict[str, float] | None = Field(
        None,
        description="Weights of the classes in the training loss, by name; `balanced`: rows / (classes * rows of the"
        " class) of the training split; null: all are 1.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of the target that is spread evenly over all classes in the training loss."
    )


class SequenceClassification(ClassificationKeys, TextKeys):
    """Assign each text, or pair of texts, to one of several classes."""

    type: Literal["sequence_classification"]
    multi_label: bool = Field(
        False,
        description="Each row has any number of labels: `label` holds lists of names, or lists of 0 and 1, one for each"
        " of `labels`. `accuracy` is the share of rows with all labels right.",
    )
    threshold: Share | dict[str, Share] = Field(
        0.5,
        description="With `multi_label`: a label is predicted if its probability is above this; an object sets it for"
        " labels by name, and others keep 0.5.",
    )


class SequenceRegression(TextKeys):
    """Predict a number for each text, or pair of texts."""

    type: Literal["sequence_regression"]
    label: str = Field("label", description="The column that holds the number.")
    metrics: list[Literal["pearson", "spearman", "mse"]] = Field(
        default=["pearson", "spearman"],
        min_length=1,
        description="Correlation of predicted and true numbers, or their mean squared error.",
    )


class MaskedLM(TextKeys):
    """Predict masked tokens of each text, or pair of texts, as in the pretraining of BERT.

    Of the selected tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. Each epoch selects other
    tokens; the validation split has the same selection at every evaluation.
    """

    type: Literal["masked_lm"]
    mask_probability: float = Field(
        0.15, gt=0, lt=1, description="Probability that a token is selected for prediction; special tokens never are."
    )
    metrics: list[Literal["accuracy", "perplexity"]] = Field(
        default=["accuracy"],
        min_length=1,
        description="Share of selected tokens that are predicted correctly; exponential of their mean loss.",
    )


class Embedding(Section):
    """Embed texts, so that similar texts have a high cosine similarity."""

    type: Literal["embedding"]
    texts: Annotated[list[str], Field(min_length=2)] = Field(
        description="The columns of the texts of a row: anchor and positive, and perhaps hard negatives of the anchor."
    )
    score: str | None = Field(
        None, description="The column of the similarity of the two texts, which the losses `cosine` and `cosent` need."
    )
    pooling: Literal["mean", "cls", "last"] = Field(
        "mean", description="The embedding: the mean of the states of all tokens, or that of the first or last token."
    )
    normalize: bool = Field(True, description="Scale embeddings to a length of 1.")
    loss: Literal["multiple_negatives", "cosine", "cosent"] = Field(
        "multiple_negatives",
        description="multiple_negatives: find the positive among those and the negatives of the whole global batch;"
        " cosine: squared error of cosine and score; cosent: order all pairs of rows of the global batch by score.",
    )
    mask_duplicates: bool = Field(
        False,
        description="For `multiple_negatives`: texts of other rows that equal the anchor, its positive or the positive"
        " of an equal anchor are not its negatives.",
    )
    temperature: float = Field(0.05, gt=0, description="Divisor of the cosine similarities; not for the loss `cosine`.")
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "spearman"]] = Field(
        default=["recall_at_1", "mrr"],
        min_length=1,
        description="Mean over the distinct anchors of the share of their positives among the nearest 1, 5 or 10 of all"
        " distinct positives and negatives of the split; mean reciprocal rank of the first positive; rank correlation"
        " of cosine and score.",
    )


class TokenClassification(Section):
    """Assign a tag to each word of a list (`words`, `tags`), or find spans in a text (`text`, `spans`).

    A text with more tokens than `data.max_length` is cut into windows that overlap. Each word is labelled in the window
    that has the most context for it, so that loss and metrics count it once.
    """

    type: Literal["token_classification"]
    words: str | None = Field(None, description="The column that holds lists of words.")
    tags: str | None = Field(
        None,
        description="The column that holds one tag for each word: tags of entities (IOB2 or IOBES, such as B-PER),"
        " plain tags (such as NOUN), or integers from 0.",
    )
    text: str | None = Field(None, description="The column that holds a text, instead of `words`.")
    spans: str | None = Field(
        None,
        description="The column that holds the entities of `text`: a list of {start, end, label}, in characters, the"
        " end excluded.",
    )
    labels: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="The tags in order, such as O, B-PER and I-PER; null: those in the training split, in the order of"
        " a fine-tuned checkpoint that has the same tags, else sorted or as the data set declares.",
    )
    label_all: bool = Field(
        False,
        description="Train on all tokens of a word, the further ones with the tag I-; false: on its first token only."
        " With `text`, each token then counts as a word.",
    )
    stride: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Tokens that two windows of a long text share; null: a third of `data.max_length`."
    )
    metrics: list[Literal["f1", "precision", "recall", "f1_macro", "accuracy"]] = Field(
        default=["f1", "precision", "recall"],
        min_length=1,
        description="Of whole entities: F1, precision and recall over all types (f1 also adds each type, as f1/PER),"
        " and `f1_macro`, the mean F1 of the types. Of words: `accuracy`; for plain tags also `f1_macro`.",
    )


class QuestionAnswering(Section):
    """Find the answer to a question as a span of a context, as in SQuAD.

    A context longer than `data.max_length` is read in windows that overlap.
    """

    type: Literal["question_answering"]
    question: str = Field("question", description="The column that holds the question.")
    context: str = Field("context", description="The column that holds the text with the answer.")
    answers: str | Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        "answers",
        description='The column of answers in the form of SQuAD, {"text": [...], "answer_start": [...]}, or two columns'
        " for one answer: its text, and its first character in the context, from 0. Training uses the first answer.",
    )
    stride: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Tokens of the context that two windows share; null: a third of `data.max_length`."
    )
    unanswerable: bool = Field(False, description="Whether some questions have no answer, as in SQuAD 2.0.")
    null_threshold: float = Field(
        0.0,
        description="With `unanswerable`: no answer is predicted if its score exceeds that of the best answer by more"
        " than this.",
    )
    n_best: int = Field(
        20, ge=1, description="Start and end positions of a window that are combined, and answers that are kept."
    )
    max_answer_length: int = Field(30, ge=1, description="Maximum tokens of a predicted answer.")
    metrics: list[Literal["exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_f1"]] = Field(
        default=["exact_match", "f1"],
        min_length=1,
        description="Percentage of predictions that equal an accepted answer; mean F1 of their words; the same over"
        " questions with or without an answer. All are those of SQuAD 1.1, with `unanswerable` those of SQuAD 2.0.",
    )


class MultipleChoice(Section):
    """Choose the text that fits a context, as in SWAG, HellaSwag, RACE and COPA."""

    type: Literal["multiple_choice"]
    context: str = Field("context", description="The column that holds the context, which is truncated if need be.")
    question: str | None = Field(
        None, description="The column of a text before each choice: a question, or the start of the endings."
    )
    question_texts: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        None,
        description='The text in place of each value of `question`, such as {"cause": "What was the cause?"}; null: the'
        " value itself.",
    )
    blank: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="The part of a question that the choice replaces, such as `_`; null: the choice follows it."
    )
    choices: str | Annotated[list[str], Field(min_length=2)] = Field(
        "choices",
        description='The column that holds lists of texts, or {"text": [...], "label": [...]}; or the columns of the'
        " first choice, the second and so on.",
    )
    label: str = Field("label", description="The column that holds the right choice.")
    label_format: Literal["index", "number", "letter", "text"] | None = Field(
        None,
        description="Labels are indices from 0, numbers from 1, letters from A, or texts of choices; null: the labels"
        " that `choices` holds, if any; else integers are indices, and a string must mean one choice only as an index,"
        " a letter or a text.",
    )
    metrics: list[Literal["accuracy"]] = Field(
        default=["accuracy"], min_length=1, description="Share of rows with the right choice."
    )


class ImageClassification(ClassificationKeys, ImageKeys):
    """Assign each image to one of several classes."""

    type: Literal["image_classification"]


class Generation(Section):
    """Generation of texts, for metrics on texts and for predictions; an exported model has these settings too."""

    max_new_tokens: int = Field(64, ge=1, description="Maximum tokens of a generated text, with its end token.")
    min_new_tokens: int = Field(0, ge=0, description="Minimum tokens of a generated text, without its end token.")
    num_beams: int = Field(1, ge=1, description="Beams of the beam search; 1: the most probable token at each place.")
    length_penalty: float = Field(
        1.0, description="A beam's score is divided by its length to this power; larger values prefer longer texts."
    )
    early_stopping: bool = Field(
        False, description="Stop a beam search at `num_beams` complete texts, although a better one may follow."
    )
    do_sample: bool = Field(
        False,
        description="Draw each token by its probability; the draw depends on `training.seed`, the row and the place.",
    )
    temperature: float = Field(1.0, gt=0, description="With `do_sample`: divisor of the logits.")
    top_k: int = Field(0, ge=0, description="With `do_sample`: draw among so many most probable tokens; 0: all.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="With `do_sample`: draw among the fewest tokens with this probability in sum.",
    )
    no_repeat_ngram_size: int = Field(
        0, ge=0, description="Tokens in a row that a generated text may hold only once; 0: any repetition."
    )


class CausalLM(Section):
    """Predict each next token: of texts, of the completions of prompts, or of the assistant's turns in chats."""

    type: Literal["causal_lm"]
    text: str | None = Field(None, description="The column that holds texts; all their tokens are trained.")
    prompt: str | None = Field(None, description="The column that holds prompts, which are not trained.")
    completion: str | None = Field(None, description="The column that holds completions of the prompts.")
    messages: str | None = Field(
        None,
        description='The column that holds chats, as lists of {"role": ..., "content": ...}; the assistant\'s turns are'
        " trained, in the tokenizer's chat template.",
    )
    train_on: Literal["all", "last", "each"] = Field(
        "all",
        description="The assistant's turns of a chat that are trained: all in one row; the last one; or each in a row"
        " of its own, after the earlier messages. `last` and `each` suit templates that change earlier messages.",
    )
    generation: Generation = Field(
        Generation(), description="The length of the texts of `trainer predict`, and their search."
    )
    packing: Literal["none", "documents", "joined"] = Field(
        "none",
        description="Fill rows of `data.max_length` tokens with several documents. `documents` keeps attention and"
        " positions inside each document; `joined` lets them see each other (texts only). Steps and batch sizes count"
        " rows.",
    )
    loss_chunk_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Tokens for which logits are in memory at a time; the loss recomputes them in the backward pass,"
        " and stays the same. null: the logits of a whole microbatch.",
    )
    metrics: list[Literal["perplexity", "accuracy"]] = Field(
        default=["perplexity"],
        min_length=1,
        description="Exponential of the mean loss of trained tokens; share of them that are predicted correctly.",
    )


class Seq2SeqLM(Section):
    """Generate a target text from a source text by an encoder-decoder, as in summarisation and translation.

    The loss is the mean over the tokens of all targets, each of which ends with the end token.
    """

    type: Literal["seq2seq_lm"]
    source: str = Field("source", description="The column that holds the source text.")
    target: str = Field("target", description="The column that holds the target text; it may be empty.")
    prefix: str = Field("", description='Text before each source, such as `"summarize: "` for T5.')
    source_language: str | None = Field(
        None, description="The sources' language, as a multilingual tokenizer names it, such as `en_XX` of mBART."
    )
    target_language: str | None = Field(None, description="The targets' language; a tokenizer needs both or none.")
    max_target_length: int = Field(
        128, ge=2, description="Maximum tokens of a target; longer ones are truncated, and their share is reported."
    )
    generation: Generation = Field(Generation(), description="The length of generated texts, and their search.")
    metrics: list[Literal["rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "accuracy", "perplexity"]] = Field(
        default=["perplexity"],
        min_length=1,
        description="F1 of ROUGE, from 0 to 1, and BLEU and chrF, from 0 to 100, of generated texts; share of target"
        " tokens that are predicted correctly from the true tokens before them; exponential of the mean loss.",
    )


TaskSection = (
    SequenceClassification
    | SequenceRegression
    | MaskedLM
    | CausalLM
    | ImageClassification
    | Embedding
    | Seq2SeqLM
    | TokenClassification
    | QuestionAnswering
    | MultipleChoice
)


Patterns = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Adapter(Section):
    """LoRA (Hu et al. 2021): trainable low-rank products beside frozen linear layers."""

    type: Literal["lora"]
    rank: int = Field(8, ge=1, description="The rank of each product.")
    alpha: float = Field(16.0, gt=0, description="Each product is multiplied by `alpha / rank`.")
    dropout: float = Field(0.0, ge=0, lt=1, description="The dropout of the input of each product.")
    targets: Patterns | None = Field(
        None,
        description="Names of linear layers, or patterns such as `*.query`; null: all linear layers of the repeated"
        " layers.",
    )
    modules_to_save: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None,
        description="Names or patterns of modules that are trained whole; null: the head of the task and all modules"
        " that the pretrained model lacks, but not the pretrained head of a language model.",
    )


class Model(Section):
    """The Hugging Face model: pretrained (`name_or_path`) or with random weights (`config` alone)."""

    name_or_path: HubOrPathField | None = Field(None, description="A name on the hub, or a folder.")
    revision: Revision = None
    config: dict[str, Any] | None = Field(
        None,
        description='Alone: a transformers configuration with its "model_type"; the weights are random.'
        " With `name_or_path`: keys that replace those of the model's configuration, such as `classifier_dropout`.",
    )
    tokenizer: HubOrPathField | None = Field(
        None, description="A name on the hub, or a folder; null: the tokenizer of the model."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="All dropout probabilities of the model; 0 turns off stochastic depth too; null: those of the"
        " model's configuration.",
    )
    freeze: Patterns | None = Field(
        None, description="Names or patterns of modules and parameters that are not trained, such as `embeddings`."
    )
    adapter: Adapter | None = Field(None, description="An adapter to train beside frozen weights; null: none.")

    @property
    def is_partly_frozen(self) -> bool:
        """Whether the recipe freezes weights; checkpoints then hold the trained ones and a digest of the others."""
        return self.adapter is not None or self.freeze is not None

    @property
    def is_random(self) -> bool:
        """Whether the weights are drawn at random, for a model that `config` describes."""
        return self.name_or_path is None


HeldOut = Annotated[float, Field(gt=0, lt=1)]
"""A share of the training split that is held out for validation, the same rows in every run."""


class _DataKeys(Section):
    max_length: int = Field(
        128, ge=1, description="Maximum tokens of a text; longer texts are truncated, and their share is reported."
    )
    group_by_length: bool = Field(
        False,
        description="Batch texts of similar length, which needs less padding; the order depends only on (seed, epoch,"
        " step).",
    )
    pad_to: int = Field(
        1,
        ge=1,
        description="Pad the texts of a microbatch to a multiple of this many tokens, such as 8 or 64; the training is"
        " the same.",
    )
    packing: bool = Field(
        False,
        description="Compute the layers of an encoder on tokens only, without padding; the training is the same.",
    )
    num_workers: int = Field(
        0, ge=0, le=64, description="Processes per rank that prepare batches; 0: the rank itself prepares them."
    )
    preparation_processes: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None,
        description="Processes that tokenise a split, once for all ranks of a node; the result is the same. null: the"
        " cores of the machine, and fewer for little text.",
    )
    cache: PathField | None = Field(
        None,
        description="Folder of the cache of tokenised texts and resized images; null: the user's cache folder.",
    )

    @property
    def source_weights(self) -> list[float] | None:
        """The weights of the sources of a mixture; None: an epoch has every row once."""
        return None


class HubData(_DataKeys):
    """A data set on the hub, or a local folder with the same structure."""

    source: Literal["hub"]
    name: HubOrPathField = Field(
        description="A name on the hub, or a local folder that `datasets.load_dataset` can read."
    )
    subset: str | None = Field(None, description="The configuration of the data set, such as `mrpc` of GLUE.")
    revision: Revision = None
    train: str = Field("train", description="Name of the training split.")
    validation: HeldOut | str | None = Field(
        "validation", description="Name of the validation split, or the share of the training split to hold out."
    )


class FileData(_DataKeys):
    """JSON Lines, JSON, CSV, Parquet, Excel or CoNLL files, also compressed by gzip.

    Empty lines of JSON Lines and CSV files are skipped.
    """

    source: Literal["files"]
    format: Literal["json", "csv", "parquet", "excel", "conll"] | None = Field(
        None,
        description="null: from the extension of the first file. `conll` has one word on each line, with its tag in the"
        " last column, and an empty line after each sentence; its columns are `words` and `tags`.",
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = Field(
        None, description="The character between the columns of CSV files; null: found in their first lines."
    )
    quotes: bool = Field(
        True, description="Whether quotation marks enclose values of CSV and TSV files; false: they are text."
    )
    encoding: str = Field("utf-8", description="The encoding of JSON, CSV and CoNLL files, such as latin-1.")
    train: PathField | Annotated[list[PathField], Field(min_length=1)] = Field(
        description="File or files of the training split, or a pattern such as `part-*.jsonl`."
    )
    mixture: list[Annotated[float, Field(gt=0)]] | None = Field(
        None,
        description="The weight of each entry of `train`, such as [0.7, 0.3]: its share of the rows of an epoch, which"
        " has as many rows as all entries together. null: an epoch has every row once.",
    )
    validation: HeldOut | PathField | Annotated[list[PathField], Field(min_length=1)] | None = Field(
        None,
        description="File or files of the validation split, or the share of the training split to hold out, such as"
        " 0.1.",
    )

    @property
    def source_weights(self) -> list[float] | None:
        return self.mixture


class FolderData(_DataKeys):
    """A folder that `datasets.DatasetDict.save_to_disk` wrote."""

    source: Literal["folder"]
    path: PathField = Field(description="The folder.")
    train: str = Field("train", description="Name of the training split.")
    validation: HeldOut | str | None = Field(
        "validation", description="Name of the validation split, or the share of the training split to hold out."
    )


class Distillation(Section):
    """Knowledge distillation (Hinton et al. 2015): learn from the outputs of a frozen teacher beside the labels."""

    teacher: HubOrPathField = Field(
        description="The teacher, a trained model of the same task: a name on the hub, or a folder."
    )
    revision: Revision = None
    temperature: float = Field(
        2.0, gt=0, description="Divisor of both models' logits in the divergence; higher ones make softer targets."
    )
    weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="The loss is (1 - weight) * loss of the labels + weight * temperature^2 * divergence; 1: the"
        " labels do not count.",
    )


class Pipeline(Section):
    """Pipeline parallelism: groups of ranks hold consecutive layers as stages."""

    stages: Annotated[int, Field(ge=1)] = Field(
        1, description="Pipeline-parallel degree: ranks over which the layers are split."
    )
    schedule: Literal[SCHEDULE_NAMES] = Field(  # type: ignore[valid-type]  # from the table
        "1f1b", description="Order in which the stages process the microbatches."
    )
    microbatches: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Microbatches in one pass through the pipeline; null: all of an optimizer step, at least two per"
        " stage if there are enough rows.",
    )
    stages_per_rank: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stages on each rank; null: the default of the schedule."
    )
    split: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="Name in the base model of the first layer of each stage except the first; null: balanced by cost.",
    )


class Communication(Section):
    """Types of the numbers that ranks send each other."""

    gradients: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Type in which gradients are summed over ranks; 16 bits halve their traffic. One data-parallel rank"
        " rounds its gradients to this type too. fp16 needs `precision` fp16, because of its loss scale.",
    )


class Parallel(Section):
    """Distribution of the training over ranks; does not change the result beyond rounding."""

    strategy: Literal[STRATEGY_NAMES] = Field(  # type: ignore[valid-type]  # from the table
        "ddp", description="Placement of parameters, gradients and optimizer state over the data-parallel ranks."
    )
    shard: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Ranks in one shard group under hsdp; auto: the ranks of one node."
    )
    tensor: Annotated[int, Field(ge=1)] = Field(
        1,
        description="Tensor-parallel degree (as in Megatron-LM): ranks that shard each large matrix and process the"
        " same rows.",
    )
    sequence: bool = Field(
        False,
        description="Sequence parallelism: shard positions over tensor ranks between the matrices of a layer; less"
        " memory, same communication.",
    )
    context: Annotated[int, Field(ge=1)] = Field(
        1,
        description="Context-parallel degree: ranks that shard the positions of the same rows in all layers; for long"
        " sequences. For attention they share heads (DeepSpeed-Ulysses), and pass keys and values around rings (Ring"
        " Attention) where heads do not suffice.",
    )
    pipeline: Pipeline = Field(
        Pipeline(),
        description="Pipeline stages and their schedule.",
    )
    elastic: Literal["none", "data", "shards"] = Field(
        "none",
        description="Axis that follows the number of ranks while nodes join and leave (`torchrun --nnodes MIN:MAX`)."
        " data: the data-parallel ranks, under hsdp in whole shard groups; shards: under hsdp, a last shard group may"
        " shrink too; none: such a launch is refused. Global batch, tensor, context and pipeline sizes never change.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Under fsdp and hsdp: free gathered weights after the forward pass, and gather them again for"
        " backward.",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="Keep the optimizer state, or parameters and optimizer state, in CPU memory."
    )
    load: Literal["read", "broadcast"] = Field(
        "read",
        description="read: every rank reads its parts of pretrained weights from the files; broadcast: one rank of each"
        " node reads them and sends chunks to the others, for a slow shared file system.",
    )
    communication: Communication = Field(
        Communication(),
        description="Types of the numbers that ranks send each other. Weights and hidden states of matrix products"
        " always travel in the type of `precision`.",
    )
    stall_timeout: DurationField = Field(
        Duration(10, "minute"),
        description="Maximum time without progress of any rank; then the run ends and reports the state of each rank.",
    )
    join_timeout: DurationField = Field(
        Duration(10, "minute"),
        description="Maximum time of the rendezvous; after 20 seconds the missing ranks are reported. Also the maximum"
        " time, up to one minute, until all ranks see a shared folder.",
    )
    deepspeed: dict[str, Any] = Field(
        default={},
        description="Additional DeepSpeed configuration keys under zero1 to zero3; keys that the trainer sets are"
        " errors.",
    )

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks that process the same rows on one stage, by parts of matrices or of sequences."""
        return self.tensor * self.context


class Training(Section):
    """Length of the training, batch size, clipping and seed."""

    epochs: Annotated[int, Field(ge=1)] = Field(3, description="Passes over the training split.")
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Total optimizer steps, at which the schedule ends; null: those of all epochs."
    )
    stop_at_step: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Save and exit with code 75 after this step, without changing the schedule (for time-limited"
        " jobs).",
    )
    global_batch_size: int = Field(
        32, ge=1, description="Examples in one optimizer step over all ranks, under every layout."
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | None = Field(
        8,
        description="Maximum examples in one forward pass of one rank; determines the gradient accumulation. null: see"
        " `micro_batch_tokens`.",
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Maximum tokens in one forward pass of one rank, instead of `micro_batch_size`; microbatches of all"
        " ranks then have about equal work. Padding counts, except with `data.packing`. The training is the same.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Maximum global gradient norm, by clipping; null: no clipping."
    )
    check_replicas: IntervalField | None = Field(
        None, description="How often to check that replicas of weights are bitwise equal; null: never."
    )
    max_bad_steps: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Maximum steps that the run may skip because the loss or the gradient is not finite. Skips by the"
        " fp16 loss scale do not count.",
    )
    seed: int = Field(
        42, ge=0, lt=2**63, description="Seed of initialisation, sample order, dropout and masked tokens."
    )
    layout_invariant_dropout: bool = Field(
        True,
        description="Dropout masks depend only on (seed, step, sample, position in the model), so that every layout"
        " has the same; false: torch's own dropout.",
    )


class _AdamWKeys(Section):
    name: str
    learning_rate: float = Field(5e-5, gt=0, description="Peak learning rate of the schedule.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999], description="Decay rates of the running means of the gradient and of its square."
    )
    epsilon: float = Field(1e-8, gt=0, description="Added to the square root of the second mean.")


class AdamW(_AdamWKeys):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"


class AdamW8bit(_AdamWKeys):
    """AdamW with moments in 8 bits (Dettmers et al. 2022), in blocks that do not depend on the layout."""

    name: Literal["adamw_8bit"]


class SGD(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    learning_rate: float = Field(gt=0, description="Peak learning rate of the schedule.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    momentum: float = Field(0.0, ge=0, lt=1, description="0: no momentum.")


class Muon(Section):
    """Muon (Jordan et al. 2024) for the matrices of the repeated layers; AdamW for all other parameters.

    Updates of matrices have the size of AdamW's (Liu et al. 2025), so both share learning rate and weight decay.
    """

    name: Literal["muon"]
    learning_rate: float = Field(gt=0, description="Peak learning rate of the schedule.")
    weight_decay: float = Field(0.1, ge=0, description="Not applied to biases and norm weights.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay rate of the running mean of a matrix's gradient.")
    iterations: int = Field(5, ge=1, le=99, description="Newton-Schulz iterations, in bf16.")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999], description="Decay rates of AdamW's running means."
    )
    epsilon: float = Field(1e-8, gt=0, description="Added by AdamW to the square root of the second mean.")


class Adafactor(Section):
    """Adafactor (Shazeer & Stern 2018): the second moments of a matrix are a row and a column."""

    name: Literal["adafactor"]
    learning_rate: float = Field(
        0.01,
        gt=0,
        description="Peak learning rate of the schedule, relative to the size of each weight; at most 1 / sqrt(step).",
    )
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    beta2_decay: float = Field(-0.8, le=0, description="Exponent of the step in the decay rate of second moments.")
    clip_threshold: float = Field(1.0, ge=1, description="Maximum root mean square of an update.")
    minimum_scale: float = Field(1e-3, ge=0, description="Minimum size of a weight, which scales its update.")


class ScheduleFreeAdamW(Section):
    """Schedule-free AdamW (Defazio et al. 2024): averaged weights in place of a decaying learning rate.

    Evaluations, checkpoints and exports have the averaged weights.
    """

    name: Literal["schedule_free_adamw"]
    learning_rate: float = Field(gt=0, description="Peak learning rate of the schedule.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norm weights.")
    betas: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999],
        description="Share of the averaged weights in the trained ones; decay rate of the mean of the squared"
        " gradient.",
    )
    epsilon: float = Field(1e-8, gt=0, description="Added to the square root of that mean.")


OptimizerSection = AdamW | AdamW8bit | SGD | Muon | Adafactor | ScheduleFreeAdamW


class Schedule(Section):
    """Learning rate over the steps: linear warmup, then decay."""

    name: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="linear and cosine reach 0 at the last step; constant does not decay."
    )
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = Field(
        0, description="Steps (an integer such as 100), or a fraction of all steps (such as 0.1)."
    )


class Evaluation(Section):
    """When to evaluate the validation split, and which metric selects the best model."""

    every: IntervalField | None = Field(
        Interval(1, "epochs"),
        description="How often to evaluate; null: never, not even at the end. Without a validation split the default"
        " is null.",
    )
    best: str | None = Field(
        None,
        description='The metric that selects the best model, or "loss"; null: the first of `task.metrics`. Of equal'
        " values, that with the lower loss is better, then the earlier one.",
    )
    patience: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stop after this many evaluations without a better value of `best`; null: never."
    )
    batch_size: int = Field(
        32, ge=1, description="Examples in one forward pass of one rank; metrics do not depend on it."
    )


class MemoryCheckpoint(Section):
    """Checkpoints in the memory of the hosts, from which a run resumes after the failure of a process or a host."""

    every: IntervalField = Field(
        description="How often to save one, unless the step saves to the disk; more often than `checkpoint.every`."
    )
    folder: RunPathField = Field(
        "/dev/shm",
        description="Folder of each host, on a memory file system. The run frees it at its end, and after a failure"
        " keeps it for the next start.",
    )


class Checkpoint(Section):
    """Folder of the run, frequency of checkpoints, and resumption."""

    folder: RunPathField = Field(
        "runs/{name}", description="Relative to the current folder; `{name}` is the recipe's name."
    )
    every: IntervalField | None = Field(
        None, description="How often to save a checkpoint; null: only at a stop and at the end."
    )
    keep: int = Field(
        2, ge=1, description="Number of newest checkpoints to keep; the checkpoint of the best evaluation is kept too."
    )
    asynchronous: bool = Field(
        True,
        description="Continue training while a checkpoint is written, from a copy in CPU memory; false: wait for the"
        " write.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: resume from the newest checkpoint in the folder; never: a folder with a checkpoint is an"
        " error.",
    )
    memory: MemoryCheckpoint | None = Field(
        None,
        description="Further checkpoints in the memory of the hosts, each also on the next host; null: none."
        " A restart resumes from the newest complete checkpoint, in memory or on the disk.",
    )
    mirror: str | None = Field(
        None,
        description="Place of copies of the checkpoints and the final model, for fsspec, such as `s3://bucket/run`."
        " They are uploaded during the training. A run without a checkpoint in its folder resumes from there.",
    )


class Profile(Section):
    """Profile of some steps by torch's profiler: a trace of each rank, and the operations that take most time."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] = Field(
        description="The first and the last step to profile, such as [10, 14]."
    )


class Logging(Section):
    """Output during training."""

    every: IntervalField = Field(Interval(10, "steps"), description="How often training metrics are shown and written.")
    to: list[Literal["console", "jsonl", "csv", "html", "tensorboard", "wandb", "mlflow"]] = Field(
        default=["console", "jsonl"],
        description="`metrics.jsonl` is always written. `html` keeps `report.html` up to date.",
    )
    profile: Profile | None = Field(
        None, description="Steps to profile into the folder `profile` of the run; null: none."
    )
    project: (
        Annotated[
            str,
            _pattern(
                r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,127}$",
                "1 to 128 letters, digits, spaces, `.`, `_` and `-`, a letter or digit first",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="The project of W&B and the experiment of MLflow; null: the setting of each service.",
    )


class Recipe(Section):
    """A training: task, model and data, and their distribution over ranks."""

    name: Annotated[
        str,
        _pattern(
            r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
            "1 to 100 letters, digits, `.`, `_` and `-`, a letter or digit first",
        ),
    ] = Field(description="Name of the run and its folder.")
    task: Annotated[
        TaskSection,
        Field(discriminator="type", description="The task, its columns and metrics."),
    ]
    model: Model
    data: Annotated[
        HubData | FileData | FolderData,
        Field(discriminator="source", description="The source of the examples, and their preparation."),
    ]
    distillation: Distillation | None = Field(
        None, description="A frozen teacher to learn from beside the labels; null: none."
    )
    parallel: Parallel = Parallel()
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="bf16, fp16: matrix products in that type; loss, gradients, norms and by default weights in fp32.",
    )
    weights: Literal["fp32", "bf16_compensated", "bf16_stochastic"] = Field(
        "fp32",
        description="Storage of the trained weights of matrix products with `precision` bf16; all other weights are"
        " fp32. bf16_compensated: bf16, and in the optimizer the 16 bits that rounding cuts off; bf16_stochastic: bf16"
        " alone, rounded at random.",
    )
    tf32: bool = Field(
        False,
        description="Allow TF32 on GPUs: fp32 matrix products and convolutions with 10 bits of mantissa. It is refused"
        " on devices without TF32.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="Recompute the activations of each layer in the backward pass; selective keeps the matrix"
        " products.",
    )
    compile: bool = Field(
        False, description="Compile each kind of layer once with torch.compile; evaluations run uncompiled."
    )
    cuda_graphs: bool = Field(
        False,
        description="Launch the passes of a microbatch as one CUDA graph, captured for each shape of microbatches;"
        " needs `ddp` and NVIDIA GPUs. Evaluations run without graphs.",
    )
    training: Training = Training()
    optimizer: Annotated[OptimizerSection, Field(discriminator="name")] = AdamW()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()


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
