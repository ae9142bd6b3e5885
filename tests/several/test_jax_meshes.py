"""JAX's meshes: what is split along batch or channels stays where it is, and gradients of what lacks a split dimension are
added up over the devices once."""

import re

import pytest
from common import KERNELS, by_name
from jax_settings import ALL, close, loss, mesh_of, setting

from bridge import ops
from bridge.signature import ELLIPSIS

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "all-reduce")
each_op = pytest.mark.parametrize("op", ALL, ids=by_name)
each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=by_name)


def spec(form, splits):
    """Where the axes of an array of this form lie, where `splits` says over which mesh axis each dimension is split."""
    return PartitionSpec(*(splits.get(dim) for dim in form))


def placed(mesh, values, forms, splits, front=()):
    return {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*front, *spec(forms[name], splits)))) for name, x in values.items()}


def moves(compiled):
    """How many arrays each kind of collective moves."""
    text = compiled.as_text()
    return {kind: sum(found.count("%") for found in re.findall(rf" {kind}\(([^)]*)\)", text)) for kind in MOVES if f" {kind}(" in text}


def pull(f):
    """Outputs, and the gradients for given gradients of the outputs: no sum that isn't the op's own."""

    def both(values, cotangents):
        outputs, back = jax.vjp(f, values)
        return outputs, back(cotangents)[0]

    return both


def splits_of(op):
    if op.batch == ELLIPSIS:
        return {ELLIPSIS: "data"}
    return {"b": "data", "d": "model", "g": "model"}


@each_kind
@each_op
def test_mesh(op, kind, covers):
    covers("jax", f"{kind.name} mesh", op.name)
    s, mesh = setting(op), mesh_of(kind, data=4, model=2)
    forms, splits = s.forms(), splits_of(op)
    expected = s.loop(s.values)
    cotangents = [jnp.cos(o) for o in expected]
    given = placed(mesh, s.values, forms, splits)
    pulled = tuple(
        jax.device_put(c, NamedSharding(mesh, spec(forms[o.name], splits))) for o, c in zip(op.signature.outputs, cotangents, strict=True)
    )
    compiled = jax.jit(pull(s.f)).lower(given, pulled).compile()
    outputs, gradients = compiled(given, pulled)
    for o, found, alone in zip(op.signature.outputs, outputs, expected, strict=True):
        np.testing.assert_array_equal(jax.device_get(found), alone)  # to the bit
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec(forms[o.name], splits)), found.ndim)
    close(gradients, jax.vjp(s.loop, s.values)[1](tuple(cotangents))[0])
    needed = set(splits.values())
    summed = [name for name in s.values if {splits[dim] for dim in forms[name] if dim in splits} != needed]
    assert moves(compiled) == ({"all-reduce": len(summed)} if summed else {})


@each_kind
@pytest.mark.parametrize("split", ["batch", "mapped"])
@each_op
def test_vmap(op, split, kind, covers):
    """Over all arguments, where the batch is split, and where the mapped axis is: then nothing is added up over devices."""
    covers("jax", "vmap over a mesh", op.name)
    s, mesh = setting(op), mesh_of(kind, data=4)
    values = {name: jnp.stack([x, x * 0.9, x * 1.1, x]) for name, x in s.values.items()}
    splits, front = (dict.fromkeys(("b", ELLIPSIS), "data"), (None,)) if split == "batch" else ({}, ("data",))
    given = placed(mesh, values, s.forms(), splits, front)
    function, alone = s.derived
    compiled = jax.jit(jax.vmap(function)).lower(given).compile()
    parts = [alone({name: x[i] for name, x in values.items()}) for i in range(4)]
    close(compiled(given), jax.tree.map(lambda *x: np.stack(x), *map(jax.device_get, parts)))
    assert not set(moves(compiled)) - ({"all-reduce"} if split == "batch" else set())


@each_kind
@each_op
def test_shard_map(op, kind, covers):
    covers("jax", "shard_map", op.name)
    s, mesh = setting(op), mesh_of(kind, data=4, model=2)
    forms, splits = s.forms(), splits_of(op)
    outputs = tuple(spec(forms[o.name], splits) for o in op.signature.outputs)

    def local(out):
        return jax.shard_map(s.f, mesh=mesh, in_specs=({name: spec(forms[name], splits) for name in s.values},), out_specs=out)

    given = placed(mesh, s.values, forms, splits)
    close(jax.jit(jax.value_and_grad(loss(local(outputs))))(given), s.gradient(s.values))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(local((PartitionSpec(),) * len(outputs)))(given)


SCAN = ops["selective_scan"]


@each_kind
def test_packed_sequences(kind):
    """Channels can be split, and groups of them with them; each sequence stays whole. Nothing that lacks channels has a gradient."""
    s, mesh = setting(SCAN, "packed", b=1), mesh_of(kind, model=2)
    given = placed(mesh, s.values, s.forms(), {"d": "model", "g": "model"})
    floats = [name for name, x in s.values.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def gradient(f):
        return jax.jit(lambda values: jax.grad(lambda chosen: loss(f)({**values, **chosen}))({name: values[name] for name in floats}))

    compiled = gradient(s.f).lower(given).compile()
    close(compiled(given), gradient(s.loop)(s.values))
    assert not moves(compiled)


def test_what_cannot_be_split_is_whole():
    """On Auto axes: time, and more parts than there are groups. The compiler gathers, and values are right."""
    s = setting(SCAN, "one step", t=3)
    for splits in ({"t": "model"}, {"d": "data"}):
        mesh = mesh_of(AxisType.Auto, data=4, model=1) if "d" in splits else mesh_of(AxisType.Auto, data=1, model=3)
        given = placed(mesh, s.values, s.forms(), splits)
        close(jax.jit(s.f)(given), s.loop(s.values))


def test_errors():
    """On Explicit axes what can't be split is an error that says why."""
    s = setting(SCAN, "one step", t=3)
    forms = s.forms()
    mesh = mesh_of(AxisType.Explicit, data=4, model=2)
    for splits, message in (
        ({"n": "model"}, r"axis 1 of A, d n, is split over model, but only b, d can be"),
        ({"d": "data"}, r"can't be split into \{'d': 4\} parts"),
    ):
        with pytest.raises(ValueError, match=message):
            s.f(placed(mesh, s.values, forms, splits))
    mixed = {**placed(mesh, s.values, forms, {"b": "data"}), **placed(mesh, {"delta": s.values["delta"]}, forms, {"b": "model"})}
    with pytest.raises(ValueError, match=r"axis 0 of delta, b t d, is split over model, but other arguments' b over data"):
        s.f(mixed)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind, data=4, model=2)
        specs = {name: spec(forms[name], {"b": "data"}) for name in s.values}
        out = tuple(spec(forms[o.name], {"b": "data"}) for o in SCAN.signature.outputs)
        partly = jax.shard_map(s.f, mesh=mesh, in_specs=(specs,), out_specs=out, axis_names={"data"})
        with pytest.raises(NotImplementedError, match=r"Manual \(data\) and .* \(model\), but they have to be of one"):
            jax.jit(partly)(s.values)
    mixed_types = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(NotImplementedError, match=r"Auto \(data\) and Explicit \(model\)"):
        s.f(placed(mixed_types, s.values, forms, {"b": "data"}))


def test_interpreter_over_a_mesh():
    """A callback to the host isn't split, and finds its way."""
    if KERNELS != "interpret":
        pytest.skip("needs the interpreter")
    s, mesh = setting(ALL[-1]), mesh_of(AxisType.Auto, data=4)
    given = placed(mesh, s.values, s.forms(), {"b": "data"})
    close(jax.jit(s.kernels)(given), s.loop(s.values))


@each_kind
@pytest.mark.parametrize("split", ["data", "model"])
@each_op
def test_kernels_over_a_mesh(op, split, kind):
    if KERNELS != "triton" or len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    s, mesh = setting(op), mesh_of(kind, "gpu", **{split: 2})
    splits = {dim: axis for dim, axis in splits_of(op).items() if axis == split}
    compiled = jax.jit(jax.value_and_grad(loss(s.kernels))).lower(placed(mesh, s.values, s.forms(), splits)).compile()
    close(compiled(placed(mesh, s.values, s.forms(), splits)), s.gradient(s.values))
    assert not set(moves(compiled)) - {"all-reduce"}
