"""One of two processes of test_jax_processes.py, with two devices each: `jax_process.py ADDRESS NUMBER`."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_ops

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
assert (jax.device_count(), jax.local_device_count()) == (4, 2)

b, t, d, n = 2, 8, 3, 2
rng = np.random.default_rng(0)
shapes = {"x": (b, t, d), "delta": (b, t, d), "A": (d, n), "B": (b, t, n), "C": (b, t, n)}
host = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
host["A"] = -np.exp(host["A"])


def loss(scan):
    return lambda values: (scan(**values) ** 2).sum()


def found(specs, split):
    """The gradients over all four devices, as every process has them."""
    values = {name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), x.__getitem__) for name, x in host.items()}
    whole = jax.jit(jax.grad(loss(split)), out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
    return {name: np.asarray(g.addressable_data(0)) for name, g in whole.items()}


mesh = jax.make_mesh((2, 2), ("data", "time"), axis_types=(AxisType.Auto,) * 2)
batch = {name: PartitionSpec("data") if len(shape) > 2 else PartitionSpec() for name, shape in shapes.items()}
steps = {name: PartitionSpec("data", "time") if len(shape) > 2 else PartitionSpec() for name, shape in shapes.items()}


def over_time(**values):
    def part(values):
        return jax_ops.selective_scan_over_time(**values, axis_name="time", backend="reference")

    return jax.shard_map(part, mesh=mesh, in_specs=(steps,), out_specs=PartitionSpec("data", "time"))(values)


def alone(**values):
    return jax_ops.selective_scan(**values, backend="reference")


expected = jax.jit(jax.grad(loss(alone)))(host)
for specs, split in ((batch, alone), (steps, over_time)):
    for name, gradient in found(specs, split).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)
print("agree")
