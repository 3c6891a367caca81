"""The interface of a form of frozen weights beneath an adapter, such as codes with scales."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainer.recipe.schema import Model


@dataclass(frozen=True)
class EncodedWeight:
    """The tensors of a checkpoint that stand for a weight: their names, by their names in its form."""

    parts: Mapping[str, str]

    def decoded(self, shape: Sequence[int], read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight in fp32, from tensors that `read` returns, also in fp32."""
        raise NotImplementedError


@dataclass(frozen=True)
class WeightForm:
    """A form of frozen weights, with its key in a recipe and the value of the key."""

    key: str  # dotted, in the section `model`
    value: Any

    def __str__(self) -> str:
        return f"`{self.key}` {self.value}"

    def replace_layers(self, model: nn.Module) -> None:
        """Replace frozen linear layers, perhaps on `meta`, by those of the form (`LinearInParts`), with their products.

        Raises:
            UsageError: the model has no such layer, or the form does not support a layer.
        """
        raise NotImplementedError

    def encoded(self, model: nn.Module, weights: Mapping[str, Tensor], already: PartsByName) -> dict[str, Tensor]:
        """Return weights by name; those that are encoded in `model` are replaced by their tensors.

        Args:
            already: tensors of weights that files hold in this form, so that they are not encoded again.
        """
        raise NotImplementedError

    def peft_config(self, plain: nn.Module, model: nn.Module) -> Mapping[str, Any]:
        """Return the `quantization_config` of transformers with which PEFT computes as `model` does.

        Args:
            plain: the model before `replace_layers`.

        Raises:
            UsageError: PEFT cannot compute so.
        """
        raise NotImplementedError

    def stored_in(self, keys: Collection[str]) -> Collection[str]:
        """Return the tensors of files that are in a form already, by the names of all tensors."""
        raise NotImplementedError

    def opened(
        self,
        recipe: Model,
        stored: Any,
        model: nn.Module,
        renamed: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> Any:
        """Return the tensors of files (`StoredWeights`), opened so that encoded weights have their whole shapes.

        Args:
            stored: the tensors of files, as they are.
            model: the model with its layers replaced, on `meta`.
            renamed: the tensors of the files, by the names of the parameters.
            shapes: the shapes of the parameters, by the tensors of the files.

        Raises:
            UsageError: the files hold other weights in the form than the model.
        """
        raise NotImplementedError

    @staticmethod
    def reads(recipe: Model, place: str, described: Mapping[str, Any]) -> bool:
        """Return whether this form reads files with the `quantization_config` `described`.

        Raises:
            UsageError: the recipe does not ask for this form, or no form reads such files.
        """
        raise NotImplementedError

    @staticmethod
    def weights_in(names: Iterable[str]) -> Mapping[str, EncodedWeight]:
        """Return the weights that tensors of a model stand for, by the names of the tensors."""
        raise NotImplementedError


PartsByName = Mapping[str, Mapping[str, Tensor]]
"""The tensors of encoded weights, by the names of the weights."""
