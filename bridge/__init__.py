"""One Triton kernel, described once, usable from PyTorch and from JAX."""

from bridge.op import Call, Op
from bridge.ops import ops
from bridge.plan import Launch, Plan
from bridge.signature import Array, Signature

__version__ = "0.1.0"
__all__ = ["Array", "Call", "Launch", "Op", "Plan", "Signature", "__version__", "ops"]
