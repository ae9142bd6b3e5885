"""PyTorch over several devices: a process for each."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import torch_ops
from torch_ops.frontend import frontend


class Devices:
    """Of arrays that are split a process has its part: that is what is `mine`."""

    ops, frontend = torch_ops, frontend

    def __init__(self):
        device = "cuda" if frontend.gpu else "cpu"
        if frontend.gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if frontend.gpu else "gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device, (self.count, 1), mesh_dim_names=("all", "one"))
        self.all, self.alone = mesh["all"], mesh["one"]

    def part(self, array, axis):
        return array if axis is None else array.chunk(self.count, axis)[self.rank].contiguous()

    mine = part

    def one_device(self, function, values, dy):
        return lambda: self._pull(function, values, dy)

    def over_batch(self, function, mesh, values, axes, dy):
        """A DTensor's op knows how its parts are split, and which gradients are sums over them."""
        placements = {name: [Replicate() if axis is None else Shard(axis)] for name, axis in axes.items()}

        def place(name, part):
            return DTensor.from_local(part, mesh, placements[name], run_check=False)

        def step():
            y, gradients = self._pull(function, {name: place(name, v) for name, v in values.items()}, place("y", dy))
            return y.to_local(), {name: g.redistribute(mesh, placements[name]).to_local() for name, g in gradients.items()}

        return step

    def over_time(self, options, mesh, values, axes, dy):
        group = mesh.get_group()

        def step():
            y, gradients = self._pull(partial(torch_ops.selective_scan_over_time, group=group, **options), values, dy)
            for name, g in gradients.items():
                if axes[name] is None:
                    dist.all_reduce(g, group=group)
            return y, gradients

        return step

    def _pull(self, function, values, dy):
        leaves = {name: v.detach().requires_grad_() for name, v in values.items()}
        y = function(**leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return y.detach(), dict(zip(leaves, gradients, strict=True))

    def wait(self, results):
        frontend.wait(results)

    def meet(self):
        dist.barrier()

    def most(self, number: float) -> float:
        """The largest that any process has."""
        found = frontend.array(number, "float64")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def carries(self, size: float) -> float:
        """An all-gather, and for its gradient an all-reduce of all that was gathered."""
        return 3 * (self.count - 1) * size

    def close(self):
        dist.destroy_process_group()
