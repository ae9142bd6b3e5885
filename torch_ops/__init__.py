"""The ops as PyTorch functions."""

import torch

from bridge import ops as _ops
from bridge.version import require as _require

_require("torch", ">=2.11", "pip install 'torch>=2.11'")

from torch_ops import reference
from torch_ops.bind import bind

selective_scan = bind(_ops["selective_scan"])
sinkhorn = bind(_ops["sinkhorn"])
mhc_bwd = bind(_ops["mhc_bwd"])


def sinkhorn_forward(M, iters=20):
    """R and P: P = exp(M), and R = P made doubly stochastic, by columns and then rows, `iters` times. M: ... n n."""
    return sinkhorn(M, iters=iters), torch.exp(M)


__all__ = ["bind", "mhc_bwd", "reference", "selective_scan", "sinkhorn", "sinkhorn_forward"]
