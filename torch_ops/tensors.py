"""Tensors as the bridge sees them, and plans carried out on them."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from triton import AsyncCompileMode, JITFunction

from bridge import interpret, tuning
from bridge.dtypes import FLOATS, INTEGERS
from bridge.language import mend_cache_folder
from bridge.op import Call, Op
from bridge.plan import FP_FUSION, Launch, Plan
from bridge.signature import Array, Given
from bridge.transpose import BLOCK, transposition

LARGE = 2**20  # elements
DTYPES = {name: getattr(torch, name) for name in (*FLOATS, *INTEGERS)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensor: torch.Tensor | None) -> Given | None:
    if tensor is None:
        return None
    name = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return Given(tuple(tensor.shape), name, str(tensor.device))


def card(device: torch.device) -> str:
    """The kind of GPU that a plan is for; none where there is no GPU, as for fake tensors on another machine."""
    return tuning.kind(_name(device))


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""


def check_kinds(op: Op, arrays: tuple) -> None:
    """Raises TypeError for an argument that is no tensor."""
    for argument, value in zip(op.signature.inputs, arrays, strict=True):
        if not (isinstance(value, torch.Tensor) or (value is None and argument.optional)):
            raise TypeError(f"{op.name}: {argument.name} must be a torch.Tensor, got {type(value).__name__}")


def check(op: Op, arrays: tuple, values: tuple, backend: str | None = None) -> None:
    """Raises what is wrong with a call, in the op's names, before anything of it runs."""
    values = op.check_options(values, backend)
    check_kinds(op, arrays)
    call_of(op, arrays, values[: len(op.options)])


def call_of(op: Op, arrays: tuple, options: tuple) -> Call:
    """The checked call of these tensors; kept, unless sizes are symbols: those of fake tensors and compiled functions."""
    given = tuple(map(describe, arrays))
    plain = not torch.compiler.is_compiling() and all(type(size) is int for array in given if array for size in array.shape)
    return op.known_call(given, options) if plain else op.call(given, options)


def prepared(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous, and aligned to 16 bytes: kernels are compiled for that."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        tensor = _time_second(tensor) if tensor.is_cuda and lies_time_last(tensor) else tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def lies_time_last(tensor: torch.Tensor) -> bool:
    """Whether the second axis is the last in memory, and a copy is large enough that a kernel of ours pays: PyTorch's copies take five
    times as long, but less of the host."""
    if tensor.dim() < 3 or tensor.numel() < LARGE or tensor[0].numel() < BLOCK**2:
        return False
    return tensor.movedim(1, -1).is_contiguous()


def _time_second(tensor: torch.Tensor) -> torch.Tensor:
    b, t = tensor.shape[:2]
    source = tensor.movedim(1, -1).reshape(b, -1, t)
    plan = transposition(b, source.shape[1], t, NAMES[tensor.dtype])
    return run_compiled(plan, {"source": source}, tensor.device)[0].view(tensor.shape)


def empty(array: Array, device: torch.device) -> torch.Tensor:
    return torch.empty(array.shape, dtype=DTYPES[array.dtype], device=device)


Tensors = Mapping[str, torch.Tensor | None]
Buffers = Mapping[str, torch.Tensor]


NONE: Buffers = MappingProxyType({})


def run(plan: Plan, backend: str, arrays: Tensors, device: torch.device, buffers: Buffers = NONE) -> list[torch.Tensor]:
    """Carry a plan out. Outputs named in `buffers` are written there."""
    return run_interpreted(plan, arrays, buffers) if backend == "interpret" else run_compiled(plan, arrays, device, buffers)


def run_compiled(plan: Plan, arrays: Tensors, device: torch.device, buffers: Buffers = NONE) -> list[torch.Tensor]:
    """Carry a plan out on a GPU, on the device of the arrays and its current stream."""
    aligned = all(x.data_ptr() % 16 == 0 for x in (*arrays.values(), *buffers.values()) if x is not None)

    def execute(launch: Launch, inputs: list[Any]) -> list[torch.Tensor]:
        known = {**buffers, **{o: inputs[launch.inputs.index(i)] for o, i in launch.over.items()}} if launch.over else buffers
        outputs = [known[name] if name in known else empty(array, device) for name, array in launch.outputs.items()]
        if launch.grid:
            absent = _absent(DTYPES[launch.wide], device)
            start(launch, [*[absent if x is None else x for x in inputs], *launch.scalars, *outputs], device, aligned)
        return outputs

    if device not in plan.launches[-1].compiled:
        compile_together(plan, arrays, device)
    if device.index == torch.cuda.current_device():  # to set it anyway takes the host as long as a small launch
        return plan.run(arrays, execute)
    with torch.cuda.device(device):
        return plan.run(arrays, execute)


def compile_together(plan: Plan, arrays: Tensors, device: torch.device) -> None:
    """Compile what a plan starts, all of it at once: the largest kernel takes as long as it would by itself."""
    waiting = [launch for launch in plan.launches if launch.grid and device not in launch.compiled]
    dtypes = {name: x.dtype for name, x in arrays.items() if x is not None}
    dtypes |= {name: DTYPES[array.dtype] for name, array in plan.arrays.items()}
    mend_cache_folder()
    with torch.cuda.device(device), ThreadPoolExecutor() as threads, AsyncCompileMode(threads):
        for launch in waiting:
            inputs = [dtypes.get(name, DTYPES[launch.wide]) for name in launch.inputs]
            outputs = [dtypes[name] for name in launch.outputs]
            launch.kernel.warmup(*inputs, *launch.scalars, *outputs, grid=(launch.grid,), **launch.constants, **_options(launch))


def start(launch: Launch, arguments: list[Any], device: torch.device, aligned: bool) -> None:
    """Start a kernel. Triton looks up the compiled one among all that it has, by every argument, which takes the host far longer than to
    start it; so a launch keeps its own, for arrays that are all aligned to 16 bytes."""
    compiled = launch.compiled.get(device) if aligned else None
    if compiled is not None:
        compiled[(launch.grid, 1, 1)](*arguments, *launch.constant_values)
        return
    compiled = launch.kernel[(launch.grid,)](*arguments, **launch.constants, **_options(launch))
    if aligned and isinstance(launch.kernel, JITFunction):
        launch.compiled[device] = compiled


def _options(launch: Launch) -> dict[str, Any]:
    """What the compiler is told besides."""
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": FP_FUSION}


def run_interpreted(plan: Plan, arrays: Tensors, buffers: Buffers = NONE) -> list[torch.Tensor]:
    """Carry a plan out on the CPU, in Triton's interpreter."""
    views = {name: as_numpy(x) for name, x in buffers.items()}

    def execute(launch: Launch, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
        bits = interpret.execute(launch, [None if x is None else (as_numpy(x), NAMES[x.dtype]) for x in inputs], views)
        return [torch.from_numpy(b).view(DTYPES[a.dtype]) for b, a in zip(bits, launch.outputs.values(), strict=True)]

    return plan.run(arrays, execute)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU, bfloat16 as its bits. (Tensor.numpy would leave it a storage that can't be resized,
    which sharded parameters are.)"""
    tensor = tensor.detach()
    return np.from_dlpack(tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor)


@cache
def _absent(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands for an array that isn't there."""
    return torch.zeros(1, dtype=dtype, device=device)
