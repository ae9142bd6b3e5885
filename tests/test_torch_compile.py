"""torch.compile with sizes that change, and torch.export, for every op and one that doesn't ship."""

import io

import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, by_name, resized
from own_op import weighted

pytest.importorskip("torch")
import torch
from torch._dynamo.testing import CompileCounterWithBackend

FRONTEND = next((f for f in FRONTENDS if f.name == "torch"), None)
if FRONTEND is None:
    pytest.skip("needs torch", allow_module_level=True)

# The sizes that change from call to call, and those of the model.
CHANGING = {
    "selective_scan": (("b", "t"), dict(d=3, n=2)),
    "selective_scan_step": (("b",), dict(d=3, n=2)),
    "sinkhorn": (("...",), dict(n=3)),
    "mhc_bwd": (("...",), dict(n=3)),
    "weighted": (("b", "t"), dict(d=3)),
}
EVERY = [*OPS, weighted]
# One that is a model's size too; a kernel must not be compiled for it.
NUMBERS = [(2, 5), (3, 7), (4, 3), (6, 9)]


def case_of(op):
    """All arguments that can change in size; packed sequences have a test of their own."""
    return next((c for c in op.cases if c.name == "everything"), op.cases[0])


def inputs(op, number):
    changing, fixed = CHANGING[op.name]
    sizes = {k: (n,) if k == "..." else n for k, n in zip(changing, number, strict=False)}
    return arrays(FRONTEND, resized(case_of(op), **fixed, **sizes), "float64")


def function(op, backend):
    options = {**case_of(op).options, **({"iters": 3} if "iters" in op.options else {})}
    flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
    bound = FRONTEND.function(op)

    def call(**values):
        made = bound(**values, **options, **flags, backend=backend)
        return made if isinstance(made, tuple) else (made,)

    return call


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("marked", [False, True], ids=["learned", "marked"])
@pytest.mark.parametrize(("op", "backend"), [*((op, "reference") for op in EVERY), (weighted, KERNELS)], ids=by_name)
def test_no_recompilation(op, backend, marked, covers):
    """From the second size on, or none at all where the sizes were marked as such that change; forward and backward."""
    covers("torch", "compile", op.name)
    call, counter = function(op, backend), CompileCounterWithBackend("aot_eager")

    def loss(**values):
        return sum(torch.sin(o).sum() for o in call(**values))

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for number in NUMBERS:
        values = {k: v.requires_grad_() for k, v in inputs(op, number).items()}
        if marked:
            mark(op, values, number)
        found = torch.autograd.grad(compiled(**values), list(values.values()))
        for one, other in zip(found, torch.autograd.grad(loss(**values), list(values.values())), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == (1 if marked else 2)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_without_gradients(op, covers):
    """Where no input wants one, none is recorded, and in inference mode; with and without its arguments' asking for it."""
    covers("torch", "compile", op.name)
    call, values = function(op, "reference"), inputs(op, NUMBERS[0])
    expected = call(**values)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for asking in (False, context is not torch.enable_grad):
            torch._dynamo.reset()
            with context():
                found = torch.compile(call, fullgraph=True, backend="aot_eager")(
                    **{k: v.clone().requires_grad_(asking) if context is not torch.inference_mode else v for k, v in values.items()}
                )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
                assert not one.requires_grad


def test_function_transforms_break_the_graph():
    """The compiler knows nothing of the op's rules for them: in one graph that is an error, and else they run outside of it."""
    call, values = function(weighted, "reference"), inputs(weighted, NUMBERS[0])
    x, w = values.values()

    def f(*arrays):
        return call(**dict(zip(values, arrays, strict=True)))[0]

    gradients = torch.func.grad(lambda *arrays: f(*arrays).square().sum(), (0, 1))
    for transformed, given in ((torch.func.vmap(f, (0, None)), (torch.stack([x, 2 * x]), w)), (gradients, (x, w))):
        expected = transformed(*given)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(transformed, backend="aot_eager")(*given), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.func transforms of kernel-bridge's ops"):
            torch.compile(transformed, fullgraph=True, backend="aot_eager")(*given)


def mark(op, values, number):
    for name, axes in changing_axes(op, values).items():
        for axis in axes:
            torch._dynamo.mark_dynamic(values[name], axis)


def changing_axes(op, values):
    """Where the sizes that change stand: axis -> dimension, for each input."""
    from torch_ops.tensors import describe

    given = [describe(values.get(i.name)) for i in op.signature.inputs]
    forms = op.call(given, [case_of(op).options.get(name, o.default) for name, o in op.options.items()]).sizes.forms
    return {name: {axis: dim for axis, dim in enumerate(forms[name]) if dim in CHANGING[op.name][0]} for name in values}


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_inductor(op, covers):
    """What it makes of the ops alone needs no compiler of C++."""
    covers("torch", "Inductor", op.name)
    call = function(op, "reference")
    values = {k: v.requires_grad_() for k, v in inputs(op, NUMBERS[0]).items()}
    leaves, compiled = list(values.values()), torch.compile(call, fullgraph=True)
    found, expected = compiled(**values), call(**values)
    cotangents = [torch.rand_like(o) for o in expected]
    gradients = torch.autograd.grad(found, leaves, cotangents), torch.autograd.grad(expected, leaves, cotangents)
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other)


class Module(torch.nn.Module):
    """Calls functions one behind another, each with the arguments that it names."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def forward(self, *values):
        rest = iter(values)
        return tuple(made for names, call in self.calls for made in call(**{name: next(rest) for name in names}))


def exported(backend, *ops):
    """A program of all these ops, for sizes that change."""
    given = {op: inputs(op, NUMBERS[0]) for op in ops}
    dims = {dim: torch.export.Dim(dim.replace("...", "leading"), min=2) for op in ops for dim in CHANGING[op.name][0]}
    axes = [each for op, values in given.items() for each in changing_axes(op, values).values()]
    shapes = tuple({axis: dims[dim] for axis, dim in each.items()} for each in axes)
    module = Module(*((tuple(values), function(op, backend)) for op, values in given.items()))
    return torch.export.export(module, tuple(v for values in given.values() for v in values.values()), dynamic_shapes=(shapes,))


def check_package(backend, path, *ops):
    """AOTInductor's package of these ops, made once, for sizes that change."""
    package = torch._inductor.aoti_compile_and_package(exported(backend, *ops), package_path=str(path))
    given = {op: inputs(op, NUMBERS[1]) for op in ops}
    found = torch._inductor.aoti_load_package(package)(*(v for values in given.values() for v in values.values()))
    expected = [made for op, values in given.items() for made in function(op, backend)(**values)]
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_export(op, covers):
    """One node, for sizes that change, also when it has been saved and loaded and decomposed."""
    covers("torch", "export", op.name)
    program, file = exported("reference", op), io.BytesIO()
    ours = [node for node in program.graph.nodes if str(node.target).startswith("kernel_bridge.")]
    assert [str(node.target) for node in ours] == [f"kernel_bridge.{op.name}_forward.default"]
    torch.export.save(program, file)
    file.seek(0)
    other = inputs(op, NUMBERS[1])
    expected = function(op, "reference")(**other)
    for found in (program, torch.export.load(file), program.run_decompositions()):
        for one, wanted in zip(found.module()(*other.values()), expected, strict=True):
            torch.testing.assert_close(one, wanted)
