"""Inductor's Triton code for a GPU that is not there: functions are traced on a CPU, and their graphs moved.

The code is counted, and Triton's interpreter can run it on the CPU. Private parts of torch 2.13 are used.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only
from triton.runtime.driver import driver

from tests.helpers.kernel_compiling import AbsentGpu
from trainer.models import compiled
from trainer.parallel import dropout

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
REDUCTION, POINTWISE, OTHER = "reduction", "pointwise", "other"
"""The kinds of kernels: Inductor's with and without reductions, and operations that it does not write."""
_H100 = SimpleNamespace(
    name="H100", gcnArchName="", multi_processor_count=132, major=9, minor=0, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=80 << 30,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip


@dataclass
class Graph:
    """The code of one graph: a forward or a backward pass."""

    kind: int  # the number of the compiled function, of which it is one pass
    is_backward: bool
    code: str
    moved: dict[str, int]  # the bytes that its kernels read and write, by `REDUCTION`, `POINTWISE` and `OTHER`
    saved: list[tuple[torch.dtype, int]]  # the types of its outputs, and their numbers of elements

    @property
    def num_bytes(self) -> int:
        return sum(self.moved.values())

    @property
    def num_kernels(self) -> int:
        return len(self.kernels) + len(self.others)

    @property
    def kernels(self) -> list[str]:
        """The names of the Triton kernels, one for each launch."""
        return re.findall(r"^ +(triton_\w+)\.run\(", self.code, re.MULTILINE)

    @property
    def others(self) -> list[str]:
        """The names of the operations that Inductor does not write, such as matrix products."""
        return re.findall(r"(?:extern_kernels\.|torch\.ops\.)([\w.]+)\(", self.code)


@dataclass
class Written:
    """All graphs that were compiled in a context, in order."""

    graphs: list[Graph] = field(default_factory=list)


@contextmanager
def written_for_gpu(
    run: Callable[[str], Callable[[list[Any]], Any]] | None = None,
    tracing: Callable[[], Any] | None = None,
) -> Iterator[Written]:
    """Write Triton code for layers that `CompiledLayers` compiles in this context, and masks as on a GPU.

    Args:
        run: makes the function that computes a graph from its code; None: results have no values.
        tracing: opens a context for the tracing of graphs.
    """
    written, kinds = Written(), list[int]()

    def inner(module: fx.GraphModule, inputs: Sequence[Any], kind: int, **options: Any) -> Any:
        code, moved = _write(_copied(module), inputs, bool(options.get("is_backward")))
        (outputs,) = next(iter(reversed(module.graph.nodes))).args
        values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
        saved = [(x.dtype, int(x.numel())) for x in values if isinstance(x, Tensor)]
        written.graphs.append(Graph(kind, bool(options.get("is_backward")), code, moved, saved))
        if run is not None:
            call = run(code)
            return compile_fx.make_boxed_func(lambda *arguments: call([*arguments]))
        return compile_fx.make_boxed_func(lambda *_: tree_map_only(torch.SymInt, int, [_empty(x) for x in values]))

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with ExitStack() as stack:
            if tracing is not None:
                stack.enter_context(tracing())
            kinds.append(len(kinds))
            return compile_fx.compile_fx(module, inputs, inner_compile=partial(inner, kind=kinds[-1]))

    with (
        mock.patch.object(compiled, "BACKEND", backend),
        mock.patch.object(dropout, "OVERFLOWS_ARE_UNDEFINED", frozenset()),
    ):
        yield written


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Memory that nobody touches costs nothing.
    return torch.empty_strided([*map(int, value.shape)], [*map(int, value.stride())], dtype=value.dtype)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph, places = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        places[node] = graph.node_copy(node, places.__getitem__)
    return fx.GraphModule(module, graph)


def _write(module: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> tuple[str, dict[str, int]]:
    """Return the code of a graph on a GPU, and the bytes that its kernels read and write, by their kind."""
    fake = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or FakeTensorMode()

    def moved(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=GPU)

    inputs = tree_map_only(Tensor, moved, list(inputs))
    for node in module.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": GPU}
        if node.op == "placeholder":
            node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])
    module.recompile()
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fake = compile_fx.fake_tensor_prop(module, inputs, force_allow_non_fake_inputs=True)
    compile_fx._recursive_record_original_output_strides(module)
    with _absent_gpu(), DebugContext(), V.set_fake_mode(fake):
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(module, example_inputs=inputs, shape_env=fake.shape_env, is_backward=is_backward)
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code, _ = graph.codegen()
            moved = dict.fromkeys((REDUCTION, POINTWISE, OTHER), 0)
            for node in graph.scheduler.nodes:
                kind = OTHER if node.is_extern() else REDUCTION if node.is_reduction() else POINTWISE
                moved[kind] += int(node.get_read_write_buffers_sizes())
    return code.value, moved


def _scattered(whole: Tensor, part: Tensor, views: Sequence[Any]) -> Tensor:
    """Return the whole, without the copy of a part, which the CPU build of torch refuses for tensors of a GPU."""
    return whole


@contextmanager
def _absent_gpu() -> Iterator[None]:
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        answers: tuple[tuple[Any, str, Any], ...] = (
            (torch.cuda, "is_available", True),
            (torch.cuda, "current_device", 0),
            (torch.cuda, "device_count", 1),
            (torch.cuda, "get_device_properties", _H100),
            (torch.cuda, "get_device_capability", CAPABILITY),
            (CudaInterface, "get_device_properties", _H100),
            (CudaInterface, "get_compute_capability", 90),
            (CudaInterface, "is_triton_capable", True),
            (CudaInterface, "is_available", True),
            (CudaInterface, "raise_if_triton_unavailable", None),
            (CudaInterface.Worker, "get_device_properties", _H100),
            (scheduler, "has_triton", True),
        )
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, mock.Mock(return_value=answer)))
        stack.enter_context(mock.patch.object(reinplace, "_inplace_generalized_scatter", _scattered))
        stack.enter_context(mock.patch.object(driver, "_active", AbsentGpu(CAPABILITY)))
        yield
    DeviceProperties.create.cache_clear()


def interpreted(code: str) -> Callable[[list[Any]], Any]:
    """Return the function of written code, with its kernels run by Triton's interpreter on tensors of the CPU."""
    for there, here in (
        ("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = lambda device: None"),
        ("torch._C._dynamo.guards._empty_strided_cuda", "torch._C._dynamo.guards._empty_strided_cpu"),
        ("torch.cuda._DeviceGuard(0)", "__import__('contextlib').nullcontext()"),
        ("torch.cuda.set_device(0)", "pass"),
        ("async_compile = AsyncCompile()", "async_compile = interpreting"),
    ):
        assert there in code, there
        code = code.replace(there, here)
    names: dict[str, Any] = {"interpreting": _Interpreting(), "__name__": "written"}
    exec(code, names)
    call: Callable[[list[Any]], Any] = names["call"]
    return call


class _Interpreting:
    """The part of Inductor's `AsyncCompile` that written code calls."""

    def triton(self, name: str, source: str, device_str: str) -> _Kernel:
        _, _, body = source.partition("@triton_heuristics.")
        kind, _, _ = body.partition("(")
        _, _, function = body.partition("@triton.jit")
        # Triton reads the text of its functions from their files.
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
            file.write(f"{_HEAD}\n@triton.jit{function.replace('libdevice.', 'tl.')}")
        spec = spec_from_file_location(name, file.name)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        Path(file.name).unlink()
        (grid,) = re.findall(r"'grid_type': '(\w+)'", source)
        return _Kernel(getattr(module, name), kind, grid)

    def wait(self, names: dict[str, Any]) -> None:
        pass


_HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math
"""


@dataclass
class _Kernel:
    function: Any
    kind: str
    grid: str

    def run(self, *arguments: Any, stream: object) -> None:
        names = self.function.arg_names
        given = dict(zip(names, arguments, strict=False))
        assert self.grid in ("Grid1D", "Grid2D"), self.grid
        # Small blocks, so that several programs share the work.
        blocks = {name: 16 if name == "R0_BLOCK" else 8 for name in names[len(arguments) :]}
        sizes = [given[f"{axis}numel"] for axis in ("x", "y") if f"{axis}numel" in given]
        grid = [-(-size // blocks[f"{axis}BLOCK"]) for axis, size in zip("XY", sizes, strict=False)]
        self.function[tuple(grid)](*arguments, **blocks)
