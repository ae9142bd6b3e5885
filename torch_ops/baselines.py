"""What else computes the ops in PyTorch: each found by importing it, none needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config

from bridge.frontend import Baseline, plain_scan
from bridge.op import Call, Op
from torch_ops.reference import function as reference

STEPS = 4096  # that a loop over time is timed for: each starts kernels of its own


def of(op: Op) -> list[Baseline]:
    """Those of an op that are installed."""
    found = [make(op) for make in MAKERS.get(op.name, ())]
    return [baseline for baseline in found if baseline is not None]


def mamba_ssm(op: Op) -> Baseline | None:
    """Its CUDA kernels. They want time last and A in float32; changing the layout isn't timed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return None

    def function(x, delta, A, B, C, **rest):
        return selective_scan_fn(x, delta, A, B, C, **rest)

    def enter(name: str, array: torch.Tensor) -> torch.Tensor:
        return array.movedim(1, -1).contiguous() if array.dim() > 2 else array.float()

    def leave(array: torch.Tensor) -> torch.Tensor:
        return array.movedim(-1, 1) if array.dim() > 2 else array

    return Baseline("mamba_ssm", function, enter, leave, plain_scan)


def flag_gems(op: Op) -> Baseline | None:
    try:
        from flag_gems.fused.mhc.mhc_bwd import mhc_bwd
    except ImportError:
        return None

    def refuse(call: Call) -> str | None:
        return None if len(call.sizes.leading) == 1 else "takes one leading dimension"

    return Baseline("flag_gems", mhc_bwd, refuse=refuse)


def compiled(op: Op) -> Baseline:
    """torch.compile of the reference. Calls are timed more than once on one graph, so nothing of it may be given away."""
    config.donated_buffer = False
    return Baseline("torch.compile", torch.compile(reference(op), dynamic=False))


def compiled_step(op: Op) -> Baseline:
    """torch.compile of one step, in a loop: it unrolls loops, and one over time is too long for that."""
    config.donated_buffer = False

    @torch.compile(dynamic=False)
    def step(h, x, delta, A, B, C):
        h = torch.exp(delta[:, :, None] * A) * h + (delta * x)[:, :, None] * B[:, None]
        return h, (h * C[:, None]).sum(-1)

    def function(x, delta, A, B, C):
        wide, ys = [M.float() for M in (x, delta, A, B, C)], []
        A, h = wide.pop(2), x.new_zeros((x.shape[0], *A.shape), dtype=torch.float32)
        for now in zip(*(M.unbind(1) for M in wide), strict=True):
            h, y = step(h, now[0], now[1], A, *now[2:])
            ys.append(y)
        return torch.stack(ys, 1).to(x.dtype)

    def refuse(call: Call) -> str | None:
        return plain_scan(call) or (f"more than {STEPS} steps, each a kernel" if call.sizes["t"] > STEPS else None)

    return Baseline("torch.compile of a step", function, refuse=refuse)


MAKERS: dict[str, tuple[Callable[[Op], Any], ...]] = {
    "selective_scan": (mamba_ssm, compiled_step),
    "sinkhorn": (compiled,),
    "mhc_bwd": (flag_gems, compiled),
}
