"""JAX over several devices: one process for all."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ops
from jax_ops.frontend import frontend


class Devices:
    """Arrays that are split are whole to the process, and lie on all devices: `mine` of an array is all of it, a `part` the first."""

    ops, frontend = jax_ops, frontend

    def __init__(self):
        self.rank, self.count = 0, jax.device_count()
        self.all, self.alone = self._mesh(self.count), self._mesh(1)

    def _mesh(self, count):
        return jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])

    def part(self, array, axis):
        return array if axis is None else jnp.split(array, self.count, axis)[0]

    def mine(self, array, axis):
        return array

    def one_device(self, function, values, dy):
        return partial(jax.jit(partial(self._pull, function)), values, dy)

    def over_batch(self, function, mesh, values, axes, dy):
        """The op's rule tells the compiler how it can be split, and which gradients are sums."""
        places = {name: NamedSharding(mesh, spec) for name, spec in self._specs(axes).items()}
        placed = {name: jax.device_put(v, places[name]) for name, v in values.items()}
        step = jax.jit(partial(self._pull, function), out_shardings=(places["y"], {name: places[name] for name in values}))
        return partial(step, placed, jax.device_put(dy, places["y"]))

    def over_time(self, options, mesh, values, axes, dy):
        specs = self._specs(axes)

        def function(**values):
            def scan(values):
                return jax_ops.selective_scan_over_time(**values, axis_name="devices", **options)

            return jax.shard_map(scan, mesh=mesh, in_specs=({name: specs[name] for name in values},), out_specs=specs["y"])(values)

        return self.over_batch(function, mesh, values, axes, dy)

    def _specs(self, axes):
        return {name: P() if axis is None else P(*[None] * axis, "devices") for name, axis in axes.items()}

    def _pull(self, function, values, dy):
        y, pull = jax.vjp(lambda values: function(**values), values)
        return y, pull(dy)[0]

    def wait(self, results):
        frontend.wait(results)

    def meet(self): ...

    def most(self, number: float) -> float:
        return number

    def carries(self, size: float) -> float:
        """An all-gather, and for its gradient a reduce-scatter."""
        return 2 * (self.count - 1) * size

    def close(self): ...
