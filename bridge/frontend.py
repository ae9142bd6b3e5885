"""What parity, bench and tests see of a frontend. Frontends are found by name, so that bridge imports neither."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bridge.op import Op

Arrays = Mapping[str, Any]
Result = tuple[tuple[Any, ...], dict[str, Any]]  # outputs, and the gradient of each input

# The name of a frontend, which is its framework's -> the module that holds it.
MODULES = {"torch": "torch_ops.frontend", "jax": "jax_ops.frontend"}


class Frontend(Protocol):
    name: str
    gpu: bool  # whether arrays lie on a GPU here

    def versions(self) -> dict[str, str]:
        """Distribution -> version."""

    def devices(self) -> list[str]:
        """The devices of this machine, in words."""

    def array(self, value: np.ndarray, dtype: str) -> Any:
        """An array of the framework, on the GPU where there is one."""

    def numpy(self, array: Any) -> np.ndarray:
        """The values: integers as they are, all others in float64."""

    def bits(self, array: Any) -> np.ndarray:
        """The values as unsigned integers, to compare bit for bit."""

    def function(self, op: Op) -> Callable[..., Any]:
        """The op, bound."""

    def reference(self, op: Op) -> Callable[..., Any]:
        """The loop that defines the op."""

    def run(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any], backend: str | None) -> Result:
        """All outputs of the op, and its gradients by the framework's automatic differentiation."""

    def run_reference(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any]) -> Result:
        """The same of the loop."""


def installed() -> list[str]:
    """The frontends whose framework is installed, by name."""
    return [name for name in MODULES if importlib.util.find_spec(name)]


def load(name: str) -> Frontend:
    """A frontend by name. Raises KeyError for an unknown one, ImportError where its framework is missing."""
    return importlib.import_module(MODULES[name]).frontend
