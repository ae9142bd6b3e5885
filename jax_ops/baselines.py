"""What else computes the ops in JAX."""

import jax
import jax.numpy as jnp

from bridge.frontend import Baseline, plain_scan
from bridge.op import Call, Op
from jax_ops.reference import function as reference

STEPS = 8192  # that a loop over time is timed for: each starts kernels of its own
STATES = 2**30  # that are kept at a time: 4 GiB an array


def of(op: Op) -> list[Baseline]:
    loop = Baseline("jax.lax.scan", reference(op), refuse=too_long)
    return [loop, Baseline("jax.lax.associative_scan", associative_scan, refuse=too_large)] if op.name == "selective_scan" else [loop]


def too_long(call: Call) -> str | None:
    return f"more than {STEPS} steps, each several kernels" if call.sizes.get("t", 1) > STEPS else None


def too_large(call: Call) -> str | None:
    if reason := plain_scan(call):
        return reason
    states = call.sizes["b"] * call.sizes["t"] * call.sizes["d"] * call.sizes["n"]
    return f"would keep more than {STATES} states at a time" if states > STATES else None


def associative_scan(x, delta, A, B, C):
    """The scan over pairs of a decay and an input, all states at once: b t d n."""
    dtype = x.dtype
    x, delta, A, B, C = (M.astype(jnp.float32) for M in (x, delta, A, B, C))
    pairs = jnp.exp(delta[..., None] * A), (delta * x)[..., None] * B[:, :, None]
    _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), pairs, axis=1)
    return jnp.sum(h * C[:, :, None], -1).astype(dtype)
