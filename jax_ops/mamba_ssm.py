"""The scan under the name and in the layouts of the mamba-ssm package: time last."""

import jax.numpy as jnp

import jax_ops
from bridge.ops.selective_scan.mamba_ssm import TIME_LAST
from jax_ops.bind import check


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """y, and with return_last_state the state behind the last step.

    u, delta, z, y: b d t. A: d n. B and C: b n t or b g n t, or d n where they are constant in time. D, delta_bias: d.
    last_state: b d n, float32 (float64 when u is). y has u's dtype.
    """
    inputs, _, _ = check(TIME_LAST, (u, delta, A, B, C, D, z, delta_bias), (delta_softplus, return_last_state))
    u, delta, A, B, C, D, z, delta_bias = inputs
    made = jax_ops.selective_scan(
        _time_second(u), _time_second(delta), A, _time_second(B), _time_second(C), D, _time_second(z), delta_bias,
        delta_softplus=delta_softplus, return_final_state=return_last_state,
    )  # fmt: skip
    y, *state = made if return_last_state else (made,)
    return (jnp.moveaxis(y, 1, -1), *state) if state else jnp.moveaxis(y, 1, -1)


def _time_second(x):
    return jnp.moveaxis(x, -1, 1) if x is not None and x.ndim > 2 else x
