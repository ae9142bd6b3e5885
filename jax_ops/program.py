"""A compiled function with its arguments, to be timed.

JAX has no events on the device, and its clock is the host's: what is measured is how long the host waits for many calls
that it has started one behind another. So that starting them isn't what takes the time, several calls stand in one
program, and that is started several times.
"""

import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from bridge.frontend import Timing

TOGETHER = 4  # calls in a program
STARTED = 16  # programs in flight at a time, at most; beyond 32 JAX waits
SHORT = 2e-3  # seconds below which a call is worth putting together with others
KERNELS = "custom_call_target"


class Program:
    """function(*arguments), compiled at the first call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.function, self.arguments = function, arguments

    @cached_property
    def once(self) -> Any:
        return jax.jit(self.function).lower(*self.arguments).compile()

    def __call__(self) -> Any:
        return self.once(*self.arguments)

    def memory(self) -> int | None:
        """Bytes of the results and of everything in between, as the compiler has laid them out."""
        found = self.once.memory_analysis()
        return found and found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes

    def together(self, times: int) -> tuple[Any, list[Any]]:
        """Several calls in one program, and their arguments: each has a copy of its own, or the compiler would take them for one
        call. (It looks through optimization barriers.)"""

        def several(each):
            return [self.function(*arguments) for arguments in each]

        each = [jax.tree.map(jnp.copy, self.arguments) for _ in range(times)]
        compiled = jax.jit(several).lower(each).compile()
        kernels, expected = compiled.as_text().count(KERNELS), times * self.once.as_text().count(KERNELS)
        if kernels < expected:
            raise RuntimeError(f"{times} calls in one program should hold {expected} kernels, and hold {kernels}")
        return compiled, [each]

    def time(self, seconds: float, rough: float, gpu: bool) -> Timing:
        """The time of a call, which takes about `rough` seconds: the median of three rounds, on a GPU of many calls each."""
        times = TOGETHER if gpu and rough < SHORT else 1
        run, arguments = self.together(times) if times > 1 else (self.once, self.arguments)
        count = min(max(int(seconds / 3 / (times * rough)), 1), STARTED) if gpu else 1
        jax.block_until_ready(run(*arguments))
        totals, starved = [], False
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(count):
                made = run(*arguments)
            started = time.perf_counter() - begun
            jax.block_until_ready(made)
            totals.append(time.perf_counter() - begun)
            starved |= count > 1 and started > 0.9 * totals[-1]
        return Timing(statistics.median(totals) / (count * times), starved)
