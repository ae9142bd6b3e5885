"""What PyTorch lays around a function: torch.func, checkpoints, autocast, modes that watch or forbid; for every op and for one
that doesn't ship."""

import pytest
from common import DTYPES, FRONTENDS, KERNELS, OPS, arrays, by_name, resized
from own_op import weighted

pytest.importorskip("torch")
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

FRONTEND = next((f for f in FRONTENDS if f.name == "torch"), None)
if FRONTEND is None:
    pytest.skip("needs torch", allow_module_level=True)

SMALL = {
    "selective_scan": dict(b=2, t=3, d=3, n=2),
    "selective_scan_step": dict(b=2, d=3, n=2),
    "sinkhorn": {"...": (2,), "n": 3},
    "mhc_bwd": {"...": (2,), "n": 3},
    "weighted": dict(b=2, t=3, d=3),
}
EVERY = [*OPS, weighted]
# The loop for all; kernels, which take the interpreter long, where one op tells as much as another.
JOBS = [*((op, "reference") for op in EVERY), (weighted, KERNELS)]


def case_of(op, **sizes):
    case = next((c for c in op.cases if c.name == "everything"), op.cases[0])
    return resized(case, **{**SMALL[op.name], **sizes})


def options_of(op):
    return {**case_of(op).options, **({"iters": 3} if "iters" in op.options else {})}


class Setting:
    """An op as a function of positional arrays, and arrays for it."""

    def __init__(self, op, backend, dtype="float64", **sizes):
        flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
        given = arrays(FRONTEND, case_of(op, **sizes), dtype)
        names, options, bound = list(given), options_of(op), FRONTEND.function(op)
        self.op, self.names = op, names
        self.leaves = [x.requires_grad_() for x in given.values()]

        def call(*values):
            made = bound(**dict(zip(names, values, strict=True)), **options, **flags, backend=backend)
            return made if isinstance(made, tuple) else (made,)

        def loop(*values):
            made = FRONTEND.reference(op)(**dict(zip(names, values, strict=True)), **options, **flags)
            return made if isinstance(made, tuple) else (made,)

        self.call, self.loop = call, loop

    def gradients(self, call=None):
        return torch.autograd.grad(loss((call or self.call)(*self.leaves)), self.leaves)


def loss(outputs):
    return sum(torch.sin(o).sum() for o in outputs)


def same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class Calls(TorchDispatchMode):
    """Counts the passes that run."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kernel_bridge":
            self.forward += func._schema.name.endswith("_forward")
            self.backward += func._schema.name.endswith("_backward")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_a_mode_sees_the_passes_and_changes_nothing(op, backend, covers):
    covers("torch", "dispatch modes", op.name)
    s = Setting(op, backend)
    expected = s.gradients()
    with Calls() as calls:
        found = s.gradients()
    same(found, expected)
    assert (calls.forward, calls.backward) == (1, 1)


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_checkpoint(op, backend, covers):
    """Plain, the pass runs twice; where the policy says so, what it made is kept."""
    covers("torch", "checkpoint", op.name)
    s = Setting(op, backend)
    ours = getattr(torch.ops.kernel_bridge, f"{op.name}_forward").default

    def policy(ctx, func, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if func is ours else CheckpointPolicy.PREFER_RECOMPUTE

    def recomputed(*values):
        return checkpoint(lambda *v: s.call(*(torch.sin(x) for x in v)), *values, use_reentrant=False)

    def kept(*values):
        def contexts():
            return create_selective_checkpoint_contexts(policy)

        return checkpoint(lambda *v: s.call(*(torch.sin(x) for x in v)), *values, use_reentrant=False, context_fn=contexts)

    expected = s.gradients(lambda *v: s.call(*(torch.sin(x) for x in v)))
    for call, runs in ((recomputed, 2), (kept, 1)):
        with Calls() as calls:
            same(s.gradients(call), expected)
        assert (calls.forward, calls.backward) == (runs, 1)


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_autocast_leaves_dtypes_as_they_are(op, backend, covers):
    """Mixed dtypes are part of every op, and its arithmetic is in float32 anyway: what autocast made of the layers before
    comes in as it is, nothing is cast, and each gradient has the dtype of its input."""
    covers("torch", "autocast", op.name)
    s = Setting(op, backend, "float32")
    s.leaves[0] = s.leaves[0].detach().bfloat16().requires_grad_()
    if op.name == "mhc_bwd":
        s.leaves[1] = s.leaves[1].detach().half().requires_grad_()
    expected, gradients = s.call(*s.leaves), s.gradients()
    with torch.autocast(s.leaves[0].device.type, torch.bfloat16):
        found = s.call(*s.leaves)
        same(found, expected)
        same(torch.autograd.grad(loss(found), s.leaves), gradients)
    assert [g.dtype for g in gradients] == [x.dtype for x in s.leaves]


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_deterministic_algorithms(op, backend, covers):
    covers("torch", "deterministic algorithms", op.name)
    s = Setting(op, backend)
    expected = s.gradients()
    torch.use_deterministic_algorithms(True)
    try:
        same(s.gradients(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


COSTS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "exp": 1, "log": 1, "logaddexp": 3}


class Arithmetic(TorchDispatchMode):
    """Counts the operations on numbers in what runs, as an op's declaration does."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if name == "sum" or name in COSTS:
            self.count += args[0].numel() if name == "sum" else COSTS[name] * made.numel()
        return made


def declared(op, s):
    """The counts of both passes. The loop of sinkhorn works in logarithms, and so does the gate of selective_scan's, which
    their definitions don't."""
    sizes, options = SMALL[op.name], options_of(op)
    if op.name.startswith("selective_scan"):
        with torch.no_grad(), Arithmetic() as arithmetic:
            values = dict(zip(s.names, (x.detach() for x in s.leaves), strict=True))
            FRONTEND.reference(op)(**values, **options)
        more = {"delta_bias": 1, "D": 4, "z": 11}
        each = 14 * sizes["n"] + 3 + sum(cost for name, cost in more.items() if name in s.names) + 4 * options.get("delta_softplus", False)
        count = sizes["b"] * sizes.get("t", 1) * sizes["d"]
        return arithmetic.count - 2 * count * ("z" in s.names), count * each
    if op is weighted:
        return 2 * 3 * 3, 3 * 2 * 3 * 3
    (count,), n = sizes["..."], sizes["n"]
    if op.name == "sinkhorn":
        return count * n * n * (1 + 4 * options["iters"]), count * n * n * (1 + 8 * options["iters"])
    return count * (4 * n**3 // 3 + 13 * n**2), 2 * count * (4 * n**3 // 3 + 13 * n**2)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_flop_counter(op, covers):
    covers("torch", "flop counter", op.name)
    s = Setting(op, "reference")
    forward, backward = declared(op, s)
    with FlopCounterMode(display=False) as counter:
        made = s.call(*s.leaves)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(loss(made), s.leaves)
    assert counter.get_total_flops() == backward


def strided(x):
    return x.detach().movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_opcheck_of_empty_arrays_and_of_the_backward_pass(op, covers):
    """Schema, fake tensors and AOT dispatch of both passes. Contiguous, strided and what requires a gradient: test_transforms."""
    covers("torch", "opcheck", op.name)
    empty = {"...": (0,)} if op.batch == "..." else {"b": 0}
    passes = [getattr(torch.ops.kernel_bridge, f"{op.name}_{kind}").default for kind in ("forward", "backward")]
    for sizes in ({}, empty):
        s = Setting(op, "reference", **sizes)
        given = dict(zip(s.names, s.leaves, strict=True))
        options = [options_of(op).get(name, option.default) for name, option in op.options.items()]
        for lay in (torch.Tensor.detach, strided):
            arguments = [lay(given[i.name]) if i.name in given else None for i in op.signature.inputs]
            torch.library.opcheck(passes[0], (*arguments, *options, "reference", True))
            made = passes[0](*arguments, *options, "reference", True)
            cotangents = [lay(torch.ones_like(o)) for o in made[: len(op.output_names)]]
            needs = [x is not None for x in arguments]
            kept = op.kept(made, options)
            torch.library.opcheck(passes[1], (*arguments, *options, "reference", needs, kept, cotangents))


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_forward_mode(op, backend, covers):
    """jvp, jacfwd, both kinds of Hessian by it, and mapped, against the same of the loop."""
    for transform in ("forward mode", "hessian"):
        covers("torch", transform, op.name)
    from torch.func import grad, hessian, jacfwd, jvp, vmap

    s = Setting(op, backend)
    values = tuple(x.detach() for x in s.leaves)
    tangents = tuple(torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(x) for x in values)
    two = torch.stack([values[0], values[0] / 2])

    def check(transform):
        torch.testing.assert_close(transform(s.call), transform(s.loop))

    check(lambda f: jvp(f, values, tangents))
    check(lambda f: jvp(lambda x: f(x, *values[1:]), values[:1], tangents[:1]))
    check(lambda f: jacfwd(f)(*values))
    check(lambda f: hessian(lambda *v: loss(f(*v)), tuple(range(len(values))))(*values))
    check(lambda f: jacfwd(grad(lambda *v: loss(f(*v)), len(values) - 1))(*values))
    check(lambda f: grad(lambda x: loss(jvp(lambda y: f(y, *values[1:]), (x,), tangents[:1])[1]))(values[0]))
    check(lambda f: vmap(lambda x: jvp(lambda y: f(y, *values[1:]), (x,), tangents[:1]))(two))
    assert torch.autograd.gradcheck(s.call, s.leaves, check_forward_ad=True, fast_mode=True)
    with pytest.raises(NotImplementedError, match="forward mode within forward mode"):
        jvp(lambda x: jvp(lambda y: f_of_one(s, y), (x,), tangents[:1])[1], values[:1], tangents[:1])


def f_of_one(s, x):
    return loss(s.call(x, *(y.detach() for y in s.leaves[1:])))


@pytest.mark.parametrize(("op", "backend"), JOBS, ids=by_name)
def test_derivatives_of_autograd_and_what_is_mapped_twice(op, backend, covers):
    for transform in ("autograd", "double backward", "vmap of vmap"):
        covers("torch", transform, op.name)
    from torch.func import vmap

    s = Setting(op, backend)
    assert torch.autograd.gradcheck(s.call, s.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(s.call, s.leaves, fast_mode=True)
    values, last = [x.detach() for x in s.leaves], len(s.leaves) - 1
    scales = torch.tensor([1.0, 0.9, 1.2], dtype=torch.float64, device=values[0].device)

    def twice(f, one, other):
        """Of the first argument one axis is mapped, of the last another; where it is one argument, both."""
        inner = lambda a, b: f(*(values[i] * (a if i == 0 else 1) * (b if i == last else 1) for i in range(last + 1)))  # noqa: E731
        return vmap(vmap(inner, one), other)(scales, scales)

    none = [x.detach()[None][:0] for x in s.leaves]  # an axis of length 0
    assert [tuple(o.shape) for o in vmap(s.call)(*none)] == [(0, *o.shape) for o in s.call(*s.leaves)]
    for axes in (((0, None), (None, 0)), ((None, 0), (0, None))):
        for one, other in zip(twice(s.call, *axes), twice(s.loop, *axes), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_functions_of_an_op_that_does_not_ship(backend, covers):
    """torch.func and derivatives, of what test_transforms and test_gradcheck show for the others."""
    for transform in ("grad", "jacrev", "grad of grad", "vmap", "vmap of grad", "grad of vmap"):
        covers("torch", transform, weighted.name)
    from torch.func import grad, jacrev, vmap

    s, bound = Setting(weighted, backend, t=2, d=2), FRONTEND.function(weighted)
    x, w = s.leaves
    x, w = x.detach(), w.detach()

    def total(function):
        return lambda x, w: torch.sin(function(x, w)).sum()

    def op(x, w):
        return bound(x, w, backend=backend)

    many = torch.stack([w, 2 * w, -w])
    each = torch.stack([x, 2 * x, -x])
    for transform in (
        lambda f: grad(total(f), (0, 1))(x, w),
        lambda f: jacrev(f, (0, 1))(x, w),
        lambda f: (vmap(f, (0, None))(each, w), vmap(f)(each, many), vmap(f, (None, 0))(x, many)),
        lambda f: (*vmap(grad(total(f), (0, 1)), (0, None))(each, w), *vmap(grad(total(f), (0, 1)))(each, many)),
        lambda f: grad(lambda e, m: vmap(total(f))(e, m).sum(), (0, 1))(each, many),
        lambda f: (jacrev(grad(total(f), 1), 1)(x, w), vmap(jacrev(grad(total(f), 1), 1))(each, many)),
    ):
        for one, other in zip(transform(op), transform(lambda x, w: x * w), strict=True):
            torch.testing.assert_close(one, other)


def test_a_gradient_with_a_mode_around_is_not_lost():
    """The loop's own gradient runs below the dispatcher: a mode must not turn autograd off there, whatever the dtype."""
    for dtype in DTYPES:
        s = Setting(OPS[0], "reference", dtype)
        with Calls():
            assert all(g.abs().sum() > 0 for g in s.gradients())
