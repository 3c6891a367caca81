"""Compilation of a model's layers by torch.compile, each kind of layer once.

The first forward pass of a training runs uncompiled. It checks the dropout, and shows the calls of dropout sites in
each layer. Later passes compute the keys of these calls outside of the layers, and pass them as a tensor. Evaluations
run uncompiled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.models.attention import FLAT
from trainer.parallel.dropout import DropoutKeys

BACKEND = "inductor"
"""The backend of torch.compile."""
_MOST_GRAPHS = 64  # kinds of layers, each with few shapes


class CompiledLayers:
    """The layers of a model, which `start` compiles.

    Args:
        layers: the layers, with their recomputation. Hooks on them run uncompiled.

    Raises:
        UsageError: the compiler of the device is missing.
    """

    def __init__(self, layers: Iterable[nn.Module], keys: DropoutKeys | None, device: torch.device) -> None:
        if BACKEND == "inductor":
            _require_compiler(device)
        self._keys = keys
        self._started = False
        self._places: dict[int, list[slice]] = {}  # of the calls of sites, by layer and its call
        # The calls of dropout sites in a recomputed layer are counted in the forward pass only.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS  # above it, torch raises an error
        # Else a graph holds for shapes with the same equal sizes only, such as as many positions as heads.
        torch.fx.experimental._config.use_duck_shape = False
        # Else probabilities are tensors that the code reads, which a CUDA graph cannot hold.
        torch._dynamo.config.specialize_float = True
        # DDP sums the gradients of each layer during the backward pass, so no graph needs to be split for it.
        torch._dynamo.config.optimize_ddp = False
        # One compiled function for all layers, so layers of one kind share their graphs.
        self._run = torch.compile(_run, fullgraph=True, dynamic=True, backend=BACKEND)
        for index, layer in enumerate(layers):
            layer.forward = partial(self._call, layer, layer.forward, index)

    def start(self) -> None:
        """Compile the layers from the next forward pass on."""
        self._started = True

    def _call(self, layer: nn.Module, forward: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return forward(*args, **kwargs)
        if self._started and kwargs.get(FLAT) is not None:
            kwargs[FLAT] = kwargs[FLAT].of_any_length  # else a graph would hold for the lengths of these rows only
        if self._keys is None:
            return self._run(forward, None, None, args, kwargs) if self._started else forward(*args, **kwargs)
        if self._started:
            # A layer that runs several times in a pass, such as ALBERT's, has other calls of sites each time.
            places = self._places[index][self._keys.count_layer(index)]
            table = self._keys.table(places).clone()  # a graph would hold for the layout of a view only
            # The number of calls of a layer never changes, so the graph may be made for it.
            torch._dynamo.mark_static(table, 0)
            return self._run(forward, self._keys, table, args, kwargs)
        # The first, eager pass: it learns which calls of sites belong to this call of the layer.
        recorded = self._keys.record()
        output = forward(*args, **kwargs)
        self._places.setdefault(index, []).append(recorded())
        return output


def _run(forward: Callable[..., Any], keys: DropoutKeys | None, table: Tensor | None, args: Any, kwargs: Any) -> Any:
    if keys is None or table is None:
        return forward(*args, **kwargs)
    return keys.run_with(table, kwargs.get(FLAT), partial(forward, *args, **kwargs))


def compilations() -> tuple[int, int, float]:
    """Return the numbers of compiled graphs and of graph breaks of this process, and the seconds of compilation."""
    from torch._dynamo.utils import calculate_time_spent, counters

    return (
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        calculate_time_spent()["total_wall_time"],
    )


def compile_cache() -> Path:
    """Return the folder of compiled code, which later runs of this machine read (`TORCHINDUCTOR_CACHE_DIR`)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _require_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise UsageError(
            "`compile` is true, which needs a C++ compiler on a CPU, but neither g++ nor clang++ is on the PATH;"
            " install g++, or set it to false"
        )
