"""Sequences that are cut over processes: a scan whose time axis is split over a process group."""

import torch
import torch.distributed as dist

from bridge import ops
from bridge.ops.selective_scan.over_time import OVER_TIME, before, elapsed
from torch_ops.bind import bind
from torch_ops.loops import widen, xp
from torch_ops.tensors import check

_scan = bind(ops["selective_scan"])


def selective_scan_over_time(
    x, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, *,
    group=None, delta_softplus=False, return_final_state=False, backend=None,
):  # fmt: skip
    """selective_scan of a sequence whose steps are split over the processes of `group` (all processes, if None), in the order
    of their ranks in it. All of them call it, and all of them go backward.

    Arguments and results are those of selective_scan: what has a time axis holds this process's steps, of which processes
    can have different numbers; the rest is the whole. initial_state is the state before the first step of the first process,
    and final_state that behind the last step of the last one; both are the same on all processes. There is no cu_seqlens.

    Gradients are those of the sum of all processes' losses. Of what has a time axis they are complete; of A, D, delta_bias,
    initial_state, and B or C that are constant in time each process gets its part: their sum over the group is the gradient.

    Each process scans its steps twice, first for the state that they end with. What processes tell each other is that state
    and the sum of the step sizes: n + 1 numbers a channel.

    Raises what selective_scan raises, and ValueError where there is no process group, or this process is not in it.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("selective_scan_over_time: this process is not in the group")
    # All of it before the first exchange: a process that raises later leaves others waiting.
    check(OVER_TIME, (x, delta, A, B, C, D, z, delta_bias, initial_state, None), (delta_softplus, return_final_state), backend)
    optional = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, "backend": backend}
    # No output is read but the last state, so C can be anything: what is constant in time is read once.
    _, end = _scan(x, delta, A, B, torch.zeros_like(A), return_final_state=True, **optional)
    time = elapsed(xp, widen(delta), widen(delta_bias), delta_softplus=delta_softplus).to(end.dtype)
    *told, _ = _Gather.apply(torch.cat((end, time[..., None]), -1), group)
    first = torch.zeros_like(end) if initial_state is None else widen(initial_state)
    states = before(xp, widen(A), first, [t[..., :-1] for t in told], [t[..., -1] for t in told])
    # The first process needs nothing of what it was told: it takes part in the exchange of gradients all the same.
    state = torch.stack(states)[rank]
    y, last = _scan(x, delta, A, B, C, D, z, initial_state=state, return_final_state=True, **optional)
    if not return_final_state:
        return y
    return y, _Gather.apply(last, group)[-1]


class _Gather(torch.autograd.Function):
    """(array, group) -> that of each process"""

    @staticmethod
    def forward(ctx, array, group):
        ctx.group = group
        array = array.contiguous()
        gathered = [torch.empty_like(array) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, array, group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *gradients):
        return _Sum.apply(torch.stack(gradients), ctx.group)[dist.get_rank(ctx.group)], None


class _Sum(torch.autograd.Function):
    """(array, group) -> the sum of the processes' arrays"""

    @staticmethod
    def forward(ctx, array, group):
        ctx.group, total = group, array.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _Sum.apply(gradient.contiguous(), ctx.group), None
