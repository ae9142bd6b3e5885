"""Bad calls: each gives the right kind of error, which names the function, the argument, what was expected and what came."""

import os

import numpy as np
import pytest
from common import FRONTENDS, KERNELS, arrays, by_name, python, resized

from bridge import ops
from bridge.language import INTERPRETING

SCAN = resized(next(c for c in ops["selective_scan"].cases if c.name == "everything"), b=2, t=3, d=4, n=5)
GOOD = {
    "selective_scan": SCAN,
    "selective_scan_step": resized(ops["selective_scan_step"].cases[0], b=2, d=4, n=5),
    "sinkhorn": resized(ops["sinkhorn"].cases[0], **{"...": (2, 3), "n": 4}),
    "mhc_bwd": resized(ops["mhc_bwd"].cases[0], **{"...": (2, 3), "n": 4}),
}


def shape(*sizes):
    return lambda frontend: frontend.array(np.ones(sizes), "float32")


def dtype(name, *sizes):
    def make(frontend):
        if name == "float64":
            return frontend.array(np.ones(sizes), "float64")
        if frontend.name == "torch":
            import torch

            return torch.ones(sizes, dtype=getattr(torch, name), device="cuda" if frontend.gpu else "cpu")
        import jax.numpy as jnp

        return jnp.ones(sizes, name)

    return make


def value(thing):
    return lambda frontend: thing


def integers(*values):
    return lambda frontend: frontend.array(np.array(values), "int32")


NOTHING = value(None)

# argument, what it is given, the error, and what its message must say
BAD = {
    "selective_scan": [
        ("x", shape(2, 3), ValueError, r"x must have shape \(b t d\), 3 dimensions, got \(2, 3\)"),
        ("x", shape(2, 3, 4, 1), ValueError, r"x must have shape \(b t d\), 3 dimensions, got \(2, 3, 4, 1\)"),
        ("x", value([[[1.0]]]), TypeError, r"x must be a .*, got list"),
        ("x", value(1.0), TypeError, r"x must be a .*, got float"),
        ("x", value("x"), TypeError, r"x must be a .*, got str"),
        ("x", NOTHING, TypeError, r"x must be a .*, got NoneType"),
        ("x", dtype("int32", 2, 3, 4), TypeError, r"x must have one of the dtypes float16, bfloat16, float32, float64, got int32"),
        ("x", dtype("bool", 2, 3, 4), TypeError, r"x must have one of the dtypes .*, got bool"),
        ("x", dtype("complex64", 2, 3, 4), TypeError, r"x must have one of the dtypes .*, got complex64"),
        ("x", dtype("float64", 2, 3, 4), TypeError, r"float64 can't be mixed with other dtypes: x is float64, delta is float32"),
        ("A", dtype("float64", 4, 5), TypeError, r"float64 can't be mixed with other dtypes: x is float32, A is float64"),
        ("A", dtype("int64", 4, 5), TypeError, r"A must have one of the dtypes .*, got int64"),
        (
            "delta",
            shape(2, 3, 1),
            ValueError,
            r"delta must have shape \(b t d\) with b = 2 \(set by x\), t = 3 \(set by x\), d = 4 .* got \(2, 3, 1\)",
        ),
        ("delta", shape(2, 4, 3), ValueError, r"delta must have shape \(b t d\) with .* got \(2, 4, 3\)"),
        ("delta", NOTHING, TypeError, r"delta must be a .*, got NoneType"),
        ("A", shape(5, 4), ValueError, r"A must have shape \(d n\) with d = 4 \(set by x\), got \(5, 4\)"),
        ("A", shape(4), ValueError, r"A must have shape \(d n\), 2 dimensions, got \(4,\)"),
        (
            "B",
            shape(2, 5, 3),
            ValueError,
            r"B must have shape \(b t n\) with b = 2 \(set by x\), t = 3 \(set by x\), n = 5 \(set by A\), got \(2, 5, 3\)",
        ),
        ("B", shape(2, 3, 4), ValueError, r"n = 5 \(set by A\), got \(2, 3, 4\)"),
        ("C", shape(1, 3, 5), ValueError, r"C must have shape \(b t n\) with b = 2 \(set by x\).*, got \(1, 3, 5\)"),
        ("C", shape(3, 5), ValueError, r"C must have shape \(d n\) with d = 4 \(set by x\), n = 5 \(set by A\), got \(3, 5\)"),
        ("C", shape(3), ValueError, r"C must have shape \(b t n\), \(b t g n\) or \(d n\), got \(3,\)"),
        ("C", shape(2, 3, 3, 5), ValueError, r"C must have shape \(b t g n\) with g a divisor of d = 4, got \(2, 3, 3, 5\)"),
        ("B", shape(2, 3, 0, 5), ValueError, r"B must have shape \(b t g n\) with g a divisor of d = 4, got \(2, 3, 0, 5\)"),
        ("B", shape(2, 3, 2, 4), ValueError, r"B must have shape \(b t g n\) with .*n = 5 \(set by A\), got \(2, 3, 2, 4\)"),
        (
            "cu_seqlens",
            integers(0, 1, 3),
            ValueError,
            r"x must have shape \(b t d\) with b = 1 where cu_seqlens packs sequences, got \(2, 3, 4\)",
        ),
        (
            "cu_seqlens",
            integers(0, 1, 2, 3),
            ValueError,
            r"cu_seqlens must have shape \(s\+1\) with s = 2 \(set by initial_state\), got \(4,\)",
        ),
        ("cu_seqlens", integers(0), ValueError, r"cu_seqlens must have shape \(s\+1\) with s = 2 \(set by initial_state\), got \(1,\)"),
        ("B", shape(5, 7), ValueError, r"B must have shape \(d n\) with d = 4 \(set by x\), n = 5 \(set by A\), got \(5, 7\)"),
        ("cu_seqlens", shape(3), TypeError, r"cu_seqlens must have one of the dtypes int32, int64, got float32"),
        ("cu_seqlens", value([0, 1, 3]), TypeError, r"cu_seqlens must be a .*, got list"),
        ("D", shape(5), ValueError, r"D must have shape \(d\) with d = 4 \(set by x\), got \(5,\)"),
        ("D", value(1.0), TypeError, r"D must be a .*, got float"),
        ("z", shape(2, 3, 5), ValueError, r"z must have shape \(b t d\) with .*, got \(2, 3, 5\)"),
        ("delta_bias", shape(1, 4), ValueError, r"delta_bias must have shape \(d\), 1 dimensions, got \(1, 4\)"),
        (
            "initial_state",
            shape(1, 4, 5),
            ValueError,
            r"initial_state must have shape \(b d n\) with b = 2 \(set by x\), .* got \(1, 4, 5\)",
        ),
        ("initial_state", shape(2, 5, 4), ValueError, r"initial_state must have shape \(b d n\) with .*, got \(2, 5, 4\)"),
        ("delta_softplus", value(1), TypeError, r"delta_softplus must be True or False, got 1"),
        ("return_final_state", value("yes"), TypeError, r"return_final_state must be True or False, got 'yes'"),
        ("backend", value("cuda"), ValueError, r"backend must be None or one of 'triton', 'interpret', 'reference', got 'cuda'"),
    ],
    "selective_scan_step": [
        ("state", shape(2, 4), ValueError, r"state must have shape \(b d n\), 3 dimensions, got \(2, 4\)"),
        ("state", NOTHING, TypeError, r"state must be a .*, got NoneType"),
        ("state", dtype("int32", 2, 4, 5), TypeError, r"state must have one of the dtypes .*, got int32"),
        ("state", dtype("float64", 2, 4, 5), TypeError, r"float64 can't be mixed with other dtypes: state is float64, x is float32"),
        ("x", shape(2, 3, 4), ValueError, r"x must have shape \(b d\), 2 dimensions, got \(2, 3, 4\)"),
        ("x", shape(3, 4), ValueError, r"x must have shape \(b d\) with b = 2 \(set by state\), d = 4 \(set by state\), got \(3, 4\)"),
        ("x", value(1.0), TypeError, r"x must be a .*, got float"),
        ("x", dtype("complex64", 2, 4), TypeError, r"x must have one of the dtypes .*, got complex64"),
        ("delta", shape(2, 5), ValueError, r"delta must have shape \(b d\) with .*d = 4 \(set by state\), got \(2, 5\)"),
        ("delta", shape(2), ValueError, r"delta must have shape \(b d\), 2 dimensions, got \(2,\)"),
        ("A", shape(4, 6), ValueError, r"A must have shape \(d n\) with d = 4 \(set by state\), n = 5 \(set by state\), got \(4, 6\)"),
        ("A", dtype("bool", 4, 5), TypeError, r"A must have one of the dtypes .*, got bool"),
        (
            "B",
            shape(3, 5),
            ValueError,
            r"B must have shape \(b n\) or \(d n\) with b = 2 \(set by state\), .*, d = 4 \(set by state\), got \(3, 5\)",
        ),
        ("B", shape(2, 3, 5), ValueError, r"B must have shape \(b g n\) with g a divisor of d = 4, got \(2, 3, 5\)"),
        ("B", shape(5), ValueError, r"B must have shape \(b n\), \(b g n\) or \(d n\), got \(5,\)"),
        ("C", shape(2, 2, 4), ValueError, r"C must have shape \(b g n\) with .*n = 5 \(set by state\), got \(2, 2, 4\)"),
        ("C", shape(2, 1, 1, 5), ValueError, r"C must have shape \(b n\), \(b g n\) or \(d n\), got \(2, 1, 1, 5\)"),
        ("D", shape(2, 4), ValueError, r"D must have shape \(d\), 1 dimensions, got \(2, 4\)"),
        ("z", shape(2, 1), ValueError, r"z must have shape \(b d\) with .*d = 4 \(set by state\), got \(2, 1\)"),
        ("delta_bias", shape(5), ValueError, r"delta_bias must have shape \(d\) with d = 4 \(set by state\), got \(5,\)"),
        ("delta_softplus", NOTHING, TypeError, r"delta_softplus must be True or False, got None"),
        ("backend", value("numpy"), ValueError, r"backend must be None or one of .*, got 'numpy'"),
    ],
    "sinkhorn": [
        ("logits", shape(4), ValueError, r"logits must have shape \(\.\.\. n n\), at least 2 dimensions, got \(4,\)"),
        ("logits", shape(), ValueError, r"logits must have shape \(\.\.\. n n\), at least 2 dimensions, got \(\)"),
        ("logits", shape(2, 3, 4), ValueError, r"logits must have shape \(\.\.\. n n\) with n = 3 \(set by logits\), got \(2, 3, 4\)"),
        ("logits", shape(4, 3), ValueError, r"n = 4 \(set by logits\), got \(4, 3\)"),
        ("logits", shape(2, 65, 65), ValueError, r"logits must have shape \(\.\.\. n n\) with 1 <= n <= 64, got \(2, 65, 65\)"),
        ("logits", shape(2, 0, 0), ValueError, r"with 1 <= n <= 64, got \(2, 0, 0\)"),
        ("logits", value([[1.0]]), TypeError, r"logits must be a .*, got list"),
        ("logits", value(None), TypeError, r"logits must be a .*, got NoneType"),
        ("logits", value(3), TypeError, r"logits must be a .*, got int"),
        ("logits", dtype("int32", 2, 4, 4), TypeError, r"logits must have one of the dtypes .*, got int32"),
        ("logits", dtype("bool", 2, 4, 4), TypeError, r"logits must have one of the dtypes .*, got bool"),
        ("logits", dtype("complex64", 2, 4, 4), TypeError, r"logits must have one of the dtypes .*, got complex64"),
        ("iters", value(-1), ValueError, r"iters must be at least 0, got -1"),
        ("iters", value(2.0), TypeError, r"iters must be an integer, got 2\.0"),
        ("iters", value(True), TypeError, r"iters must be an integer, got True"),
        ("iters", NOTHING, TypeError, r"iters must be an integer, got None"),
        ("iters", value("20"), TypeError, r"iters must be an integer, got '20'"),
        ("eps", value(-1e-6), ValueError, r"eps must be a number from 0\.0 to 1e\+30, got -1e-06"),
        ("eps", value(float("nan")), ValueError, r"eps must be a number from 0\.0 to 1e\+30, got nan"),
        ("eps", value(2e30), ValueError, r"eps must be a number from 0\.0 to 1e\+30, got 2e\+30"),
        ("eps", value(float("inf")), ValueError, r"eps must be a number from 0\.0 to 1e\+30, got inf"),
        ("eps", value("0"), TypeError, r"eps must be a real number, got '0'"),
        ("order", value("rows"), ValueError, r"order must be one of 'col_row', 'row_col', got 'rows'"),
        ("order", NOTHING, TypeError, r"order must be one of 'col_row', 'row_col', got None"),
        ("gradient", value("exact"), ValueError, r"gradient must be one of 'unrolled', 'implicit', got 'exact'"),
        ("gradient", value(True), TypeError, r"gradient must be one of 'unrolled', 'implicit', got True"),
        ("backend", value("cpu"), ValueError, r"backend must be None or one of .*, got 'cpu'"),
    ],
    "mhc_bwd": [
        ("out", shape(4), ValueError, r"out must have shape \(\.\.\. n n\), at least 2 dimensions, got \(4,\)"),
        ("out", shape(2, 3, 4, 5), ValueError, r"out must have shape \(\.\.\. n n\) with n = 4 \(set by out\), got \(2, 3, 4, 5\)"),
        ("out", shape(2, 3, 65, 65), ValueError, r"out must have shape \(\.\.\. n n\) with 1 <= n <= 64"),
        ("out", shape(2, 3, 0, 0), ValueError, r"out must have shape \(\.\.\. n n\) with 1 <= n <= 64"),
        (
            "out",
            shape(3, 2, 4, 4),
            ValueError,
            r"dout must have shape \(\.\.\. n n\) with \.\.\. = \(3, 2\) \(set by out\), got \(2, 3, 4, 4\)",
        ),
        ("out", shape(2, 3, 5, 5), ValueError, r"dout must have shape \(\.\.\. n n\) with n = 5 \(set by out\), got \(2, 3, 4, 4\)"),
        ("out", value([1.0]), TypeError, r"out must be a .*, got list"),
        ("out", NOTHING, TypeError, r"out must be a .*, got NoneType"),
        ("out", value(0), TypeError, r"out must be a .*, got int"),
        ("out", dtype("int32", 2, 3, 4, 4), TypeError, r"out must have one of the dtypes .*, got int32"),
        ("out", dtype("float64", 2, 3, 4, 4), TypeError, r"float64 can't be mixed with other dtypes: out is float64, dout is float32"),
        ("dout", shape(4, 4), ValueError, r"dout must have shape \(\.\.\. n n\) with \.\.\. = \(2, 3\) \(set by out\), got \(4, 4\)"),
        ("dout", shape(2, 3, 4, 5), ValueError, r"dout must have shape \(\.\.\. n n\) with n = 4 \(set by out\), got \(2, 3, 4, 5\)"),
        ("dout", shape(4), ValueError, r"dout must have shape \(\.\.\. n n\), at least 2 dimensions, got \(4,\)"),
        (
            "dout",
            shape(2, 4, 4, 4),
            ValueError,
            r"dout must have shape \(\.\.\. n n\) with \.\.\. = \(2, 3\) \(set by out\), got \(2, 4, 4, 4\)",
        ),
        ("dout", NOTHING, TypeError, r"dout must be a .*, got NoneType"),
        ("dout", value("dout"), TypeError, r"dout must be a .*, got str"),
        ("dout", dtype("bool", 2, 3, 4, 4), TypeError, r"dout must have one of the dtypes .*, got bool"),
        ("dout", dtype("float64", 2, 3, 4, 4), TypeError, r"float64 can't be mixed with other dtypes: out is float32, dout is float64"),
        ("cg_iters", value(-1), ValueError, r"cg_iters must be at least 0, got -1"),
        ("cg_iters", value(8.0), TypeError, r"cg_iters must be an integer, got 8\.0"),
        ("cg_iters", value(False), TypeError, r"cg_iters must be an integer, got False"),
        ("backend", value("auto"), ValueError, r"backend must be None or one of .*, got 'auto'"),
    ],
}
CALLS = [pytest.param(name, *bad, id=f"{name}-{i}-{bad[0]}") for name, calls in BAD.items() for i, bad in enumerate(calls)]


def test_there_are_twenty_for_each_op():
    assert set(BAD) == set(ops)
    assert min(map(len, BAD.values())) >= 20


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize(("name", "argument", "make", "error", "message"), CALLS)
def test_bad_call(name, argument, make, error, message, frontend):
    case = GOOD[name]
    good = {**arrays(frontend, case, "float32"), **case.options}
    function = frontend.function(ops[name])
    function(**good)
    with pytest.raises(error, match=f"^{name}: (.* )?{message}") as caught:
        function(**{**good, argument: make(frontend)})
    assert type(caught.value) is error


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("name", ops)
def test_arguments_that_python_refuses(name, frontend):
    function = frontend.function(ops[name])
    with pytest.raises(TypeError, match=rf"{name}\(\) missing .* required positional argument"):
        function()
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'mask'"):
        function(**arrays(frontend, GOOD[name], "float32"), mask=None)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_a_backend_that_cannot_run_here(frontend, monkeypatch):
    good = {**arrays(frontend, SCAN, "float32"), **SCAN.options}
    function = frontend.function(ops["selective_scan"])
    other = "interpret" if frontend.gpu else "triton"
    said = "needs arrays on the CPU" if frontend.gpu else "needs arrays on a GPU: move them there, or use backend='reference'"
    with pytest.raises(ValueError, match=rf"selective_scan: backend '{other}' \(backend='{other}' was passed\) {said}"):
        function(**good, backend=other)
    monkeypatch.setenv("BRIDGE_BACKEND", other)
    fresh = {**arrays(frontend, resized(SCAN, t=4), "float32"), **SCAN.options}
    with pytest.raises(ValueError, match=rf"selective_scan: backend '{other}' \(BRIDGE_BACKEND={other} is set\)"):
        function(**fresh)
    monkeypatch.setenv("BRIDGE_BACKEND", "gpu")
    fresh = {**arrays(frontend, resized(SCAN, t=5), "float32"), **SCAN.options}
    with pytest.raises(ValueError, match="BRIDGE_BACKEND must be one of triton, interpret, reference, got 'gpu'"):
        function(**fresh)
    function(**fresh, backend=KERNELS)  # an argument beats the environment


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_interpreting_needs_a_process_that_was_started_for_it(frontend):
    code = f"""
from bridge.frontend import load
from bridge import ops
import numpy as np
f = load({frontend.name!r})
one = f.array(np.ones((1, 1, 1)), "float32")
if {frontend.name!r} == "torch": one = one.cpu()
f.function(ops["sinkhorn"])(one, backend="interpret")
"""
    done = python("-c", code, env={"TRITON_INTERPRET": "", "JAX_PLATFORMS": "cpu"})
    said = "backend 'interpret' (backend='interpret' was passed) needs a process that was started with TRITON_INTERPRET=1"
    assert f"ValueError: sinkhorn: {said}" in done.stderr


def test_mixed_devices_torch():
    torch = pytest.importorskip("torch")
    torch_ops = pytest.importorskip("torch_ops")
    if not torch.cuda.is_available() or INTERPRETING:
        x = torch.ones(2, 3, 4, device="meta")  # no GPU: the one other device that a machine always has
        others = [torch.ones(s) for s in ((2, 3, 4), (4, 5), (2, 3, 5), (2, 3, 5))]
        with pytest.raises(ValueError, match="selective_scan: all arrays must be on one device: x is on meta, delta is on cpu"):
            torch_ops.selective_scan(x, *others)
    else:
        x = torch.ones(2, 3, 4, device="cuda")
        others = [torch.ones(s) for s in ((2, 3, 4), (4, 5), (2, 3, 5), (2, 3, 5))]
        with pytest.raises(ValueError, match="selective_scan: all arrays must be on one device: x is on cuda:0, delta is on cpu"):
            torch_ops.selective_scan(x, *others)


def test_mixed_devices_jax():
    jax = pytest.importorskip("jax")
    jax_ops = pytest.importorskip("jax_ops")
    devices = [*jax.devices(), *jax.devices("cpu")]
    x = jax.device_put(np.ones((2, 3, 4), np.float32), devices[0])
    others = [jax.device_put(np.ones(s, np.float32), devices[-1]) for s in ((2, 3, 4), (4, 5), (2, 3, 5), (2, 3, 5))]
    with pytest.raises(ValueError, match=r"selective_scan: all arrays must be on one device: x is on .*, delta is on "):
        jax_ops.selective_scan(x, *others)


def test_binding_two_ops_of_one_name():
    from dataclasses import replace

    other = replace(ops["sinkhorn"], doc="another")
    for frontend in FRONTENDS:
        assert frontend.function(ops["sinkhorn"]) is frontend.function(ops["sinkhorn"])
        with pytest.raises(ValueError, match="another op named 'sinkhorn' is bound already"):
            frontend.function(other)


def test_the_environment_is_as_it_was():
    assert "BRIDGE_BACKEND" not in os.environ
