"""Launches as data. A plan says which kernels run, on what, in which order; a frontend only carries it out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bridge.signature import Array

# Whether the compiler may fuse a product and a sum into one rounding. Said outright, because Triton and jax-triton have
# defaults of their own, and results must not depend on who compiles.
FP_FUSION = True


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class Launch:
    """One kernel. Its parameters stand in the order inputs, scalars, outputs, constants.

    An input that isn't there (an optional argument, say) is handed over as an empty array of dtype `wide`; a constant
    tells the kernel not to read it. `over` names outputs that take the memory of an input, where the executor can do that:
    an array of the same shape that no later launch reads, and that the kernel has read before it writes there.
    """

    kernel: Any
    grid: int
    inputs: tuple[str, ...]
    scalars: tuple[int | float, ...]
    outputs: Mapping[str, Array]
    constants: Mapping[str, Any]
    wide: str = "float32"
    num_warps: int = 4
    num_stages: int = 3
    over: Mapping[str, str] = field(default_factory=dict)
    compiled: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # an executor's, by device

    @cached_property
    def constant_values(self) -> tuple:
        """The constants in the order of the kernel's parameters, and those with which it was declared."""
        parameters = list(self.kernel.signature.parameters.values())[len(self.inputs) + len(self.scalars) + len(self.outputs) :]
        return tuple(self.constants.get(p.name, p.default) for p in parameters)


@dataclass(frozen=True)
class Plan:
    """The launches of one pass, in order, and the names of the arrays that it returns."""

    launches: tuple[Launch, ...]
    outputs: tuple[str, ...]
    arrays: Mapping[str, Array] = field(init=False)

    def __post_init__(self):
        arrays: dict[str, Array] = {}
        for launch in self.launches:
            twice = arrays.keys() & launch.outputs.keys()
            if twice:
                raise ValueError(f"two launches write {sorted(twice)}")
            arrays.update(launch.outputs)
        object.__setattr__(self, "arrays", arrays)

    def run(self, arrays: Mapping[str, Any], execute: Callable[[Launch, list[Any]], Sequence[Any]]) -> list[Any]:
        """Carry the plan out. `execute` runs one launch on its inputs (None for one that isn't there)."""
        known = dict(arrays)
        for launch in self.launches:
            made = execute(launch, [known.get(name) for name in launch.inputs])
            known.update(zip(launch.outputs, made, strict=True))
        return [known[name] for name in self.outputs]
