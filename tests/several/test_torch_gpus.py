"""The kernels on two GPUs: a batch or channels that are split, a time that is, and a model that is sharded."""

import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, by_name, resized
from own_op import weighted
from torch_processes import together

pytest.importorskip("torch")
import test_torch_parallel as parallel
import torch
import torch.distributed as dist
from test_torch_sharding import BY_NAME, ELLIPSIS, case_of, draw, forms_of, function, places
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, distribute_tensor, init_device_mesh

import torch_ops

pytestmark = pytest.mark.skipif(KERNELS != "triton" or torch.cuda.device_count() < 2, reason="needs two GPUs")
FRONTEND = next(f for f in FRONTENDS if f.name == "torch")
CLOSE = dict(rtol=1e-4, atol=1e-4)


def check_split(rank, op_name, dim):
    op, mesh = BY_NAME[op_name], init_device_mesh("cuda", (2,))
    case = case_of(op, "everything" if op_name == "selective_scan" else op.cases[0].name)
    call, whole = function(op, case, None), {k: v.requires_grad_() for k, v in arrays(FRONTEND, case, "float32").items()}
    forms, split = forms_of(op, case, whole), (dim,)
    split_up = {k: distribute_tensor(v.detach(), mesh, places(forms[k], split)).requires_grad_() for k, v in whole.items()}
    wanted = call(whole)
    cotangents = [c.to(w) for c, w in zip(draw(wanted_on_cpu(wanted)), wanted, strict=True)]
    found = call(split_up)
    placed = [distribute_tensor(c, mesh, o.placements) for c, o in zip(cotangents, found, strict=True)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, **CLOSE)
    gradients = torch.autograd.grad(found, list(split_up.values()), placed)
    for k, one, other in zip(whole, gradients, torch.autograd.grad(wanted, list(whole.values()), cotangents), strict=True):
        assert one.placements == places(forms[k], split, Partial), k
        torch.testing.assert_close(one.full_tensor(), other, **CLOSE)


def wanted_on_cpu(wanted):
    return [w.detach().cpu() for w in wanted]


SPLITS = [(op.name, dim) for op in (*OPS, weighted) for dim in (("b", "d") if op.channels else (ELLIPSIS,))]


@pytest.mark.parametrize(("op", "dim"), SPLITS, ids=by_name)
def test_dtensor(op, dim):
    together(check_split, op, dim, gpus=True)


def check_time(rank):
    op = BY_NAME["selective_scan"]
    case = resized(case_of(op, "everything"), b=2, t=600, d=8, n=4)
    whole = {k: v.requires_grad_() for k, v in arrays(FRONTEND, case, "float32").items()}
    over_time = {k for k, v in whole.items() if v.dim() > 2 and v.shape[1] == 600}
    mine = {k: (v.split([250, 350], 1)[rank] if k in over_time else v).detach().requires_grad_() for k, v in whole.items()}
    wanted = torch_ops.selective_scan(**whole, **case.options)
    y = torch_ops.selective_scan_over_time(**mine, **case.options)
    torch.testing.assert_close(y, wanted.split([250, 350], 1)[rank], **CLOSE)
    found = torch.autograd.grad(torch.sin(y).sum(), list(mine.values()))
    expected = torch.autograd.grad(torch.sin(wanted).sum(), list(whole.values()))
    for k, one, other in zip(whole, found, expected, strict=True):
        if k in over_time:
            other = other.split([250, 350], 1)[rank]
        else:
            dist.all_reduce(one)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda m, k=k: f"d{k}: {m}")


def test_time():
    together(check_time, gpus=True)


def check_model(rank):
    model, data = parallel.make(backend=None)
    model, data = model.cuda(), data.cuda()
    one, _ = parallel.make(backend=None)
    one = one.cuda()
    parallel.step(one, data)
    mesh = init_device_mesh("cuda", (2,))
    for mixer in model.mixers:
        fully_shard(mixer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parallel.step(model, data.chunk(2)[rank])
    for sharded, whole in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_fully_sharded():
    together(check_model, gpus=True)
