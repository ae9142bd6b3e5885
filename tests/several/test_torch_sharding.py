"""DTensors: what is split along batch or channels stays where it is, and what comes out is what one process gets."""

import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, by_name, resized
from own_op import weighted
from torch_processes import COUNT, together

pytest.importorskip("torch")
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import torch_ops
from bridge.signature import ELLIPSIS
from torch_ops.tensors import describe

FRONTEND = next(f for f in FRONTENDS if f.name == "torch")
BY_NAME = {op.name: op for op in (*OPS, weighted)}
SIZES = {
    "selective_scan": dict(b=4, t=3, d=8, n=2, g=4),
    "selective_scan_step": dict(b=4, d=8, n=3, g=4),
    "sinkhorn": {ELLIPSIS: (4,), "n": 3},
    "mhc_bwd": {ELLIPSIS: (4,), "n": 3},
    "weighted": dict(b=4, t=3, d=8),
}
# What each axis of a mesh of 2 x 2 splits.
SPLITS = [("b", "d"), ("d", "d"), ("b", None), ("d", "b")]
LEADING = [(ELLIPSIS, ELLIPSIS), (None, ELLIPSIS)]


def case_of(op, name):
    return resized(next(case for case in op.cases if case.name == name), **SIZES[op.name])


def drawn(case, dtype="float64"):
    """Arrays on the CPU, which the processes have each for itself."""
    return {name: x.cpu() for name, x in arrays(FRONTEND, case, dtype).items()}


def function(op, case, backend):
    flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
    options = {**case.options, "iters": 3} if "iters" in op.options else case.options
    bound = torch_ops.bind(op)

    def call(values):
        made = bound(**values, **options, **flags, backend=backend)
        return made if isinstance(made, tuple) else (made,)

    return call


def forms_of(op, case, values):
    options = [case.options.get(name, option.default) for name, option in op.options.items()]
    return op.call([describe(values.get(i.name)) for i in op.signature.inputs], options).sizes.forms


def places(form, split, lacking=Replicate):
    """Where an array of this form lies. A group goes where its channels go."""
    axes = [next((i for i, letter in enumerate(form) if letter == dim or (dim, letter) == ("d", "g")), None) for dim in split]
    return tuple(Replicate() if dim is None else lacking() if axis is None else Shard(axis) for dim, axis in zip(split, axes, strict=True))


def draw(arrays):
    return [torch.randn(a.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(i)) for i, a in enumerate(arrays)]


def check_split(rank, op_name, case_name, split, backend):
    """No array moves, and each gradient lies where its input does, or is a sum over what the input lacks."""
    op, mesh = BY_NAME[op_name], init_device_mesh("cpu", (2, 2))
    case = case_of(op, case_name)
    call, whole = function(op, case, backend), {k: v.requires_grad_() for k, v in drawn(case).items()}
    forms = forms_of(op, case, whole)
    split_up = {k: distribute_tensor(v.detach(), mesh, places(forms[k], split)).requires_grad_() for k, v in whole.items()}
    wanted = call(whole)
    cotangents = draw(wanted)
    outputs = [places(forms[name], split) for name in op.output_names]
    placed = [distribute_tensor(c, mesh, p) for c, p in zip(cotangents, outputs, strict=True)]
    with CommDebugMode() as moved:
        found = call(split_up)
        gradients = torch.autograd.grad(found, list(split_up.values()), placed)
    assert moved.get_total_counts() == 0, moved.get_comm_counts()
    for one, other, place in zip(found, wanted, outputs, strict=True):
        assert one.placements == place
        torch.testing.assert_close(one.full_tensor(), other)
    for k, one, other in zip(whole, gradients, torch.autograd.grad(wanted, list(whole.values()), cotangents), strict=True):
        assert one.placements == places(forms[k], split, Partial), k
        torch.testing.assert_close(one.full_tensor(), other, msg=lambda m, k=k: f"d{k}: {m}")


JOBS = [
    (op.name, case.name, split)
    for op in BY_NAME.values()
    for case in op.cases
    if case.name not in ("text", "packed")
    for split in (SPLITS if op.channels else LEADING)
]


@pytest.mark.parametrize(("op", "case", "split"), JOBS, ids=by_name)
def test_what_is_split_stays_where_it_is(op, case, split, covers):
    covers("torch", "DTensor", op)
    together(check_split, op, case, split, "reference")


@pytest.mark.skipif(KERNELS != "interpret", reason="test_torch_gpus has them")
@pytest.mark.parametrize("op", [op for op in BY_NAME.values() if op.backward], ids=by_name)
def test_the_kernels(op, covers):
    covers("torch", "DTensor", op.name)
    together(check_split, op.name, op.cases[0].name, SPLITS[0] if op.channels else LEADING[0], "interpret")


def check_moves(rank):
    """What can't be used as it lies is moved first: an array of which the split is of no use here, and one with a sum to come."""
    op, mesh = BY_NAME["selective_scan"], init_device_mesh("cpu", (COUNT,))
    case = case_of(op, "everything")
    call, whole = function(op, case, "reference"), drawn(case)
    lies = {k: Shard(0) for k in whole} | {"x": Shard(2), "delta": Replicate(), "D": Partial()}
    moved = {k: distribute_tensor(v / (COUNT if k == "D" else 1), mesh, [Replicate() if k == "D" else lies[k]]) for k, v in whole.items()}
    moved["D"] = DTensor.from_local(moved["D"].to_local(), mesh, [Partial()])
    for one, other in zip(call(moved), call(whole), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


def test_what_lies_in_another_way_is_moved():
    together(check_moves)


def check_whole(rank, op_name, case_name, sizes):
    """Where nothing can be split every process computes the whole."""
    op, mesh = BY_NAME[op_name], init_device_mesh("cpu", (COUNT,))
    case = resized(case_of(op, case_name), **sizes)
    call, whole = function(op, case, "reference"), drawn(case)
    spread = {k: distribute_tensor(v, mesh, [Shard(0) if v.dim() == 3 else Replicate()]) for k, v in whole.items()}
    for one, other in zip(call(spread), call(whole), strict=True):
        assert one.placements == (Replicate(),)
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize(
    ("op", "case", "sizes"),
    [
        ("selective_scan", "packed", dict(b=1, t=9, d=6, s=3, g=2)),  # sequences cross any split of time, groups any of 4 in channels
        ("selective_scan", "one step", dict(b=3, d=6, g=2)),
        ("selective_scan", "base", dict(b=3, d=5)),
        ("sinkhorn", "base", {ELLIPSIS: (3,)}),
    ],
)
def test_what_can_not_be_split_is_whole(op, case, sizes):
    together(check_whole, op, case, sizes)


def check_compiled(rank, name):
    """Also with a batch of another size."""
    torch._dynamo.reset()  # of other checks in this process
    op, mesh = BY_NAME[name], init_device_mesh("cpu", (2, 2))
    case = case_of(op, "everything" if name == "selective_scan" else op.cases[0].name)
    call, split = function(op, case, "reference"), SPLITS[0] if op.channels else LEADING[0]

    def loss(values):
        return sum(torch.sin(o).sum() for o in call(values)).full_tensor()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for batch in ({}, {"b": 8} if "b" in case.sizes else {ELLIPSIS: (8,)}):
        whole = drawn(resized(case, **batch))
        forms = forms_of(op, case, whole)
        leaves = {k: distribute_tensor(v, mesh, places(forms[k], split)).requires_grad_() for k, v in whole.items()}
        gradients = (torch.autograd.grad(f(leaves), list(leaves.values())) for f in (compiled, loss))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one.full_tensor(), other.full_tensor())


@pytest.mark.parametrize("name", BY_NAME)
def test_compiled(name, covers):
    covers("torch", "compiled DTensor", name)
    together(check_compiled, name)


def check_one_output(rank):
    """Of what comes out only one is used: nothing is asked of the gradient of the other."""
    op, mesh = BY_NAME["selective_scan"], init_device_mesh("cpu", (2, 2))
    case = case_of(op, "everything")
    call, whole = function(op, case, "reference"), {k: v.requires_grad_() for k, v in drawn(case).items()}
    forms = forms_of(op, case, whole)
    split_up = {k: distribute_tensor(v.detach(), mesh, places(forms[k], SPLITS[0])).requires_grad_() for k, v in whole.items()}
    for i in range(2):
        found = torch.autograd.grad(call(split_up)[i].sum(), list(split_up.values()), materialize_grads=True, allow_unused=True)
        wanted = torch.autograd.grad(call(whole)[i].sum(), list(whole.values()), materialize_grads=True, allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


def test_one_output():
    together(check_one_output)
