"""The interpreter: runs a launch on numpy arrays in Triton's interpreter, without a GPU and without a framework.

numpy has no bfloat16 of its own. Here an array of any dtype is its bits: a numpy array of that type, or of uint16 for
bfloat16.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from bridge.plan import Launch
from bridge.signature import Array

STORAGE: dict[str, type] = {
    "float16": np.float16, "bfloat16": np.uint16, "float32": np.float32, "float64": np.float64, "int32": np.int32, "int64": np.int64
}  # fmt: skip

_lock = threading.Lock()  # Triton's interpreter keeps the running program's index in a global


def empty(array: Array) -> np.ndarray:
    return np.empty(array.shape, STORAGE[array.dtype])


def execute(
    launch: Launch, inputs: Sequence[tuple[np.ndarray, str] | None], buffers: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Run one launch. Inputs are pairs of bits and dtype; the outputs are bits, of the dtypes that the launch names. Those
    named in `buffers` are written there."""
    buffers = {o: inputs[launch.inputs.index(i)][0] for o, i in launch.over.items()} | dict(buffers or {})  # type: ignore[index]
    outputs = [buffers[name] if name in buffers else empty(array) for name, array in launch.outputs.items()]
    if launch.grid:
        absent: tuple[np.ndarray, str] = (np.zeros(1, STORAGE[launch.wide]), launch.wide)
        pointers = [_Pointer(np.ascontiguousarray(bits), dtype) for bits, dtype in (i or absent for i in inputs)]
        results = [_Pointer(bits, array.dtype) for bits, array in zip(outputs, launch.outputs.values(), strict=True)]
        with _lock, _patched_once():
            launch.kernel[(launch.grid,)](*pointers, *launch.scalars, *results, **launch.constants)
    return outputs


@contextmanager
def _patched_once():
    """The interpreter puts its own functions into triton.language when a kernel starts, and again whenever one function calls
    another, which takes most of its time: within a kernel the first time is enough."""
    original: Callable[..., Any] = interpreter._patch_lang
    seen: set[int] = set()

    def patch(fn):
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if languages <= seen:
            return None
        seen.update(languages)
        return original(fn)

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = original


class _Pointer:
    """A numpy array as the little of a tensor that Triton's interpreter asks for."""

    def __init__(self, bits: np.ndarray, dtype: str):
        self.bits, self.dtype, self.shape = bits, dtype, bits.shape

    def data_ptr(self):
        return self.bits.ctypes.data

    def element_size(self):
        return self.bits.itemsize

    def stride(self):
        return tuple(s // self.bits.itemsize for s in self.bits.strides)

    def size(self):
        return self.shape

    def numel(self):
        return self.bits.size

    def storage_offset(self):
        return 0

    # The interpreter copies from device to host and back; here both are this array.
    device = "cpu"

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_, **__):
        return self

    def copy_(self, *_, **__):
        return self

    @property
    def data(self):
        return self
