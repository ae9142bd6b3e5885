"""What parity, bench and tests see of a frontend. Frontends are found by name, so that bridge imports neither."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bridge.op import Call, Op

Arrays = Mapping[str, Any]
Result = tuple[tuple[Any, ...], dict[str, Any]]  # outputs, and the gradient of each input

# The name of a frontend, which is its framework's -> the module that holds it.
MODULES = {"torch": "torch_ops.frontend", "jax": "jax_ops.frontend"}


@dataclass(frozen=True)
class Timing:
    seconds: float  # a call
    starved: bool = False  # the device may have waited for the host: the time is an upper bound


@dataclass(frozen=True)
class Baseline:
    """Something else that computes an op, to be timed beside it: function(**inputs, **options) takes the op's inputs, each after
    enter(name, array), and gives outputs of which `leave` makes the op's. refuse(call) says why a call is not for it."""

    name: str
    function: Callable[..., Any]
    enter: Callable[[str, Any], Any] = lambda name, array: array
    leave: Callable[[Any], Any] = lambda array: array
    refuse: Callable[[Call], str | None] = lambda call: None


def plain_scan(call: Call) -> str | None:
    """Why a call of selective_scan has more than x, delta, A and a B and C of each step, which is what baselines are adapted to."""
    more = [name for name in call.dtypes if name not in ("x", "delta", "A", "B", "C")] + [name for name, on in call.settings if on]
    more += [name for name in "BC" if call.sizes.forms[name] != ("b", "t", "n")]
    return f"not adapted to {', '.join(more)}" if more else None


class Frontend(Protocol):
    name: str
    gpu: bool  # whether arrays lie on a GPU here

    def versions(self) -> dict[str, str]:
        """Distribution -> version."""

    def devices(self) -> list[str]:
        """The devices of this machine, in words."""

    def card(self) -> str:
        """The kind of GPU that plans are made for (see bridge.tuning); none on a CPU."""

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

    # What follows is for bench. `function` takes inputs by keyword and gives one array or several; passes are those of
    # bridge.limits.

    def tile(self, array: Any, repeats: Sequence[int]) -> Any:
        """The array, repeated along each of its axes."""

    def prepare(self, function: Callable[..., Any], inputs: Arrays, cotangents: Sequence[Any], which: str) -> Callable[[], Any]:
        """One pass of `function`, with its gradients with respect to all floating-point inputs, as a call that only starts it."""

    def copying(self, size: int) -> Callable[[], Any]:
        """A call that reads `size` bytes and writes as many."""

    def wait(self, results: Any) -> None:
        """Until what was started is done."""

    def time(self, call: Callable[[], Any], seconds: float) -> Timing:
        """The time of a prepared call on the device (of a CPU, by the clock on the wall), measured for about `seconds`."""

    def peak(self, call: Callable[[], Any]) -> int | None:
        """The most bytes that a prepared call has allocated at a time, its results among them; None where that isn't known."""

    def host_time(self, function: Callable[..., Any], inputs: Arrays) -> float:
        """Seconds until a call of `function`, not compiled, has started its work on the device."""

    def free(self) -> None:
        """Give memory that is in no use back to the device."""

    def baselines(self, op: Op) -> list[Baseline]:
        """What else is installed that computes this op."""


def installed() -> list[str]:
    """The frontends whose framework is installed, by name."""
    return [name for name in MODULES if importlib.util.find_spec(name)]


def load(name: str) -> Frontend:
    """A frontend by name. Raises KeyError for an unknown one, ImportError where its framework is missing."""
    return importlib.import_module(MODULES[name]).frontend
