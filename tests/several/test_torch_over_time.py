"""selective_scan_over_time: sequences that are cut over processes, against the same sequence in one."""

import pytest
from common import FRONTENDS, KERNELS, arrays, resized
from torch_processes import COUNT, together

from bridge import ops

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import torch_ops

SCAN = ops["selective_scan"]
CASES = {case.name: case for case in SCAN.cases}
IN_TIME = {"x", "delta", "z", "B", "C"}
FRONTEND = next(f for f in FRONTENDS if f.name == "torch")


def check(rank, name, processes, backend, dtype, tolerance, state):
    """The first `processes` of them hold 1, 2, 3, ... shares of the time."""
    group = dist.new_group(list(range(processes)))
    if rank >= processes:
        with pytest.raises(ValueError, match="not in the group"):
            torch_ops.selective_scan_over_time(*[torch.ones(1)] * 5, group=group)
        return
    case = CASES[name]
    length = [2 * i + 1 for i in range(processes)]
    case = resized(case, b=2, t=sum(length), d=4, n=3, g=2)
    whole = {k: v.cpu().requires_grad_() for k, v in arrays(FRONTEND, case, dtype).items()}
    over_time = {k for k, v in whole.items() if k in IN_TIME and v.dim() > 2}
    mine = {k: (v.split(length, 1)[rank] if k in over_time else v).detach().requires_grad_() for k, v in whole.items()}
    wanted = torch_ops.selective_scan(**whole, **case.options, backend="reference", return_final_state=True)
    cotangents = [torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(i)) for i, w in enumerate(wanted)]
    found = torch_ops.selective_scan_over_time(**mine, **case.options, group=group, backend=backend, return_final_state=state)
    y, *final = found if state else (found,)
    torch.testing.assert_close(y, wanted[0].split(length, 1)[rank], **tolerance)
    for one in final:
        torch.testing.assert_close(one, wanted[1], **tolerance)
    # The final state counts once in the sum of all losses: that of the first process has it.
    loss = (y * cotangents[0].split(length, 1)[rank]).sum() + sum((f * cotangents[1]).sum() * (rank == 0) for f in final)
    total = (wanted[0] * cotangents[0]).sum() + sum((w * cotangents[1]).sum() for w in wanted[1 : 1 + len(final)])
    gradients = dict(zip(mine, torch.autograd.grad(loss, list(mine.values())), strict=True))
    for k, expected in zip(whole, torch.autograd.grad(total, list(whole.values())), strict=True):
        if k in over_time:
            expected = expected.split(length, 1)[rank]
        else:
            dist.all_reduce(gradients[k], group=group)
        torch.testing.assert_close(gradients[k], expected, **tolerance, msg=lambda m, k=k: f"d{k}: {m}")


EXACT, ROUNDED = dict(rtol=1e-10, atol=1e-12), dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("processes", [2, COUNT])
@pytest.mark.parametrize("name", ["everything", "no initial state", "one step", "several segments"])
def test_the_loop(name, processes, covers):
    covers("torch", "time over processes", SCAN.name)
    together(check, name, processes, "reference", "float64", EXACT, True)


def test_without_the_final_state():
    together(check, "base", COUNT, "reference", "float64", EXACT, False)


def test_float32():
    together(check, "everything", COUNT, "reference", "float32", ROUNDED, True)


@pytest.mark.skipif(KERNELS != "interpret", reason="test_torch_gpus has them")
def test_the_kernels(covers):
    covers("torch", "time over processes", SCAN.name)
    together(check, "everything", 2, KERNELS, "float64", EXACT, True)
