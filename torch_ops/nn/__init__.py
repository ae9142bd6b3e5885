"""Models on top of the ops, as PyTorch modules. jax_ops.nnx has the same ones for Flax.

In shapes b is the batch, t time, m the model's width, d the inner width, n the states of a channel, k the convolution's width,
v the vocabulary (bridge.models.MambaConfig says where they come from).
"""

from bridge.models import MambaConfig
from torch_ops.nn.lm import MambaLM
from torch_ops.nn.mamba import MambaBlock, MambaCache
from torch_ops.nn.mixing import SinkhornMixing

__all__ = ["MambaBlock", "MambaCache", "MambaConfig", "MambaLM", "SinkhornMixing"]
