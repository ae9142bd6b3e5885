"""A model with every op inside, its data and parameters spread over processes, against the same model in one process."""

import pytest
from common import KERNELS, OPS
from own_op import weighted
from torch_processes import COUNT, together

pytest.importorskip("torch")
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint

import torch_ops

B, T, D, N, WIDTH = 2, 3, 4, 2, 6  # a process's share of the batch; steps, channels, states; the model's width


class Mixer(nn.Module):
    def __init__(self, recompute, backend):
        super().__init__()
        self.recompute, self.backend = recompute, backend
        self.into, self.out = nn.Linear(WIDTH, D), nn.Linear(D, WIDTH)
        self.select = nn.Linear(WIDTH, 2 * N)
        self.step = nn.Linear(WIDTH, D)
        self.A, self.D = Parameter(-torch.rand(D, N)), Parameter(torch.rand(D))
        self.bias, self.scale = Parameter(torch.rand(D)), Parameter(torch.rand(D))

    def forward(self, hidden):
        B, C = self.select(hidden).chunk(2, -1)
        x, delta = torch_ops.bind(weighted)(self.into(hidden), self.scale, backend=self.backend), self.step(hidden)
        arguments = x, delta, self.A, B, C, self.D
        y = checkpoint(self.scan, *arguments, use_reentrant=False) if self.recompute else self.scan(*arguments)
        state, now = x[:, 0, :, None] * self.A, (x[:, -1], delta[:, -1], self.A, B[:, -1], C[:, -1])
        return self.out(y + torch_ops.selective_scan_step(state, *now, backend=self.backend)[0][:, None])

    def scan(self, x, delta, A, B, C, D):
        return torch_ops.selective_scan(x, delta, A, B, C, D, delta_bias=self.bias, delta_softplus=True, backend=self.backend)


class Model(nn.Module):
    """Streams that are mixed by a doubly stochastic matrix."""

    def __init__(self, recompute=False, backend="reference"):
        super().__init__()
        self.backend, self.mixers = backend, nn.ModuleList(Mixer(recompute, backend) for _ in range(2))
        self.streams = Parameter(torch.randn(2, 2))

    def forward(self, hidden):
        mixing = torch_ops.sinkhorn(self.streams, iters=3, backend=self.backend)
        mixing = mixing + torch_ops.mhc_bwd(mixing, self.streams, backend=self.backend)
        first, second = hidden, hidden
        for mixer in self.mixers:
            mixed = mixing[0, 0] * first + mixing[0, 1] * second
            first, second = mixed + mixer(mixed), mixing[1, 0] * first + mixing[1, 1] * second
        return first + second


@pytest.fixture
def note(covers):
    """What a test shows for the ops, all of which the model has."""

    def of_all(transform):
        for op in (*OPS, weighted):
            covers("torch", transform, op.name)

    return of_all


def make(**options):
    torch.manual_seed(0)
    return Model(**options).double(), torch.randn(COUNT * B, T, WIDTH, dtype=torch.float64)


def compare(model, found, tolerance=None):
    """The gradients of `model`, however they lie, against those of one process."""
    one, data = make()
    torch.sin(one(data)).mean().backward()
    for (name, expected), parameter in zip(one.named_parameters(), found.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, expected.grad, **(tolerance or {}), msg=lambda m, name=name: f"{name}: {m}")


def step(model, data):
    torch.sin(model(data)).mean().backward()


def check_data_parallel(rank, options, static):
    model, data = make(**options)
    parallel = DistributedDataParallel(model, static_graph=static)
    step(parallel, data.split(B)[rank])
    compare(model, parallel)


@pytest.mark.parametrize(("options", "static"), [({}, False), ({"recompute": True}, True)], ids=["plain", "checkpointed"])
def test_data_parallel(options, static, note):
    note("DDP")
    together(check_data_parallel, options, static)


def check_fully_sharded(rank, options, shape, precision):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, data = make(**options)
    policy = MixedPrecisionPolicy(torch.float32, torch.float64) if precision else MixedPrecisionPolicy()
    for mixer in model.mixers:
        fully_shard(mixer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    step(model, data.split(B)[rank])
    compare(model, model, dict(rtol=1e-4, atol=1e-5) if precision else None)


@pytest.mark.parametrize(
    ("options", "shape", "precision"),
    [({}, (COUNT,), False), ({"recompute": True}, (2, 2), False), ({}, (COUNT,), True), ({"backend": "interpret"}, (COUNT,), False)],
    ids=["plain", "checkpointed, replicated", "float32", "kernels"],
)
def test_fully_sharded(options, shape, precision, note):
    if options.get("backend") == "interpret" != KERNELS:
        pytest.skip("test_torch_gpus has the kernels")
    note("FSDP2")
    together(check_fully_sharded, options, shape, precision)


def check_channels_and_parameters(rank):
    """Channels over two processes, and over two such pairs parameters and data: what a large model does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "channels"))
    model, data = make()
    channels = mesh["channels"]
    for mixer in model.mixers:
        split_channels(mixer, channels)
        fully_shard(mixer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    step(model, data.split(2 * B)[rank // 2])
    compare(model, model)


def split_channels(mixer, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(input_layouts=Shard(-1))
    whole = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(mixer, mesh, {"into": columns, "step": columns, "select": whole, "out": rows})
    for name in ("A", "D", "bias", "scale"):
        setattr(mixer, name, Parameter(distribute_tensor(getattr(mixer, name).detach(), mesh, [Shard(0)])))


def test_channels_and_parameters(note):
    note("tensor parallel")
    together(check_channels_and_parameters)
