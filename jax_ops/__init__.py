"""The ops as JAX functions."""

import jax.numpy as jnp

from bridge import ops as _ops
from bridge.version import require as _require

_require("jax", ">=0.10,<0.12", "jax-triton up to 0.4.1 has no kernels under 0.12: pip install 'jax>=0.10,<0.12'")

from jax_ops import reference
from jax_ops.bind import bind
from jax_ops.over_time import selective_scan_over_time

selective_scan = bind(_ops["selective_scan"])
selective_scan_step = bind(_ops["selective_scan_step"])
sinkhorn = bind(_ops["sinkhorn"])
mhc_bwd = bind(_ops["mhc_bwd"])


def sinkhorn_forward(M, iters=20):
    """R and P: P = exp(M), and R = P made doubly stochastic, by columns and then rows, `iters` times. M: ... n n."""
    return sinkhorn(M, iters=iters), jnp.exp(M)


__all__ = [
    "bind", "mhc_bwd", "reference", "selective_scan", "selective_scan_over_time", "selective_scan_step", "sinkhorn", "sinkhorn_forward",
]  # fmt: skip
