"""Plans: pure data, complete, and within the rules for memory."""

import ast
import inspect
import math
from dataclasses import replace
from pathlib import Path

import pytest
from common import DTYPES, OPS, ROOT, by_name

import bridge
from bridge import Array, Launch, Plan, parity
from bridge.signature import Given

JOBS = [(op, case) for op in OPS for case in op.cases]


def call_of(op, case, dtype="float32"):
    return parity.call_of(op, case, case.inputs(), dtype)


def all_plans(op, call):
    yield op.forward_plan(call, False)
    yield op.forward_plan(call, True)
    if op.backward:
        yield op.backward_plan(call, call.floating)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), JOBS, ids=by_name)
def test_a_plan_returns_what_the_op_declares(op, case, dtype):
    call = call_of(op, case, dtype)
    for save in (False, True):
        plan = op.forward_plan(call, save)
        assert {name: plan.arrays[name] for name in plan.outputs} == op.results(call, save)
        assert list(plan.outputs) == list(op.results(call, save))
    if op.backward:
        plan = op.backward_plan(call, call.floating)
        gradients = {f"d{name}": call.given[name] for name in call.floating}
        assert {name: plan.arrays[name] for name in plan.outputs} == gradients
        assert list(plan.outputs) == list(gradients)


@pytest.mark.parametrize(("op", "case"), JOBS, ids=by_name)
def test_launches_fit_their_kernels(op, case):
    """Arguments in the order inputs, scalars, outputs, constants, and as many as the kernel takes."""
    for plan in all_plans(op, call_of(op, case)):
        known = set(call_of(op, case).given)
        for launch in plan.launches:
            names = list(inspect.signature(launch.kernel.fn).parameters)
            assert len(names) == len(launch.inputs) + len(launch.scalars) + len(launch.outputs) + len(launch.constants)
            assert set(names[-len(launch.constants) :]) == set(launch.constants)
            assert launch.num_warps & (launch.num_warps - 1) == 0
            known |= set(launch.outputs)
        assert set(plan.outputs) <= known


@pytest.mark.parametrize(("op", "case"), JOBS, ids=by_name)
def test_only_the_gradients_that_are_needed(op, case):
    if not op.backward:
        pytest.skip("its gradient goes through the reference")
    call = call_of(op, case)
    for name in call.floating:
        plan = op.backward_plan(call, (name,))
        assert plan.outputs == (f"d{name}",)
        others = {f"d{other}" for other in call.floating} - {f"d{name}"}
        unneeded = [array for made, array in plan.arrays.items() if made in others]
        assert all(math.prod(array.shape) == 1 for array in unneeded)


def test_nothing_of_size_b_t_d_n():
    """Of Mamba's usual shape, nothing comes near one state a step, and what is saved is one byte an element."""
    op = bridge.ops["selective_scan"]
    b, t, d, n = 8, 2048, 2048, 16
    shapes = dict(x=(b, t, d), delta=(b, t, d), A=(d, n), B=(b, t, n), C=(b, t, n))
    call = op.call([Given(shapes[i.name], "bfloat16", "") if i.name in shapes else None for i in op.signature.inputs], [False])
    for plan in all_plans(op, call):
        assert max(math.prod(array.shape) for array in plan.arrays.values()) <= b * t * d * n // 8
    saved = sum(4 * math.prod(array.shape) for array in op.saved(call).values())
    assert saved <= b * t * d


@pytest.mark.parametrize("path", sorted((ROOT / "bridge").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_atomics(path: Path):
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not [name for name in names if name.startswith("atomic")]


def test_a_plan_refuses_two_writers():
    launch = Launch(None, 1, (), (), {"y": Array((1,), "float32")}, {})
    with pytest.raises(ValueError, match="two launches write"):
        Plan((launch, launch), ("y",))


def test_a_plan_is_computed_once():
    op, case = JOBS[0]
    assert op.forward_plan(call_of(op, case), True) is op.forward_plan(call_of(op, case), True)


def test_a_launch_keeps_its_compiled_kernel(monkeypatch):
    """Later starts skip Triton's lookup, with the same arguments in the same order; not for arrays that aren't aligned."""
    torch = pytest.importorskip("torch")
    from torch_ops import tensors

    calls = []

    class Kernel:
        def __init__(self, name, made=None):
            self.name, self.made = name, made
            self.signature = inspect.signature(lambda x, size, y, LATE=7, FIRST=None, LAST=None: None)

        def __getitem__(self, grid):
            def begin(*arguments, **named):
                calls.append((self.name, grid, [a if isinstance(a, int) else a.data_ptr() for a in arguments], named))
                return self.made

            return begin

    monkeypatch.setattr(tensors, "JITFunction", Kernel)
    launch = Launch(Kernel("jit", Kernel("compiled")), 3, ("x",), (5,), {"y": Array((4,), "float32")}, {"LAST": 2, "FIRST": 1})
    x, y, device = torch.zeros(9), torch.zeros(4), torch.device("cpu")
    for first in (x[:4], x[:4], x[1:5]):
        tensors.start(launch, [first, 5, y], device, first.data_ptr() % 16 == 0)
    (_, _, arguments, named), again, unaligned = calls
    assert named.items() >= launch.constants.items()
    assert again == ("compiled", (3, 1, 1), [*arguments, 7, 1, 2], {})
    assert (unaligned[0], unaligned[2][0]) == ("jit", arguments[0] + 4)
    assert replace(launch, grid=4).compiled == {}
