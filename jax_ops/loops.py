"""The references as JAX runs them: the array namespace and the scan that they are written in."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from bridge.dtypes import wide
from bridge.op import FUNCTIONS, Op


def varying_axes(*arrays: jax.Array) -> frozenset:
    """The mesh axes that any of the arrays varies over, inside shard_map."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset) -> jax.Array:
    """x, marked as varying over these mesh axes."""
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _repeat(count: int, step, x):
    return jax.lax.scan(lambda x, _: (step(x), None), x, length=count)[0]


xp = SimpleNamespace(
    **{name: getattr(jnp, name) for name in FUNCTIONS},
    arange=lambda count, like: vary(jnp.arange(count, dtype=like.dtype), varying_axes(like)),
    max=jnp.max,
    put=lambda x, index, rows: x.at[index].set(rows),
    repeat=_repeat,
    stop_gradient=jax.lax.stop_gradient,
    zeros=lambda shape, like: vary(jnp.zeros(shape, like.dtype), varying_axes(like)),
)


def scan(step, carry, xs):
    """Run `step` over the second axis of each of `xs`; memory of a backward pass grows with the square root of its length:
    stretches of about sqrt(t) steps are checkpointed."""
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in xs)
    steps = xs[0].shape[0]
    stretch = max(math.isqrt(max(steps - 1, 0)) + 1, 1)
    whole = steps - steps % stretch

    def several(carry, now):
        return jax.lax.scan(step, carry, now)

    stretches = tuple(x[:whole].reshape(whole // stretch, stretch, *x.shape[1:]) for x in xs)
    carry, out = jax.lax.scan(jax.checkpoint(several), carry, stretches)
    carry, last = several(carry, tuple(x[whole:] for x in xs))
    out = jnp.concatenate([out.reshape(whole, *out.shape[2:]), last])
    return carry, jnp.moveaxis(out, 0, 1)


def run(op: Op, inputs, options) -> tuple[jax.Array, ...]:
    """The op by its loop. Arithmetic is done in float32 (float64 for float64), results have the op's dtypes."""
    dtypes = {i.name: x.dtype.name for i, x in zip(op.signature.inputs, inputs, strict=True) if x is not None}
    outputs = op.reference(xp, scan, *map(widen, inputs), **dict(zip(op.options, options, strict=True)))
    return tuple(value.astype(o.dtype(dtypes)) for o, value in zip(op.signature.outputs, outputs, strict=True))


def gradients(op: Op, inputs, options, cotangents, needs) -> list[jax.Array | None]:
    """The gradients of the inputs that `needs` marks, by the loop; None for the others."""
    if op.reference_backward is not None:
        wider = tuple(map(widen, cotangents))
        found = op.reference_backward(xp, scan, tuple(map(widen, inputs)), wider, **dict(zip(op.options, options, strict=True)))
        if found is not None:
            return [g.astype(x.dtype) if need else None for g, x, need in zip(found, inputs, needs, strict=True)]

    def loop(*wanted):
        rest = iter(wanted)
        return run(op, [next(rest) if need else x for x, need in zip(inputs, needs, strict=True)], options)

    pulled = iter(jax.vjp(loop, *(x for x, need in zip(inputs, needs, strict=True) if need))[1](tuple(cotangents)))
    return [next(pulled) if need else None for need in needs]


def floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def widen(x: jax.Array | None) -> jax.Array | None:
    return x if x is None or not floating(x) else x.astype(wide(x.dtype.name))
