"""Names of losses, and names in folders of sentence-transformers, without torch: the section of a recipe reads them."""

from __future__ import annotations

from typing import NamedTuple

PAIR_LOSSES = ("cosine", "cosent", "angle")
"""The losses of two texts with a score."""

TEACHER_LOSSES = ("margin_mse", "kl_divergence")
"""The losses of a query and documents with the scores of a teacher."""


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

DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""The activations of dense layers, by their names in torch.nn."""

HIGHEST_SCALE = 100.0
"""The largest inverse of a learned temperature."""

SCALE_FOLDER = "contrastive_scale"
"""The folder of a learned temperature in an exported folder, which sentence-transformers does not read."""


class DenseLayer(NamedTuple):
    """A dense layer after the pooling: its weights, its folder when exported, and its configuration.

    With an empty `file`, its weights are drawn from `seed`.
    """

    file: str
    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
    seed: int = 0

    @property
    def activation_name(self) -> str:
        """The name of the activation in torch.nn."""
        return self.activation.rpartition(".")[2]
