"""Gradients in float64 against finite differences, first and second, by each framework's own tool."""

import pytest
from common import BACKENDS, FRONTENDS, OPS, arrays, by_name, resized

SMALL = {
    "selective_scan": dict(t=3, d=6, n=2),
    "selective_scan_step": dict(d=6, n=2),
    "sinkhorn": {"...": (1, 2), "n": 3},
    "mhc_bwd": {"...": (2,), "n": 3},
}
JOBS = [(op, case) for op in OPS for case in op.cases]


def prepared(frontend, op, case):
    flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
    inputs = arrays(frontend, resized(case, **SMALL[op.name]), "float64")
    few = {"iters": min(case.options.get("iters", 4), 4)} if "iters" in op.options else {}
    floating = [i.name for i in op.signature.inputs if i.floating and i.name in inputs]
    fixed = {name: x for name, x in inputs.items() if name not in floating}
    return floating, [inputs[name] for name in floating], {**fixed, **case.options, **few, **flags}


def has_finite_differences(case):
    """The implicit gradient is that of the fixed point, not of the loop; it has a test of its own."""
    return case.options.get("gradient") != "implicit"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize(("op", "case"), [job for job in JOBS if has_finite_differences(job[1])], ids=by_name)
def test_gradcheck(op, case, frontend, backend):
    names, values, options = prepared(frontend, op, case)

    def function(*values):
        return frontend.function(op)(**dict(zip(names, values, strict=True)), **options, backend=backend)

    if frontend.name == "torch":
        from torch.autograd import gradcheck

        # In fast mode along one random direction, which takes two runs of the interpreter instead of two a number.
        assert gradcheck(function, tuple(v.requires_grad_() for v in values), fast_mode=backend == "interpret")
    else:
        import jax
        from jax.test_util import check_grads

        check_grads(jax.jit(function), values, order=1, modes=("rev",))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_second_derivative(op, frontend):
    names, values, options = prepared(frontend, op, op.cases[-1])

    def function(*values):
        return frontend.function(op)(**dict(zip(names, values, strict=True)), **options)

    if frontend.name == "torch":
        from torch.autograd import gradgradcheck

        assert gradgradcheck(function, tuple(v.requires_grad_() for v in values), fast_mode=True)
    else:
        import jax
        from jax.test_util import check_grads

        check_grads(jax.jit(function), values, order=2, modes=("rev",), atol=1e-4, rtol=1e-4)
