"""What a GPU can do at the most, and what a pass must do at the least."""

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

from bridge.dtypes import INTEGERS, SIZES
from bridge.op import Call, Op
from bridge.signature import Array

PASSES = ("forward", "training forward", "backward")  # the second also saves what the third needs
EXPONENTIALS = 16  # that a multiprocessor's special function units take up in a clock

# Of CUdevice_attribute, in cuda.h.
CLOCK_RATE, MULTIPROCESSORS = 13, 16


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    hertz: float  # the highest clock

    @property
    def exponentials(self) -> float:
        """How many it computes in a second."""
        return EXPONENTIALS * self.multiprocessors * self.hertz


def card(device: int = 0) -> Card | None:
    """The GPU, from its driver; None where there is none of NVIDIA's. Frameworks don't agree on what they tell of it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device):
        return None
    found = []
    for attribute in (MULTIPROCESSORS, CLOCK_RATE):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle):
            return None
        found.append(value.value)
    return Card(found[0], found[1] * 1e3)  # the clock comes in kHz


def size(arrays: Iterable[Array]) -> int:
    """The bytes of arrays."""
    return sum(math.prod(a.shape) * (4 if a.dtype == INTEGERS[0] else 8 if a.dtype in INTEGERS else SIZES[a.dtype]) for a in arrays)


def made(op: Op, call: Call, which: str) -> int:
    """The bytes that a pass hands on, and so must allocate: outputs, with what is saved; or gradients."""
    if which == "backward":
        return size(call.array(name) for name in call.floating)
    return size(op.results(call, which == "training forward").values())


def moved(op: Op, call: Call, which: str) -> int:
    """The bytes that a pass must read and write, each array once."""
    inputs = size(a for a in call.given.values() if a is not None)
    if which == "backward":
        results = op.results(call, True)
        inputs += size(results[name] for name in op.saves(call.options)) + size(call.outputs.values())  # of these, the gradients
    return inputs + made(op, call, which)


def exponentials(op: Op, call: Call, which: str) -> int | None:
    """How many a pass computes, where the op says so."""
    return op.exponentials and op.exponentials(call, "backward" if which == "backward" else "forward")
