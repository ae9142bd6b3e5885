"""The main job: every op in every frontend against that frontend's own automatic differentiation of the loop.

For each op, case and dtype, the inputs are drawn once, rounded to the dtype, and given to both frameworks. Each runs
the op on every backend that can run here, forward and backward with a random cotangent, and its own loop in float64 on
the same values. Two measures of the difference are reported: the relative norm |a - b| / |b|, which is held to a bound,
and max |a - b| / max |b|. Where two frontends ran the same kernels, their results are compared bit for bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bridge.case import Case
from bridge.frontend import Frontend
from bridge.language import INTERPRETING
from bridge.op import Call, Op
from bridge.ops import ops
from bridge.signature import Given, Input

BOUNDS = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-12}


@dataclass(frozen=True)
class Row:
    """One output or gradient of one run."""

    op: str
    case: str
    dtype: str
    frontend: str
    backend: str
    quantity: str
    norm: float
    maximum: float
    bound: float

    @property
    def passed(self) -> bool:
        return bool(self.norm <= self.bound)  # False for NaN


@dataclass(frozen=True)
class Agreement:
    """Whether frontends that ran the same kernels on the same inputs gave the same bits, and where they didn't."""

    op: str
    case: str
    dtype: str
    backend: str
    frontends: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.differing


Finding = Row | Agreement


def backends(gpu: bool) -> list[str]:
    """What can run in this process."""
    return ["triton", "reference"] if gpu else ["interpret", "reference"] if INTERPRETING else ["reference"]


def jobs(dtype: str | None = None) -> list[tuple[Op, Case, str]]:
    """Every case of every op in a dtype. Where none is asked for: in float32 and bfloat16; and the first and the last case
    in float16 and float64, which the same code runs."""
    if dtype:
        return [(op, case, dtype) for op in ops.values() for case in op.cases]
    return [
        (op, case, each)
        for op in ops.values()
        for case in op.cases
        for each in BOUNDS
        if each in ("float32", "bfloat16") or case in (op.cases[0], op.cases[-1])
    ]


def check(op: Op, case: Case, dtype: str, frontends: list[Frontend], seed: int = 0) -> Iterator[Finding]:
    """Run one job in every frontend."""
    values, ran = case.inputs(seed), dict[str, dict[str, dict[str, np.ndarray]]]()
    for frontend in frontends:
        inputs = given(frontend, values, dtype)
        exact = given(frontend, {name: frontend.numpy(x) for name, x in inputs.items()}, "float64")
        cotangents = draw_cotangents(op, case, inputs, frontend, seed)
        exact_cotangents = [frontend.array(frontend.numpy(c), "float64") for c in cotangents]
        truth = named(op, *frontend.run_reference(op, exact, case.options, exact_cotangents))
        for backend in backends(frontend.gpu):
            found = named(op, *frontend.run(op, inputs, case.options, cotangents, backend))
            ran.setdefault(backend, {})[frontend.name] = {q: frontend.bits(a) for q, a in found.items()}
            for quantity, array in found.items():
                norm, maximum = errors(frontend.numpy(array), frontend.numpy(truth[quantity]))
                yield Row(op.name, case.name, dtype, frontend.name, backend, quantity, norm, maximum, BOUNDS[dtype])
    for backend, results in ran.items():
        if backend != "reference" and len(results) > 1:
            first, *others = results.values()
            # A gradient that goes through the loop is each framework's own.
            by_kernels = [q for q in first if op.backward or q in op.output_names]
            differing = tuple(q for q in by_kernels if any(not np.array_equal(first[q], other[q]) for other in others))
            yield Agreement(op.name, case.name, dtype, backend, tuple(results), differing)


def given(frontend: Frontend, values: Mapping[str, np.ndarray], dtype: str) -> dict[str, Any]:
    """A framework's arrays of these values: integers as they are, all others in `dtype`."""
    return {name: frontend.array(value, dtype if value.dtype.kind == "f" else value.dtype.name) for name, value in values.items()}


def draw_cotangents(op: Op, case: Case, inputs: Mapping[str, Any], frontend: Frontend, seed: int) -> list[Any]:
    """Random, since a cotangent of ones hides mistakes (through sinkhorn its gradient is zero)."""
    rng = np.random.default_rng((seed, 1))
    outputs = call_of(op, case, inputs).outputs.values()
    return [frontend.array(rng.standard_normal(o.shape), o.dtype) for o in outputs]


def call_of(op: Op, case: Case, arrays: Mapping[str, Any], dtype: str | None = None) -> Call:
    """The call of a case with arrays of any framework; with `dtype`, as if all that are floating-point had that one."""

    def describe(i: Input) -> Given | None:
        array = arrays.get(i.name)
        if array is None:
            return None
        return Given(tuple(array.shape), dtype if dtype and i.floating else str(array.dtype).removeprefix("torch."))

    return op.call([describe(i) for i in op.signature.inputs], [case.options.get(name, o.default) for name, o in op.options.items()])


def named(op: Op, outputs: tuple, gradients: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(op.output_names, outputs, strict=True)) | {f"d{name}": g for name, g in gradients.items()}


def errors(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """|found - truth| / |truth|, and the same of the largest entries. Absolute where the truth is zero."""
    if not truth.size:
        return 0.0, 0.0
    difference = found - truth
    norm, largest = np.linalg.norm(truth.ravel()), np.abs(truth).max()
    return float(np.linalg.norm(difference.ravel()) / (norm or 1)), float(np.abs(difference).max() / (largest or 1))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "passed": all(f.passed for f in findings),
        "errors": [asdict(f) | {"passed": f.passed} for f in findings if isinstance(f, Row)],
        "bits": [asdict(f) | {"passed": f.passed} for f in findings if isinstance(f, Agreement)],
    }
