"""Sequences that are cut over devices: a scan whose time axis is sharded, for use inside shard_map."""

import jax
import jax.numpy as jnp

from bridge import ops
from bridge.ops.selective_scan.over_time import OVER_TIME, before, elapsed
from jax_ops.bind import bind, check
from jax_ops.loops import vary, varying_axes, widen, xp

_scan = bind(ops["selective_scan"])


def selective_scan_over_time(
    x, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, *,
    axis_name, delta_softplus=False, return_final_state=False, backend=None,
):  # fmt: skip
    """selective_scan of a sequence whose steps are split over the mesh axis `axis_name`, in order. To be called inside shard_map.

    Arguments and results are those of selective_scan: what has a time axis holds this device's steps, of which all devices
    have the same number; the rest is the whole. initial_state is the state before the first step of the first device, and
    final_state that behind the last step of the last one; both are the same on all devices. There is no cu_seqlens.

    Each device scans its steps twice, first for the state that they end with. What devices tell each other is that state and
    the sum of the step sizes: n + 1 numbers a channel.

    Raises what selective_scan raises, and NameError for an `axis_name` that is no mesh axis here.
    """
    index, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    check(OVER_TIME, (x, delta, A, B, C, D, z, delta_bias, initial_state, None), (delta_softplus, return_final_state), backend)
    optional = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, "backend": backend}
    # No output is read but the last state, so C can be anything: what is constant in time is read once.
    _, end = _scan(x, delta, A, B, jnp.zeros_like(A), return_final_state=True, **optional)
    time = elapsed(xp, widen(delta), widen(delta_bias), delta_softplus=delta_softplus).astype(end.dtype)
    first = jnp.zeros_like(end) if initial_state is None else widen(initial_state)
    ends, times = jax.lax.all_gather((end, time), axis_name)
    states = before(xp, widen(A), first, ends[:-1], times[:-1])
    axes = varying_axes(*states, end)
    state = jnp.stack([vary(s, axes) for s in states])[index]
    y, last = _scan(x, delta, A, B, C, D, z, initial_state=state, return_final_state=True, **optional)
    if not return_final_state:
        return y
    # A sum rather than a broadcast: its result is known to be the same everywhere.
    return y, jax.lax.psum(jnp.where(index == size - 1, last, 0), axis_name)
