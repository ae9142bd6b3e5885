"""One Triton kernel, described once, usable from PyTorch and from JAX."""

from bridge.version import __version__, require

require("triton", ">=3.6", "pip install 'triton>=3.6'")

from bridge.op import Call, Op
from bridge.ops import ops
from bridge.plan import Launch, Plan
from bridge.signature import Array, Signature

__all__ = ["Array", "Call", "Launch", "Op", "Plan", "Signature", "__version__", "ops"]
