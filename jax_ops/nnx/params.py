"""What the modules share: parameters with names for their axes, and the dtypes that they are computed in."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def axes(*names: str | None) -> dict[str, Any]:
    """A parameter's metadata: names that nnx.logical_axis_rules can map to a mesh. Nothing is sharded before somebody asks."""
    return {"out_sharding": names, "eager_sharding": False}


# Up to 1 / sqrt(fan in), as PyTorch's linear layers begin.
narrow = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or float64 if it is that."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
