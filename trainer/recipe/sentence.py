"""Names in folders of sentence-transformers, which the schema, tasks and models share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class PoolingNames(NamedTuple):
    """The name of a pooling, and its key in files of versions before 5."""

    name: str
    switch: str


POOLINGS = {
    "cls": PoolingNames("cls", "pooling_mode_cls_token"),
    "max": PoolingNames("max", "pooling_mode_max_tokens"),
    "mean": PoolingNames("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_length": PoolingNames("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weighted_mean": PoolingNames("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": PoolingNames("lasttoken", "pooling_mode_lasttoken"),
}
"""The values of `task.pooling`, in the order in which the files of older versions join them."""

ACTIVATIONS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
"""The values of `task.activation`, and their names in folders of cross-encoders."""

DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""The activations of dense layers, by their names in torch.nn."""

POOLED = "pooled_tokens"
"""The encoded column that is 1 for the tokens to pool and 0 for those of a prompt."""

HIGHEST_SCALE = 100.0
"""The largest inverse of a learned temperature."""

SCALE_FOLDER = "contrastive_scale"
"""The folder of a learned temperature in an exported folder, which sentence-transformers does not read."""


class DenseLayer(NamedTuple):
    """A dense layer after the pooling: its weights, its folder when exported, and its configuration."""

    file: str
    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str

    @property
    def activation_name(self) -> str:
        """The name of the activation in torch.nn."""
        return self.activation.rpartition(".")[2]


@dataclass(frozen=True)
class SentenceKeys:
    """The keys of a task with which a folder of sentence-transformers must agree.

    `scores_pairs`: the folder is that of a cross-encoder, which has an `activation` alone. `has_roles`: texts are
    queries and documents. For the others see the section `task`.
    """

    texts: tuple[str, ...] = ()
    scores_pairs: bool = False
    activation: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    has_roles: bool = True
    learns_temperature: bool = False


@dataclass(frozen=True)
class SentenceFolder:
    """The embedding of a folder of sentence-transformers, and notes on its differences from the recipe.

    `poolings` are values of `task.pooling`; several are joined. `prompts` are texts before other texts by name, and
    `default_prompt` is the name of the one that texts have by default. `activation` is that of a cross-encoder, which
    has no poolings. `temperature` is a learned one, which only folders of this project have.
    """

    poolings: tuple[str, ...]
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    notes: tuple[str, ...]
    activation: str | None = None
    dense: tuple[DenseLayer, ...] = ()
    pools_prompt: bool = True
    temperature: float | None = None


QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")
"""The names of the prompt of a text by its role; the first one that a folder has counts."""


def prompt_of(role: tuple[str, ...], known: Collection[str]) -> str | None:
    """Return the name of the prompt of a role, of those that a folder has; None: it has none."""
    return next((name for name in role if name in known), None)
