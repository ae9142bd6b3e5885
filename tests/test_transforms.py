"""The transforms of each framework that a user meets first, on every backend, against the same transform of the loop."""

import numpy as np
import pytest
from common import BACKENDS, FRONTENDS, OPS, arrays, by_name, resized

SMALL = {
    "selective_scan": dict(b=2, t=4, d=3, n=2),
    "selective_scan_step": dict(b=2, d=3, n=2),
    "sinkhorn": {"...": (2,), "n": 3},
    "mhc_bwd": {"...": (2,), "n": 3},
}
ROUNDING = {"rtol": 1e-9, "atol": 1e-9}  # second derivatives through divisions lose some digits


@pytest.fixture(params=FRONTENDS, ids=by_name)
def frontend(request):
    return request.param


class Setting:
    """An op and its loop as functions of positional arrays, and arrays for them."""

    def __init__(self, frontend, op, backend):
        case = resized(op.cases[0], **SMALL[op.name])
        options = {**case.options, "iters": 4} if "iters" in op.options else case.options
        flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
        inputs = arrays(frontend, case, "float64")
        self.frontend, self.names, self.values = frontend, list(inputs), list(inputs.values())
        self.everywhere = tuple(range(len(self.values)))

        def call(function, **more):
            def positional(*values):
                made = function(**dict(zip(self.names, values, strict=True)), **options, **flags, **more)
                return made if isinstance(made, tuple) else (made,)

            return positional

        self.op, self.loop = call(frontend.function(op), backend=backend), call(frontend.reference(op))
        # What has the batch is mapped, the weights are shared; or all is mapped, or one argument only.
        self.with_batch = tuple(0 if with_batch_in(op, i) else None for i in op.signature.inputs if i.name in inputs)
        first_only = (0, *(None for _ in self.values[1:]))
        self.mappings = {self.with_batch, first_only, (0,) * len(self.values)}

    def check(self, transform):
        found, expected = transform(self.op), transform(self.loop)
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(self.frontend.numpy(one), self.frontend.numpy(other), **ROUNDING)

    def mapped(self, mapping):
        scales = self.frontend.array(np.array([1.0, 0.9, 1.2]), "float64")
        return [
            x if axis is None else (scales.reshape(-1, *[1] * len(x.shape)) * x[None]) for x, axis in zip(self.values, mapping, strict=True)
        ]


def with_batch_in(op, argument):
    return any(op.batch in dim.split("|") for dim in argument.forms[0])


def flat(tree):
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in flat(part)]
    return [tree]


# The gradient of an op without a backward pass goes through its loop on every backend.
JOBS = [(op, backend) for op in OPS for backend in (BACKENDS if op.backward else BACKENDS[:1])]


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_transforms(frontend, op, backend, covers):
    s = Setting(frontend, op, backend)
    for transform in ("grad", "jacrev", "grad of grad", "vmap", "vmap of grad", "grad of vmap"):
        covers(frontend.name, transform, op.name)
    if frontend.name == "torch":
        import torch
        from torch.func import grad, jacrev
        from torch.func import vmap as mapping

        def sines(outputs):
            return sum(torch.sin(o).sum() for o in outputs)
    else:
        import jax
        import jax.numpy as jnp
        from jax import vmap as mapping

        # Compiled as one program, as users would: one operation at a time, each would be compiled for itself.
        def grad(*args):
            return jax.jit(jax.grad(*args))

        def jacrev(*args):
            return jax.jit(jax.jacrev(*args))

        def sines(outputs):
            return sum(jnp.sin(o).sum() for o in outputs)

        covers(frontend.name, "jit", op.name)
        s.check(lambda f: flat(jax.jit(f)(*s.values)))
        s.check(lambda f: flat(grad(lambda *v: sines(jax.checkpoint(f)(*v)), s.everywhere)(*s.values)))
        s.check(lambda f: flat(jax.lax.scan(lambda c, _: (c, f(*c)), tuple(s.values), None, length=2)[1]))

    s.check(lambda f: flat(grad(lambda *v: sines(f(*v)), s.everywhere)(*s.values)))
    s.check(lambda f: flat(jacrev(f, s.everywhere)(*s.values)))
    s.check(lambda f: flat(grad(lambda *v: sines(grad(lambda *w: sines(f(*w)), s.everywhere)(*v)), s.everywhere)(*s.values)))
    none = [x if axis is None else x[None][:0] for x, axis in zip(s.values, s.with_batch, strict=True)]  # an axis of length 0
    assert [tuple(o.shape) for o in mapping(s.op, s.with_batch)(*none)] == [(0, *o.shape) for o in s.op(*s.values)]
    for axes in s.mappings:
        values = s.mapped(axes)
        s.check(lambda f, axes=axes, values=values: flat(mapping(f, axes)(*values)))
        s.check(lambda f, axes=axes, values=values: flat(mapping(grad(lambda *v: sines(f(*v)), s.everywhere), axes)(*values)))
        s.check(lambda f, axes=axes, values=values: flat(grad(lambda *v: sines(mapping(f, axes)(*v)), s.everywhere)(*values)))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_shard_map(op, covers):
    """Over the batch: the gradient of weights is summed over it, and a wrong out_specs is an error."""
    jax = pytest.importorskip("jax")
    frontend = next((f for f in FRONTENDS if f.name == "jax"), None)
    if frontend is None or len(jax.devices()) < 2:
        pytest.skip("needs JAX with two devices")
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    covers("jax", "shard_map", op.name)
    s = Setting(frontend, op, None)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    given = [i for i in op.signature.inputs if i.name in s.names]
    specs = tuple(PartitionSpec("data") if with_batch_in(op, i) else PartitionSpec() for i in given)

    def sharded(f, out):
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)

    def loss(f):
        return lambda *values: sum(jnp.sin(o).sum() for o in f(*values))

    good = (PartitionSpec("data"),) * len(op.output_names)
    found = jax.jit(jax.grad(loss(sharded(s.op, good)), s.everywhere))(*s.values)
    expected = jax.grad(loss(s.loop), s.everywhere)(*s.values)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **ROUNDING)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(sharded(s.op, (PartitionSpec(),) * len(op.output_names)))(*s.values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_torch_compile_and_opcheck(op, backend):
    torch = pytest.importorskip("torch")
    frontend = next((f for f in FRONTENDS if f.name == "torch"), None)
    if frontend is None:
        pytest.skip("needs torch")
    s = Setting(frontend, op, backend)
    leaves = [v.requires_grad_() for v in s.values]

    def loss(*values):
        return sum(torch.sin(o).sum() for o in s.op(*values))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves), leaves)
    for one, other in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, other)
    packet = getattr(torch.ops.kernel_bridge, f"{op.name}_forward").default
    given = dict(zip(s.names, leaves, strict=True))
    case = op.cases[0]
    options = [case.options.get(name, option.default) for name, option in op.options.items()]
    for values in (given, {k: v.detach().movedim(0, -1).contiguous().movedim(-1, 0) for k, v in given.items()}):
        torch.library.opcheck(packet, (*(values.get(i.name) for i in op.signature.inputs), *options, backend, True))
