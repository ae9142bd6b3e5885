"""The ops as PyTorch functions."""

from bridge import ops as _ops
from torch_ops import reference
from torch_ops.bind import bind

selective_scan = bind(_ops["selective_scan"])

__all__ = ["bind", "reference", "selective_scan"]
