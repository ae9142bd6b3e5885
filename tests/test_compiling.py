"""Every kernel compiles for real GPUs, on a machine that has none: through Triton, and through jax-triton's lowering."""

import json

import pytest
from common import NAMES, OPS, by_name, python

# A compiler, not an interpreter, and no GPU.
COMPILER = {"TRITON_INTERPRET": "", "JAX_PLATFORMS": "cpu", "TRITON_DEFAULT_FP_FUSION": "1"}


# Kernels of many unrolled steps take the compiler up to ten seconds each: all cases for one GPU, and one case for the others.
SOME = {"selective_scan": "everything,packed"}
JOBS = [
    (op, dtype, targets, cases)
    for op in OPS
    for dtype, targets, cases in (
        ("bfloat16", "90", SOME.get(op.name, "")),
        ("bfloat16", "80,100", op.cases[0].name),
        ("float64", "90", op.cases[0].name),
    )
]


@pytest.mark.parametrize(("op", "dtype", "targets", "cases"), JOBS, ids=by_name)
def test_triton(op, dtype, targets, cases):
    done = python("tests/compiling.py", targets, dtype, op.name, cases, env=COMPILER, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {str(c["target"]) for c in compiled} == set(targets.split(","))
    assert max(c["seconds"] for c in compiled) < 60
    if op.name.startswith("selective_scan"):
        # Its sums go from lane to lane through shared memory, where copies must agree. Those of the sweep back are scattered: no lane
        # has another's.
        assert not [c for c in compiled if c["fused"] and c["kernel"] != "selective_scan.reverse"]


LOWER = """
import sys
import jax, jax.numpy as jnp, jax_triton
from bridge import ops
from bridge.case import Case
from bridge.frontend import load
from jax_ops import launch

op, target = ops[{op!r}], {target}
frontend, launch.TARGET = load("jax"), target
case = op.cases[0]


def lower(**sizes):
    resized = Case(case.name, {{**case.sizes, **sizes}}, case.sample, case.options, case.without)
    inputs = {{name: jnp.asarray(value, "float32") for name, value in resized.inputs().items()}}
    function = lambda inputs: frontend.function(op)(**inputs, **case.options)
    forward = jax.jit(function).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    loss = lambda inputs: sum(output.sum() for output in jax.tree.leaves(function(inputs)))
    both = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    if not jax_triton.__version__.startswith("0.3."):  # every call says what it costs
        assert both.count("bytes_accessed") == both.count("flops") == both.count("custom_call @triton_kernel_call")
    return forward.count("custom_call @triton_kernel_call"), both.count("custom_call @triton_kernel_call")


def compiled():
    import triton
    from jax_triton import triton_lib

    if hasattr(triton_lib, "_COMPILED_KERNEL_CACHE"):
        return len(triton_lib._COMPILED_KERNEL_CACHE)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("bridge")]
    seen = [v for m in modules for v in vars(m).values()]
    kernels = {{id(v): v for v in seen if isinstance(v, triton.JITFunction)}}.values()
    return sum(len(getattr(kernel, "_jT_kernel_cache", ())) for kernel in kernels)


first = lower(**{first!r})
before = compiled()
assert before and min(first) >= 1, (first, before)
for sizes in {others!r}:
    assert lower(**sizes) == first
    assert compiled() == before, (sizes, before, compiled())
"""
CALLS = {
    "selective_scan": [dict(b=2, t=19), dict(b=1, t=1), dict(b=16, t=48), dict(b=3, t=200)],
    "selective_scan_step": [dict(b=3), dict(b=1), dict(b=16)],
    "sinkhorn": [{"...": (7,)}, {"...": (1,)}, {"...": (16, 16)}],
    "mhc_bwd": [{"...": (7,)}, {"...": (1,)}, {"...": (16, 16)}],
}


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
@pytest.mark.parametrize(
    ("op", "target"), [(op, t) for op in OPS for t in (80, 90, 100) if op.name != "selective_scan" or t == 90], ids=by_name
)
def test_jax_triton(op, target):
    """And another b or t compiles nothing more."""
    pytest.importorskip("jax_triton")
    code = LOWER.format(op=op.name, target=target, first=CALLS[op.name][0], others=CALLS[op.name][1:])
    if not op.backward:  # its gradient is the loop's
        code = code.replace("assert before and min(first) >= 1", "assert before and first[0] >= 1")
    done = python("-c", code, env=COMPILER)
    assert done.returncode == 0, done.stderr[-2000:]
