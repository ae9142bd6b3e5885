"""Models on top of the ops, as Flax NNX modules. torch_ops.nn has the same ones for PyTorch.

In shapes b is the batch, t time, m the model's width, d the inner width, n the states of a channel, k the convolution's width,
v the vocabulary (bridge.models.MambaConfig says where they come from).

`param_dtype` is what parameters are kept in, `dtype` what is computed in (None: what inputs and parameters promote to).
Parameters carry names for their axes, which nnx.logical_axis_rules maps to those of a mesh: vocab, embed (m), inner (d).
"""

from bridge.models import MambaConfig
from jax_ops.nnx.checkpoint import load_state_dict, state_dict
from jax_ops.nnx.lm import MambaLM
from jax_ops.nnx.mamba import MambaBlock, MambaCache
from jax_ops.nnx.mixing import SinkhornMixing

__all__ = ["MambaBlock", "MambaCache", "MambaConfig", "MambaLM", "SinkhornMixing", "load_state_dict", "state_dict"]
