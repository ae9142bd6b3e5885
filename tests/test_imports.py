"""Who imports whom: bridge neither framework, each frontend only its own."""

import pytest
from common import NAMES, python

UNWANTED = {
    "bridge": ("torch", "jax", "bridge.models"),
    "torch_ops": ("jax", "torch_ops.nn", "safetensors"),
    "torch_ops.nn": ("jax", "safetensors"),
    "jax_ops": ("torch", "flax", "jax_ops.nnx", "safetensors"),
    "jax_ops.nnx": ("torch", "safetensors"),
}
PACKAGES = [package for package in UNWANTED if package.partition("_ops")[0] in ("bridge", *NAMES)]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_nothing_unwanted(package):
    check = f"import sys, {package}; print([name for name in {UNWANTED[package]!r} if name in sys.modules])"
    done = python("-c", check)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("package", ["bridge", *(f"{name}_ops" for name in NAMES)])
def test_all_is_there(package):
    done = python("-c", f"import {package} as p; missing = [n for n in p.__all__ if not hasattr(p, n)]; assert not missing, missing")
    assert done.returncode == 0, done.stderr


ORDERS = {
    "torch first": "import torch_ops.frontend as t, jax_ops.frontend as j",
    "jax first": "import jax_ops.frontend as j, torch_ops.frontend as t",
}
BOTH = """
import numpy as np
from bridge import ops, parity
frontends = (t.frontend, j.frontend) if {torch_first} else (j.frontend, t.frontend)
for op in ops.values():
    for dtype in ("float32", "bfloat16"):
        bits = [f for f in parity.check(op, op.cases[0], dtype, frontends) if isinstance(f, parity.Agreement)]
        assert bits and all(f.passed for f in bits), bits
"""


@pytest.mark.skipif(len(NAMES) < 2, reason="needs both frameworks")
@pytest.mark.parametrize("order", ORDERS)
def test_same_bits_in_one_process(order):
    done = python("-c", ORDERS[order] + BOTH.format(torch_first=order == "torch first"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
@pytest.mark.parametrize("before", ["", "/tmp/kernels"])
def test_importing_jax_triton_leaves_the_cache_folder(before):
    pytest.importorskip("jax_triton")
    code = "import os; from jax_ops.launch import _triton_call; _triton_call(); print(repr(os.environ.get('TRITON_CACHE_DIR')))"
    done = python("-c", code, env={"TRITON_CACHE_DIR": before})
    assert done.stdout.strip() == repr(before or None), done.stderr


@pytest.mark.parametrize(("distribution", "range"), [("numpy", "<1"), ("triton", ">=99")])
def test_a_pair_of_versions_that_does_not_work_is_named(distribution, range):
    done = python("-c", f"from bridge.version import require; require({distribution!r}, {range!r}, 'do this')")
    assert f"works with {distribution} {range}" in done.stderr
    assert "do this" in done.stderr


def test_a_missing_distribution_is_no_problem():
    assert python("-c", "from bridge.version import require; require('no-such-distribution', '>=1', '')").returncode == 0
