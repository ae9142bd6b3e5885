"""selective_scan_over_time against the scan of the whole sequence on one device: outputs and all gradients."""

import pytest
from jax_settings import close, loss, mesh_of, setting

from bridge import ops

jax = pytest.importorskip("jax")
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
    mesh = mesh_of(kind, time=devices)
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


def test_what_devices_say():
    """n + 1 numbers a channel, whatever the number of steps."""
    s, mesh = setting(SCAN, "everything", b=2, t=64), mesh_of(AxisType.Auto, time=8)
    forms, (b, d, n) = s.forms(), (2, 4, 2)
    specs = {name: PartitionSpec(*("time" if dim == "t" else None for dim in forms[name])) for name in s.values}

    def part(values):
        return jax_ops.selective_scan_over_time(**values, axis_name="time", backend="reference")

    run = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(None, "time"))
    (split,) = jax.make_jaxpr(run)(s.values).eqns
    said = [e for e in split.params["jaxpr"].eqns if "axis_name" in e.params and e.primitive.name != "axis_index"]
    assert {e.primitive.name for e in said} == {"all_gather"}
    assert sum(v.aval.size for e in said for v in e.outvars) == 8 * b * d * (n + 1)
    with pytest.raises(NameError):
        part(s.values)
