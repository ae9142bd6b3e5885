"""The ops as PyTorch functions."""

import torch

from bridge import ops as _ops
from bridge.ops.selective_scan_step.op import UPDATES as _UPDATES
from bridge.ops.selective_scan_step.op import selective_scan_step_ as _step_
from bridge.version import require as _require

_require("torch", ">=2.11", "pip install 'torch>=2.11'")

from torch_ops import reference
from torch_ops.bind import bind
from torch_ops.in_place import bind_in_place
from torch_ops.over_time import selective_scan_over_time

selective_scan = bind(_ops["selective_scan"])
selective_scan_step = bind(_ops["selective_scan_step"])
selective_scan_step_ = bind_in_place(_step_, _UPDATES)
sinkhorn = bind(_ops["sinkhorn"])
mhc_bwd = bind(_ops["mhc_bwd"])


def sinkhorn_forward(M, iters=20):
    """R and P: P = exp(M), and R = P made doubly stochastic, by columns and then rows, `iters` times. M: ... n n."""
    return sinkhorn(M, iters=iters), torch.exp(M)


__all__ = [
    "bind", "mhc_bwd", "reference", "selective_scan", "selective_scan_over_time", "selective_scan_step", "selective_scan_step_",
    "sinkhorn", "sinkhorn_forward",
]  # fmt: skip
