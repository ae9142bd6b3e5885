"""One of two processes of test_jax_processes.py, with two devices each: `jax_process.py ADDRESS NUMBER`."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
assert (jax.device_count(), jax.local_device_count()) == (4, 2)

# What looks at devices can be imported from here on.
from jax_settings import ALL, close, loss, setting

import jax_ops
from bridge.signature import ELLIPSIS

mesh = jax.make_mesh((2, 2), ("data", "time"), axis_types=(AxisType.Auto,) * 2)


def check(s, f, axes):
    """The gradients of s over all four devices, with dimensions split over `axes` of the mesh, as every process has them."""
    forms, host = s.forms(), jax.device_get(s.values)
    specs = {name: PartitionSpec(*(axes.get(dim) for dim in forms[name])) for name in host}
    values = {name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), x.__getitem__) for name, x in host.items()}
    found = jax.jit(jax.grad(loss(f(specs))), out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
    close({name: np.asarray(g.addressable_data(0)) for name, g in found.items()}, jax.jit(jax.grad(loss(s.f)))(host))


def over_time(specs):
    def part(values):
        options = {**scan.case.options, "return_final_state": True, "backend": "reference"}
        return jax_ops.selective_scan_over_time(**values, **options, axis_name="time")

    return jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=(PartitionSpec("data", "time"), PartitionSpec("data")))


for op in ALL:
    s = setting(op)
    check(s, lambda specs, s=s: s.f, {"b": "data", ELLIPSIS: "data"})
scan = setting(ALL[0], "base", t=8)
check(scan, over_time, {"b": "data", "t": "time"})
print("agree")
