"""Plans carried out in JAX: compiled, through jax-triton; or interpreted, through a callback.

Two generations of jax-triton are in use; this file hides the difference. Both take a kernel's arguments in the order
inputs, scalars, outputs; the arguments for the outputs' shapes and for compiler options have other names in each.
"""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge import interpret
from bridge.language import mend_cache_folder
from bridge.plan import FP_FUSION, Launch, Plan

# The compute capability that kernels are compiled for; None is that of the GPU in the machine.
TARGET: int | None = None


class Size(int):
    """A scalar that jax-triton doesn't know to be 1: it would bake a 1 in, and so compile another kernel for it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and int(self) == int(other)

    __hash__ = int.__hash__


@cache
def _triton_call() -> Callable[..., Any]:
    """jax-triton's entry, as call(*arguments, outputs, fp_fusion, over, cost, **rest). `over` maps inputs to the outputs that take
    their memory, by position; the newer generation hands one pointer over for both, and so gives the outputs memory of their own.
    `cost` is what a profiler is told; the older generation tells it nothing.

    Importing it takes a folder for compiled kernels that TRITON_CACHE_DIR names away from Triton: it is put back.
    """
    folder = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(f"JAX runs kernels on a GPU through jax-triton: pip install 'kernel-bridge[cuda]' ({error})") from error
    finally:
        mend_cache_folder()
        if folder:
            os.environ["TRITON_CACHE_DIR"] = folder
    first = tuple(int(part) for part in jax_triton.__version__.split(".")[:2]) < (0, 4)

    def call(*arguments, outputs, fp_fusion, over, cost, **rest):
        differing = {"out_shape": outputs, "enable_fp_fusion": fp_fusion, "input_output_aliases": over}
        if not first:
            differing = {"out_type": outputs, "backend_options": {"enable_fp_fusion": fp_fusion}, "cost_estimate": cost}
        return jax_triton.triton_call(*arguments, **differing, **rest)

    return call


def run_compiled(plan: Plan, arrays: dict[str, jax.Array | None], flops: int = 0) -> list[jax.Array]:
    """Carry a plan out on a GPU, within a traced function. `flops`, those of the whole plan, are laid to its launches by the
    bytes that each reads and writes."""
    triton_call = _triton_call()
    shapes = {**{name: x for name, x in arrays.items() if x is not None}, **plan.arrays}
    moved = [sum(_bytes(shapes[name]) for name in (*launch.inputs, *launch.outputs) if name in shapes) for launch in plan.launches]
    shares = iter([(flops * n // max(sum(moved), 1), n) for n in moved])

    def execute(launch: Launch, inputs: list[jax.Array | None]) -> list[jax.Array]:
        outputs, (operations, traffic) = list(launch.outputs.values()), next(shares)
        if not launch.grid:
            return [jnp.zeros(a.shape, a.dtype) for a in outputs]
        absent = jnp.zeros(1, launch.wide)
        pointers = [absent if x is None or not x.size else x for x in inputs]
        scalars = [Size(s) if isinstance(s, int) else s for s in launch.scalars]
        types = [jax.ShapeDtypeStruct(a.shape if np.prod(a.shape) else (1,), a.dtype) for a in outputs]
        made = triton_call(
            *pointers, *scalars, kernel=launch.kernel, grid=(launch.grid,), num_warps=launch.num_warps,
            num_stages=launch.num_stages, compute_capability=TARGET, outputs=types, fp_fusion=FP_FUSION,
            cost={"flops": operations, "bytes_accessed": traffic},
            over={launch.inputs.index(i): list(launch.outputs).index(o) for o, i in launch.over.items()}, **launch.constants,
        )  # fmt: skip
        return [m.reshape(a.shape) if np.prod(a.shape) else jnp.zeros(a.shape, a.dtype) for m, a in zip(made, outputs, strict=True)]

    return plan.run(arrays, execute)


def run_interpreted(plan: Plan, arrays: dict[str, jax.Array | None]) -> list[jax.Array]:
    """Carry a plan out on the CPU in Triton's interpreter, within a traced function. The callback touches numpy only."""
    present = {name: x for name, x in arrays.items() if x is not None}
    results = [plan.arrays[name] for name in plan.outputs]

    def execute(launch: Launch, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
        bits = interpret.execute(launch, [None if x is None else (_bits(x), x.dtype.name) for x in inputs])
        return [b.view(jnp.dtype(a.dtype)) for b, a in zip(bits, launch.outputs.values(), strict=True)]

    def host(*values):
        return plan.run(dict(zip(present, map(np.asarray, values), strict=True)), execute)

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results]
    return jax.pure_callback(host, types, *present.values())


def _bytes(array) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
