"""The loops that define the ops, as plain PyTorch functions, differentiated by autograd.

For reading, for checking, and for everything that a loop of ordinary operations can do (forward mode, say). They take
the arguments of the ops but for `backend`.
"""

from collections.abc import Callable
from typing import Any

from bridge import ops
from bridge.op import Op
from torch_ops import loops


def function(op: Op) -> Callable[..., Any]:
    """The reference of an op with the op's own arguments and results."""
    return op.loop(__name__, loops.run)


globals().update({name: function(op) for name, op in ops.items()})
__all__ = ["function", *ops]
