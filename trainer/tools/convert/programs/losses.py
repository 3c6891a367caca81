"""Losses of sentence-transformers 6, by their classes, with the parameters that its model cards list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.sources import Item

_ANY = ...  # each value of a parameter, because it changes no number


@dataclass(frozen=True)
class _Loss:
    """A loss with a counterpart.

    Attributes:
        scores: whether rows have scores instead of positives.
        fixed: the parameters with one value here, by the end of their names there.
        taken: the keys of the task for further parameters.
    """

    name: str
    scores: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)


_IDENTITY = {"activation_fn": ("Identity",), "mini_batch_size": (_ANY,)}
_RANKING = _Loss(
    "multiple_negatives",
    fixed={
        "similarity_fct": ("cos_sim",), "gather_across_devices": (True, False), "directions": (["query_to_doc"],),
        "partition_mode": ("joint",), "hardness_mode": (None,), "hardness_strength": (0,), "mini_batch_size": (_ANY,),
        "mini_batch_num_tokens": (_ANY,), "show_progress_bar": (_ANY,),
    },
    taken={"scale": "temperature"},
)  # fmt: skip
_MEAN_SQUARES = {"loss_fct": ("MSELoss",), "cos_score_transformation": ("Identity",)}
_SCALED = {"scale": "temperature"}
_EMBEDDING: Mapping[str, _Loss] = {
    "MultipleNegativesRankingLoss": _RANKING,
    "CachedMultipleNegativesRankingLoss": _RANKING,
    "CosineSimilarityLoss": _Loss("cosine", True, _MEAN_SQUARES),
    "CoSENTLoss": _Loss("cosent", True, {"similarity_fct": ("pairwise_cos_sim",)}, _SCALED),
    "AnglELoss": _Loss("angle", True, {"similarity_fct": ("pairwise_angle_sim",)}, _SCALED),
}
_RERANKER: Mapping[str, _Loss] = {
    "BinaryCrossEntropyLoss": _Loss(
        "binary_cross_entropy", fixed={"activation_fn": ("Identity",)}, taken={"pos_weight": "positive_weight"}
    ),
    "MultipleNegativesRankingLoss": _Loss(
        "cross_entropy", fixed={"activation_fn": ("Sigmoid",), "num_negatives": (0,)}, taken={"scale": "scale"}
    ),
    "ListNetLoss": _Loss("list_net", fixed=_IDENTITY),
    "LambdaLoss": _Loss(
        "lambda",
        fixed=_IDENTITY
        | {"weighting_scheme": ("NDCGLoss2PPScheme",), "k": (None,), "sigma": (1,), "eps": (_ANY,)}
        | {"reduction_log": ("binary",)},
    ),
}
_MARGIN = "losses with a margin are not trained"
_TEACHER = "embeddings and scores of a teacher are not trained"
_REASONS: Mapping[str, str] = {
    "TripletLoss": f"{_MARGIN}; MultipleNegativesRankingLoss reads the same triplets",
    "ContrastiveLoss": f"{_MARGIN}; CosineSimilarityLoss and CoSENTLoss read the same pairs",
    "OnlineContrastiveLoss": f"{_MARGIN}; CosineSimilarityLoss and CoSENTLoss read the same pairs",
    "MegaBatchMarginLoss": _MARGIN,
    "MultipleNegativesSymmetricRankingLoss": "each anchor finds its positive, and not also the other way round",
    "CachedMultipleNegativesSymmetricRankingLoss": "each anchor finds its positive, and not also the other way round",
    "GISTEmbedLoss": "there is no guide model; `task.mask_duplicates` leaves equal texts out of the negatives",
    "CachedGISTEmbedLoss": "there is no guide model; `task.mask_duplicates` leaves equal texts out of the negatives",
    "SoftmaxLoss": "a classifier reads both texts at once: use `task.type` sequence_classification",
    "CrossEntropyLoss": "a class for each pair of texts: use `task.type` sequence_classification",
    "MSELoss": _TEACHER,
    "MarginMSELoss": _TEACHER,
    "EmbedDistillLoss": _TEACHER,
    "DistillKLDivLoss": _TEACHER,
    "AdaptiveLayerLoss": "the last layer gives the embedding",
    "Matryoshka2dLoss": "the last layer gives the embedding; MatryoshkaLoss has several dimensions",
}
_DEFAULTS = {"num_negatives": 4, "scale": 10.0}
"""Parameters of the ranking loss of a CrossEncoder that decide, if the file does not have them."""


def take_loss(draft: Draft, name: Item, parameters: Item | None, embeds: bool) -> bool:
    """Propose a loss with its parameters, and return whether its rows have scores.

    Args:
        name: the class of the loss.
        parameters: the object that a model card lists under the loss.
        embeds: whether it is the loss of embeddings, and not of a reranker.
    """
    given = dict(parameters.value) if parameters is not None and isinstance(parameters.value, dict) else {}
    if parameters is not None and not isinstance(parameters.value, dict):
        draft.problem(parameters, "must be an object, as in the model card")
        return False
    class_name = _class(name.value)
    if class_name == "MatryoshkaLoss" and embeds:
        class_name = _dimensions(draft, name, parameters, given)
    losses = _EMBEDDING if embeds else _RERANKER
    loss = losses.get(class_name)
    if loss is None:
        draft.refuse_file(name, _REASONS.get(class_name, f"losses are {', '.join(losses)}"))
        return False
    draft.take("task.loss", loss.name, name)
    if loss.name == "multiple_negatives" and given.get("gather_across_devices") is not True:
        draft.note(name, Outcome.DIFFERS, "`task.loss` multiple_negatives: negatives are the texts of all ranks")
    if loss.name == "cross_entropy":
        given = _DEFAULTS | given
    for key, value in given.items():
        _parameter(draft, loss, key, value, parameters or name)
    draft.say(parameters, Outcome.CONVERTED, "the parameters of the loss")
    return loss.scores


def _parameter(draft: Draft, loss: _Loss, key: str, value: Any, item: Item) -> None:
    ours = loss.taken.get(key)
    if ours == "temperature" and isinstance(value, int | float) and value > 0:
        draft.take("task.temperature", 1 / value, item)
    elif ours is not None:
        draft.take(f"task.{ours}", 1.0 if value is None else value, item)
    elif not any(known is _ANY or _is(value, known) for known in loss.fixed.get(key, ())):
        here = ", ".join(map(str, loss.fixed.get(key, ()))) or "not a parameter"
        draft.refuse_file(item, f"{key} is {value} there, and {here} here")


def _is(value: Any, known: Any) -> bool:
    """Return whether a value is the known one; classes and functions are compared by the end of their names."""
    if isinstance(value, str) and isinstance(known, str):
        return _class(value) == known
    return bool((list(value) if isinstance(value, tuple) else value) == known)


def _class(value: object) -> str:
    """Return the name of a class or a function, without its module and its arguments."""
    return str(value).partition("(")[0].split(".")[-1].strip("<>' ")


def _dimensions(draft: Draft, name: Item, parameters: Item | None, given: dict[str, Any]) -> str:
    """Propose the dimensions of `MatryoshkaLoss`, take them out of its parameters, and return the loss inside."""
    dims, weights = given.pop("matryoshka_dims", None), given.pop("matryoshka_weights", None)
    inner, at_once = given.pop("loss", None), given.pop("n_dims_per_step", -1)
    if not dims or inner is None:
        draft.problem(name, "needs loss_parameters with `loss` and `matryoshka_dims`, as in the model card")
        return "MultipleNegativesRankingLoss"
    if at_once != -1:
        draft.refuse_file(parameters or name, "each step has the losses of all dimensions")
    draft.take("task.dimensions", dims, parameters)
    if weights is not None and set(weights) != {1}:
        draft.take("task.dimension_weights", weights, parameters)
    return _class(inner)
