"""selective_scan_over_time against the scan of the whole sequence on one device: outputs and all gradients."""

import pytest
from jax_settings import close, loss, setting

from bridge import ops

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import jax_ops

SCAN = ops["selective_scan"]
BARE = ("D", "z", "delta_bias", "initial_state")
# devices, dtype, arguments left out, softplus, forms of B and C, type of the mesh axis
CALLS = [
    (2, "float64", (), True, "everything", AxisType.Auto),
    (4, "float64", BARE, False, "no initial state", AxisType.Explicit),
    (8, "float64", ("z", "initial_state"), True, "one step", AxisType.Auto),
    (8, "float32", (), True, "everything", AxisType.Explicit),
]


@pytest.mark.parametrize(("devices", "dtype", "without", "softplus", "case", "kind"), CALLS)
def test_over_time(devices, dtype, without, softplus, case, kind, covers):
    covers("jax", "time over devices", SCAN.name)
    s = setting(SCAN, case, b=2, t=16)
    values = {name: x.astype(dtype) for name, x in s.values.items() if name not in without}
    forms = s.forms()
    mesh = jax.make_mesh((devices,), ("time",), axis_types=(kind,), devices=jax.devices()[:devices])
    specs = {name: PartitionSpec(*("time" if dim == "t" else None for dim in forms[name])) for name in values}
    options = {"delta_softplus": softplus, "return_final_state": True, "backend": "reference"}

    def part(values):
        return jax_ops.selective_scan_over_time(**values, axis_name="time", **options)

    def split(values):
        placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in values.items()}
        run = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=(PartitionSpec(None, "time"), PartitionSpec()))
        return run(placed)

    def whole(values):
        return jax_ops.selective_scan(**values, **options)

    found = jax.jit(jax.value_and_grad(loss(split)))(values)
    expected = jax.jit(jax.value_and_grad(loss(whole)))(values)
    close(found, expected, 1e-10 if dtype == "float64" else 2e-5)
    close(jax.jit(split)(values), jax.jit(whole)(values), 1e-10 if dtype == "float64" else 2e-5)


def test_carries_only():
    """Devices tell each other n + 1 numbers a channel, whatever the number of steps."""
    s = setting(SCAN, "everything", b=2, t=64)
    forms = s.forms()
    mesh = jax.make_mesh((8,), ("time",), axis_types=(AxisType.Auto,))
    specs = {name: PartitionSpec(*("time" if dim == "t" else None for dim in forms[name])) for name in s.values}
    run = jax.shard_map(
        lambda values: jax_ops.selective_scan_over_time(**values, axis_name="time", backend="reference"),
        mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(None, "time"),
    )  # fmt: skip
    gathered = [
        eqn.outvars[0].aval.size
        for eqn in jax.make_jaxpr(run)(s.values).eqns[0].params["jaxpr"].eqns
        if eqn.primitive.name in ("all_gather", "psum", "psum_invariant", "ppermute")
        for _ in [0]
    ]
    b, d, n = 2, 4, 2
    assert sum(gathered) <= 8 * b * d * (n + 1)
    with pytest.raises(NameError):
        jax_ops.selective_scan_over_time(**s.values, axis_name="time")
    assert jnp.isfinite(s.values["x"]).all()
