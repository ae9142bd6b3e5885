"""JAX as parity, bench and tests see it. Float64 is switched on when this module is imported: references are in it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.frontend import Arrays, Baseline, Result, Timing
from bridge.language import INTERPRETING
from bridge.op import Op
from jax_ops import baselines, loops
from jax_ops.bind import bind
from jax_ops.launch import card
from jax_ops.program import Program
from jax_ops.reference import function as reference

jax.config.update("jax_enable_x64", True)
if INTERPRETING:
    jax.config.update("jax_platforms", "cpu")

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class JaxFrontend:
    name = "jax"

    @property
    def gpu(self) -> bool:
        return jax.default_backend() == "gpu"

    def versions(self) -> dict[str, str]:
        found = {}
        for name in ("jax", "jaxlib", "jax-triton"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not installed"
        return found

    def devices(self) -> list[str]:
        return [device.device_kind if device.platform != "cpu" else "CPU" for device in jax.devices()]

    def card(self) -> str:
        return card(self.gpu)

    def array(self, value: np.ndarray, dtype: str) -> jax.Array:
        return jnp.asarray(value, dtype)

    def numpy(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array).astype(np.float64) if loops.floating(array) else np.asarray(array)

    def bits(self, array: jax.Array) -> np.ndarray:
        host = np.asarray(array)
        return host.view(BITS[host.dtype.itemsize])

    def function(self, op: Op) -> Callable[..., Any]:
        return bind(op)

    def reference(self, op: Op) -> Callable[..., Any]:
        return reference(op)

    def run(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any], backend: str | None) -> Result:
        return _compiled(op, tuple(options.items()), backend)(dict(inputs), tuple(cotangents))

    def run_reference(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any]) -> Result:
        return _compiled_reference(op, tuple(options.items()))(dict(inputs), tuple(cotangents))

    def tile(self, array: jax.Array, repeats: Sequence[int]) -> jax.Array:
        return jnp.tile(array, repeats)

    def prepare(self, function: Callable[..., Any], inputs: Arrays, cotangents: Sequence[Any], which: str) -> Program:
        if which == "forward":
            return Program(lambda inputs: function(**inputs), inputs)
        floats = {name: x for name, x in inputs.items() if loops.floating(x)}

        def training(floats):
            return jax.vjp(lambda floats: function(**{**inputs, **floats}), floats)

        def kept(floats):
            # Inputs are kept as they are: as results of a program they would be copied.
            given = set(map(id, jax.tree.leaves(floats)))
            return [x for x in jax.tree.leaves(training(floats)) if id(x) not in given]

        if which == "training forward":
            return Program(kept, floats)
        outputs, pull = jax.jit(training)(floats)
        return Program(lambda pull, cotangent: pull(cotangent), pull, tuple(cotangents) if isinstance(outputs, tuple) else cotangents[0])

    def copying(self, size: int) -> Program:
        return Program(lambda x: x + 1, jnp.zeros(size // 4, jnp.int32))

    def wait(self, results: Any) -> None:
        jax.block_until_ready(results)

    def time(self, call: Callable[[], Any], seconds: float) -> Timing:
        assert isinstance(call, Program)
        self.wait(call())
        begun = time.perf_counter()
        self.wait(call())
        return call.time(seconds, time.perf_counter() - begun, self.gpu)

    def peak(self, call: Callable[[], Any]) -> int | None:
        assert isinstance(call, Program)
        return call.memory() if self.gpu else None

    def host_time(self, function: Callable[..., Any], inputs: Arrays) -> float:
        found = []
        for _ in range(20):
            begun = time.perf_counter()
            made = function(**inputs)
            found.append(time.perf_counter() - begun)
            self.wait(made)
        return statistics.median(found)

    def free(self) -> None:
        jax.clear_caches()

    def baselines(self, op: Op) -> list[Baseline]:
        return baselines.of(op)


# One jitted function for each op and its options, so that a second call with the same shapes compiles nothing.


@cache
def _compiled(op: Op, options: tuple[tuple[str, Any], ...], backend: str | None) -> Callable[..., Result]:
    flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}

    def all_outputs(inputs):
        outputs = bind(op)(**inputs, **dict(options), **flags, backend=backend)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def both(inputs, cotangents):
        floats = {name: x for name, x in inputs.items() if loops.floating(x)}
        outputs, pull = jax.vjp(lambda floats: all_outputs({**inputs, **floats}), floats)
        return outputs, pull(cotangents)[0]

    return jax.jit(both)


@cache
def _compiled_reference(op: Op, options: tuple[tuple[str, Any], ...]) -> Callable[..., Result]:
    names = [i.name for i in op.signature.inputs]
    chosen = [dict(options).get(name, option.default) for name, option in op.options.items()]

    def both(inputs, cotangents):
        arrays = [inputs.get(name) for name in names]
        needs = [x is not None and loops.floating(x) for x in arrays]
        found = loops.gradients(op, arrays, chosen, cotangents, needs)
        return loops.run(op, arrays, chosen), {name: g for name, g, need in zip(names, found, needs, strict=True) if need}

    return jax.jit(both)


frontend = JaxFrontend()
