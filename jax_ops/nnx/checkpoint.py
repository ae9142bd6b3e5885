"""A model's weights under the names and in the order of axes that checkpoints and PyTorch have."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.models import MambaConfig, layout


def state_dict(state: Any) -> dict[str, jax.Array]:
    """Name -> array, of a model or of a state of parameters (what optax keeps for each of them has that form too)."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state, nnx.Param)
    found = {}
    for path, variable in nnx.to_flat_state(state):
        name, turned = layout.name_in_flax(path)
        found[name] = variable[...].T if turned else variable[...]
    return found


def load_state_dict(state: Any, config: MambaConfig, arrays: Mapping[str, Any]) -> Any:
    """A state of the same structure with these arrays (of numpy or JAX) for values, in its dtypes.

    Raises ValueError where names or shapes don't fit.
    """
    arrays = layout.checked(config, arrays)

    def value(path, variable):
        name, turned = layout.name_in_flax(path)
        x = arrays[name]
        if not isinstance(x, jax.Array):  # it may be a tensor's memory, which changes; JAX's own copy is made later, in the background
            x = np.array(x)
        x = jnp.array(x, variable.dtype)
        return variable.replace(x.T if turned else x)

    return nnx.map_state(value, state)
