"""What is tested here: the frontends and backends of this machine, and helpers over them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge import Plan, ops
from bridge.case import Case
from bridge.frontend import MODULES, Frontend, installed, load
from bridge.op import Op
from bridge.parity import BOUNDS, backends, draw_cotangents, errors, given, named

ROOT = Path(__file__).parent.parent
NAMES = os.environ["BRIDGE_TEST_FRONTENDS"].split(",") if "BRIDGE_TEST_FRONTENDS" in os.environ else installed()
if not NAMES or set(NAMES) - set(MODULES):
    raise ValueError(f"BRIDGE_TEST_FRONTENDS must name some of {', '.join(MODULES)}, got {NAMES}")
FRONTENDS: list[Frontend] = [load(name) for name in NAMES]
BACKENDS = backends(FRONTENDS[0].gpu)
KERNELS = BACKENDS[0]  # the backend that runs the kernels
DTYPES = tuple(BOUNDS)


def by_name(value: Any) -> str:
    return getattr(value, "name", None) or str(value)


def resized(case: Case, **sizes: Any) -> Case:
    return Case(case.name, {**case.sizes, **sizes}, case.sample, case.options, case.without)


def arrays(frontend: Frontend, case: Case, dtype: str, seed: int = 0) -> dict[str, Any]:
    return given(frontend, case.inputs(seed), dtype)


def compare(
    frontend: Frontend, op: Op, case: Case, dtype: str, backend: str, seed: int = 0, inputs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The relative error of every output and gradient against the loop in float64, on the same values."""
    inputs = inputs or arrays(frontend, case, dtype, seed)
    exact = given(frontend, {name: frontend.numpy(x) for name, x in inputs.items()}, "float64")
    cotangents = draw_cotangents(op, case, inputs, frontend, seed)
    truth = named(op, *frontend.run_reference(op, exact, case.options, [frontend.array(frontend.numpy(c), "float64") for c in cotangents]))
    found = named(op, *frontend.run(op, inputs, case.options, cotangents, backend))
    for name, array in found.items():
        assert tuple(array.shape) == tuple(truth[name].shape), name
    return {name: errors(frontend.numpy(array), frontend.numpy(truth[name]))[0] for name, array in found.items()}


def assert_within(found: Mapping[str, float], bound: float) -> None:
    wrong = {name: error for name, error in found.items() if not error <= bound}
    assert not wrong, f"beyond {bound}: {wrong}"


def same_bits(frontend: Frontend, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(np.array_equal(frontend.bits(one[name]), frontend.bits(other[name])) for name in one)


def python(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path = ROOT, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own. An empty value in `env` takes the variable away."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **(env or {})}
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=timeout, cwd=folder, check=False
    )


OPS = list(ops.values())


def carry_out(plan: Plan, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a plan on float32 or float64 arrays with whatever runs kernels here."""
    if KERNELS == "interpret":
        from bridge.interpret import execute

        def run(launch, given):
            return execute(launch, [None if x is None else (x, x.dtype.name) for x in given])

        return plan.run(inputs, run)
    frontend = FRONTENDS[0]
    given = {name: frontend.array(value, value.dtype.name) for name, value in inputs.items()}
    if frontend.name == "torch":
        from torch_ops.tensors import run_compiled

        made = run_compiled(plan, given, next(iter(given.values())).device)
    else:
        import jax

        from jax_ops.launch import run_compiled as run_in_jax

        made = jax.jit(lambda given: run_in_jax(plan, given))(given)
    return [np.asarray(frontend.numpy(m)) for m in made]
