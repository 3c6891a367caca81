"""Stand-ins for the modules of other pipeline stages, in a model that was written for one process.

The model's own forward runs on every stage. Layers of earlier stages return their input. The first layer of this stage
gets the tensors of the previous stage. The first module of a later stage ends the forward pass.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class StageTraffic:
    """The tensors that a stage receives and sends for the current microbatch.

    `hidden` are the states between layers; `result` is the output of an earlier stack, such as the encoder.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.result: Tensor | None = None


class StageLeft(Exception):  # noqa: N818  # not an error: it ends a forward pass early
    """The end of a stage in the model's forward; `hidden` is the input of the next stage."""

    def __init__(self, hidden: Tensor | None) -> None:
        super().__init__("the stage ends here")
        self.hidden = hidden


class Absent(nn.Module):
    """A module of another stage, without parameters; it has the attributes of the original module.

    Args:
        original: the module on the meta device.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a child module, so its parameters do not count as this stage's

    def __getattr__(self, name: str) -> Any:
        # Called for names that are not found otherwise. A copy has no original yet, and would ask itself for ever.
        if "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a {type(self.__dict__['original']).__name__} of another stage was called")


class Passing(Absent):
    """A layer of an earlier stage.

    Args:
        num_results: the number of tensors that it returns; the first is its input.
    """

    def __init__(self, original: nn.Module, num_results: int = 1) -> None:
        super().__init__(original)
        self.__dict__["_num_results"] = num_results

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A model unpacks what its layers return, so a layer that is not here returns as many values as a real one.
        others = self.__dict__["_num_results"] - 1
        return (hidden, *[None] * others) if others else hidden


class Received(Absent):
    """A module before the first layer, computed on an earlier stage; it returns the received states.

    The model creates masks of their shape and does not use their values.
    """

    def __init__(self, original: nn.Module, traffic: StageTraffic) -> None:
        super().__init__(original)
        self.__dict__["_traffic"] = traffic

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = self.__dict__["_traffic"].hidden
        # The first layer of this stage takes the received states themselves, with their gradient; this result ends in
        # masks.
        return hidden.detach()


class Later(Absent):
    """A module of a later stage; a call ends the forward pass.

    Args:
        takes_hidden: whether its first argument is the input of the next stage.
    """

    def __init__(self, original: nn.Module, takes_hidden: bool) -> None:
        super().__init__(original)
        self.__dict__["_takes_hidden"] = takes_hidden

    def forward(self, *args: Any, **kwargs: Any) -> None:
        # The model's forward has no place to stop. An exception leaves it at the first module of a later stage, so no
        # line after this call runs; `StagePart.run` catches it and sends the states.
        if not self.__dict__["_takes_hidden"]:
            raise StageLeft(None)
        # Layers of transformers take the states first, or by this name.
        raise StageLeft(args[0] if args else kwargs["hidden_states"])


def on_meta(module: nn.Module) -> nn.Module:
    if all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module
    return copy.deepcopy(module).to("meta")
