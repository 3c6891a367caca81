"""One pipeline stage of a module that was written for one process: what stands in for its other parts, and its ends.

The module's own forward runs on every stage. Layers of other stages let their input pass; the first layer of this stage
is given what the stage before has sent; at the first module that belongs to a later stage, the forward is left.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class StageTraffic:
    """What a stage has been given for the microbatch that now runs through it, and what it will send.

    `hidden` are the states between layers; `result` is the output of an earlier stack of layers (of the encoder), which
    later layers look at.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.result: Tensor | None = None


class StageLeft(Exception):  # noqa: N818  # not an error: how a forward is left in the middle
    """The forward has come to what belongs to a later stage; `hidden` is what that is to be given."""

    def __init__(self, hidden: Tensor | None) -> None:
        super().__init__("the stage ends here")
        self.hidden = hidden


class Absent(nn.Module):
    """A module of another stage: it has no parameters, and answers for the attributes of the one that it stands for.

    Args:
        original: on the meta device.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original  # not a child, so that nobody takes its parameters for this stage's

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["_original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a {type(self.__dict__['_original']).__name__} of another stage was called")


class Passing(Absent):
    """A layer of an earlier stage.

    Args:
        original: on the meta device.
        num_results: how many tensors it returns, of which the first is what comes in.
    """

    def __init__(self, original: nn.Module, num_results: int = 1) -> None:
        super().__init__(original)
        self.__dict__["_num_results"] = num_results

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = self.__dict__["_num_results"] - 1
        return (hidden, *[None] * others) if others else hidden


class Received(Absent):
    """What an earlier stage has computed before its first layer: here, whatever was received stands for it.

    Its shape is right, which masks are made by; its values come to nothing.
    """

    def __init__(self, original: nn.Module, traffic: StageTraffic) -> None:
        super().__init__(original)
        self.__dict__["_traffic"] = traffic

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = self.__dict__["_traffic"].hidden
        return hidden.detach()


class Later(Absent):
    """The first module of a later stage to be called: the forward is left here.

    Args:
        original: on the meta device.
        takes_hidden: whether its first argument is what that stage is to be given.
    """

    def __init__(self, original: nn.Module, takes_hidden: bool) -> None:
        super().__init__(original)
        self.__dict__["_takes_hidden"] = takes_hidden

    def forward(self, *args: Any, **kwargs: Any) -> None:
        if not self.__dict__["_takes_hidden"]:
            raise StageLeft(None)
        raise StageLeft(args[0] if args else kwargs["hidden_states"])


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of `module` without memory."""
    if all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module
    return copy.deepcopy(module).to("meta")
