"""Conversion of the arguments of sentence-transformers 6 and SetFit 1.2. Their files have no columns."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.programs.losses import take_loss
from trainer.tools.convert.programs.model import model_name
from trainer.tools.convert.sources import Item, Sources, Tool

_SETFIT = {
    "batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "body_learning_rate": "learning_rate",
}


def prepare_setfit(sources: Sources) -> None:
    """Set fields of TrainingArguments of the first phase, in which the embeddings learn."""
    for theirs, key in _SETFIT.items():
        item = sources.get(Tool.SETFIT, theirs)
        if item is None or item.value is None:
            continue
        value = item.value[0] if isinstance(item.value, list) and item.value else item.value
        sources.set_argument(key, value, item if item.origin is not None else None)
        if theirs == "batch_size":
            sources.set_argument("per_device_eval_batch_size", value)


def convert_setfit(draft: Draft, folder: Path) -> None:
    """Convert the training of the embeddings; that of the classifier follows it."""
    sources, tool = draft.sources, Tool.SETFIT
    loss = sources.get(tool, "loss")
    draft.take("task.type", "embedding", Item(tool, "loss", None, None))
    if loss is not None and str(loss.value).split(".")[-1].strip("<>' ") != "CosineSimilarityLoss":
        draft.refuse_file(loss, "the loss of pairs is CosineSimilarityLoss")
    else:
        draft.take("task.loss", "cosine", Item(tool, "loss", None, None))
    draft.take("task.score", "score", Item(tool, "loss", None, None))
    draft.take("task.metrics", ["spearman"], Item(tool, "loss", None, None))
    draft.refuse("task.texts", 'the columns of both texts of a pair, such as ["sentence1", "sentence2"]')
    draft.missing["data"] = "the pairs, with a score of 1 for texts of one class and 0 for others; SetFit draws them"
    draft.refuse("model.name_or_path", "the SentenceTransformer")
    for key in ("sampling_strategy", "num_iterations"):
        item = sources.written(tool, key)
        draft.say(item, Outcome.TODO, "the pairs of `data.train`, which SetFit draws by it")
    best = sources.written(tool, "metric_for_best_model")
    if best is not None and not best.is_default:
        draft.say(best, Outcome.NONE, "the loss selects the best model")


def convert_sentence_transformers(draft: Draft, folder: Path) -> None:
    """Convert the arguments of a SentenceTransformer or of a CrossEncoder.

    Args:
        folder: The folder of the recipe, the base of its paths.
    """
    sources, tool = draft.sources, draft.sources.program
    assert tool is not None
    model_name(draft, "model_name_or_path", folder, "the model of the program")
    embeds = tool is Tool.SENTENCE_TRANSFORMER
    program = Item(tool, "loss", None, None)
    draft.take("task.type", "embedding" if embeds else "reranker", program)
    loss, parameters = sources.given(tool, "loss"), sources.given(tool, "loss_parameters")
    if loss is not None:
        if take_loss(draft, loss, parameters, embeds):
            draft.take("task.metrics", ["spearman"], loss)
            draft.refuse("task.score", "the column of the similarity of both texts", loss)
    else:
        draft.unread("loss is missing", parameters)
        names = "multiple_negatives, cosine, cosent or angle"
        names = names if embeds else "binary_cross_entropy, cross_entropy, list_net or lambda"
        draft.refuse("task.loss", f"the loss of the program: {names}; or add the name of its class as `loss`")
    if embeds:
        draft.refuse("task.texts", 'the columns of the texts, such as ["anchor", "positive"]')
    draft.missing["data"] = "the rows of the program"
    _prompts(draft, tool, sources.given(tool, "prompts"), embeds)
    _samplers(draft, tool, embeds)
    _rates(draft, sources.given(tool, "learning_rate_mapping"))


def _prompts(draft: Draft, tool: Tool, item: Item | None, embeds: bool) -> None:
    if item is None:
        return
    if not embeds:
        draft.refuse_file(item, "a reranker has no prompts; write them into the rows")
    elif isinstance(item.value, str):
        for key in ("query", "document"):
            draft.take(f"task.{key}_prompt", item.value, item)
    else:
        draft.refuse("task.query_prompt", "the prompt of the first column; document_prompt is that of the others", item)


def _samplers(draft: Draft, tool: Tool, embeds: bool) -> None:
    sampler = draft.sources.given(tool, "batch_sampler")
    if sampler is not None:
        name = _member(sampler)
        if name == "batch_sampler":
            draft.say(sampler, Outcome.SAME, "each epoch has another order")
        elif name in ("no_duplicates", "no_duplicates_hashed") and embeds:
            note = "equal texts stay in the batch, and are no negatives of each other"
            draft.take("task.mask_duplicates", True, sampler, note=note, differs=True)
        else:
            draft.refuse_file(sampler, "each epoch has another order, from the seed")
    several = draft.sources.given(tool, "multi_dataset_batch_sampler")
    if several is not None:
        if _member(several) == "proportional":
            draft.say(several, Outcome.SAME, "every row counts once")
        else:
            draft.refuse_file(several, "every row counts once, or data.mixture gives each file its share of an epoch")


def _member(item: Item) -> str:
    """Return the name of a member of an enumeration, such as `BatchSamplers.NO_DUPLICATES`, in small letters."""
    return str(item.value).rsplit(".", 1)[-1].lower()


def _rates(draft: Draft, item: Item | None) -> None:
    if item is None:
        return
    if not isinstance(item.value, dict) or not all(re.fullmatch(r"[\w.]+", str(name)) for name in item.value):
        draft.refuse("optimizer.groups", "the patterns of these regular expressions, such as `*dense*`", item)
    else:
        groups = [{"match": f"*{name}*", "learning_rate": rate} for name, rate in item.value.items()]
        draft.take("optimizer.groups", groups, item)
