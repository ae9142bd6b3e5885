"""Ops, and the loops that define them, as JAX functions of one dictionary of arrays; and what JAX makes of the loops."""

import functools
import math

import numpy as np
import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, resized
from own_op import weighted

from bridge.signature import ELLIPSIS, Given

jax = pytest.importorskip("jax")
import jax.numpy as jnp

FRONTEND = next(f for f in FRONTENDS if f.name == "jax")
ALL = [*OPS, weighted]
SIZES = {
    "selective_scan": dict(b=8, t=3, d=4, n=2, g=2),
    "selective_scan_step": dict(b=8, d=4, n=3, g=2),
    "sinkhorn": {ELLIPSIS: (8,), "n": 3},
    "mhc_bwd": {ELLIPSIS: (8,), "n": 3},
    "weighted": dict(b=8, t=3, d=4),
}
CASES = {"selective_scan": "everything", "selective_scan_step": "groups"}


class Setting:
    """An op at small sizes, in float64. `kernels` runs it in the interpreter, `f` by its loop, which stands in the same place as
    far as transforms can see, and takes less time."""

    def __init__(self, op, case=None, **sizes):
        self.op = op
        found = next(c for c in op.cases if c.name == (case or CASES.get(op.name, op.cases[0].name)))
        self.case = resized(found, **{**SIZES[op.name], **sizes})
        self.values = arrays(FRONTEND, self.case, "float64")
        self.inputs = [i for i in op.signature.inputs if i.name in self.values]

    def function(self, function, **more):
        options = {**self.case.options, **({"iters": 3} if "iters" in self.op.options else {})}
        flags = {f"return_{o.name}": True for o in self.op.signature.outputs if o.optional}

        def outputs(values):
            made = function(**values, **options, **flags, **more)
            return made if isinstance(made, tuple) else (made,)

        return outputs

    @functools.cached_property
    def f(self):
        return self.function(FRONTEND.function(self.op), backend="reference")

    @functools.cached_property
    def kernels(self):
        return self.function(FRONTEND.function(self.op), backend=KERNELS)

    @functools.cached_property
    def loop(self):
        return jax.jit(self.function(FRONTEND.reference(self.op)))

    @functools.cached_property
    def gradient(self):
        """The loop's loss and its gradients."""
        return jax.jit(jax.value_and_grad(loss(self.loop)))

    @property
    def derived(self):
        """The gradient of the op's loss, and of the loop's; of an op whose gradient is the loop's anyway, the outputs."""
        if self.op.backward is None:
            return self.f, self.loop
        return jax.grad(loss(self.f)), lambda values: self.gradient(values)[1]

    def forms(self):
        """The dimensions of every input and output in this call."""
        options = [self.case.options.get(name, option.default) for name, option in self.op.options.items()]
        given = {name: Given(x.shape, x.dtype.name) for name, x in self.values.items()}
        return self.op.call([given.get(i.name) for i in self.op.signature.inputs], options).sizes.forms


def mesh_of(kind, platform="cpu", **sizes):
    """A mesh of the devices that the CPU plays."""
    devices = jax.devices(platform)[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def loss(f):
    return lambda values: sum(jnp.sin(o).sum() for o in f(values))


@functools.cache
def setting(op, case=None, **sizes):
    return Setting(op, case, **sizes)


def close(found, expected, rounding=1e-10):
    found, expected = jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(jax.device_get(expected))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
