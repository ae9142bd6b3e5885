"""The ops as JAX functions."""

from bridge import ops as _ops
from jax_ops import reference
from jax_ops.bind import bind

selective_scan = bind(_ops["selective_scan"])

__all__ = ["bind", "reference", "selective_scan"]
