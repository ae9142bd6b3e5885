"""Speed: every op in every frontend, beside what else is installed and what the card can do.

On a GPU: sizes of real models, by default in bfloat16 and float32; the time of a pass on the device, the bytes it must move
as a share of what a copy reaches in the same run, its exponentials as a share of what the card can compute, the memory it
allocates, and how long the host takes to start it. Without a GPU: small cases on the backend that runs there, and wall
clocks. docs/performance.md says how each is measured.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bridge import limits
from bridge.backends import choose
from bridge.case import Case
from bridge.frontend import Baseline, Frontend
from bridge.op import Call, Op
from bridge.ops import ops
from bridge.parity import call_of, errors, given

DTYPES = ("bfloat16", "float32")
SECONDS = 0.05  # that a pass is measured for
PERIOD = {"b": 1, "t": 512, "...": 2**12}  # inputs are drawn for so much, and repeated: times don't depend on them
COPIED = 2**28  # bytes
AGREES = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 3e-2, "float16": 3e-2}  # of a baseline with the op
OURS = "kernel-bridge"


@dataclass(frozen=True)
class Row:
    """One pass of one case, as one implementation ran it. Times in seconds, sizes in bytes."""

    op: str
    case: str
    sweep: str  # the series that the case belongs to, or ""
    size: int  # what grows in the series
    dtype: str
    which: str
    frontend: str
    by: str
    backend: str
    seconds: float | None = None
    starved: bool = False
    moved: int = 0
    copy_share: float | None = None
    exponential_share: float | None = None
    peak: int | None = None
    made: int = 0
    host: float | None = None
    note: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Job:
    op: Op
    case: Case
    dtype: str
    sweep: str = ""


@dataclass(frozen=True)
class First:
    """The seconds of the first calls in a fresh process: the forward pass of training, then the backward one."""

    op: str
    case: str
    dtype: str
    frontend: str
    cached: bool  # whether Triton had compiled the same kernels in an earlier process
    forward: float
    backward: float | None


def jobs(gpu: bool, op: str | None = None, cases: Sequence[str] = (), dtype: str | None = None, sweep: bool = False) -> list[Job]:
    """What is to be run: the cases that are named, or the series, or else what users run (on a GPU) or the first small case.

    Raises ValueError where that is nothing.
    """
    chosen, dtypes = [ops[op]] if op else list(ops.values()), (dtype,) if dtype else DTYPES if gpu else ("float32",)
    if sweep and not gpu:
        raise ValueError("series are for a GPU")
    if sweep:
        found = [Job(o, c, dtypes[0], name) for o in chosen for name, series in o.sweeps.items() for c in series]
    elif cases:
        found = [Job(o, c, d) for o in chosen for c in named(o) for d in dtypes if c.name in cases]
    else:
        found = [Job(o, c, d) for o in chosen for c in (o.models if gpu else o.cases[:1]) for d in dtypes]
    missing = set(cases) - {job.case.name for job in found}
    if missing or not found:
        known = ", ".join(repr(c.name) for o in chosen for c in named(o))
        raise ValueError(
            f"no case named {', '.join(map(repr, missing))}, but {known}" if missing else f"nothing of {op} to run: name a case"
        )
    return found


def named(op: Op) -> Iterator[Case]:
    """All cases that an op has a name for."""
    return chain(op.models, op.cases, *op.sweeps.values())


class Bench:
    """What all measurements of a run share."""

    def __init__(self, frontends: list[Frontend], alone: bool = False, seconds: float = SECONDS):
        self.frontends, self.alone, self.seconds = frontends, alone, seconds
        self.card = limits.card() if any(f.gpu for f in frontends) else None
        self.copy: dict[str, float] = {}  # bytes a second, read and written, by frontend
        for frontend in frontends:
            if frontend.gpu:
                self.copy[frontend.name] = 2 * COPIED / frontend.time(frontend.copying(COPIED), seconds).seconds
        self.compared: dict[tuple, float] = {}  # (frontend, baseline, op, dtype, options) -> relative difference

    def run(self, job: Job) -> Iterator[Row]:
        for frontend in self.frontends:
            yield from self._ours(job, frontend)
            for baseline in [] if self.alone else frontend.baselines(job.op):
                yield from self._theirs(job, frontend, baseline)
            frontend.free()

    def _ours(self, job: Job, frontend: Frontend) -> Iterator[Row]:
        try:
            call, inputs, cotangents = draw(job, frontend)
        except Exception as error:
            yield replace(self._row(job, frontend, OURS, "forward", full_call(job)), note=brief(error), failed=True)
            return
        function = partial(frontend.function(job.op), **job.case.options)
        for which in limits.PASSES if job.op.backward else ("forward",):
            row = self._row(job, frontend, OURS, which, call)
            try:
                prepared = frontend.prepare(function, inputs, cotangents, which)
                row = self._timed(row, frontend, prepared, call, job.op)
                if frontend.gpu and which == "forward":
                    row = replace(row, host=frontend.host_time(function, inputs))
            except Exception as error:  # the others are still worth knowing
                row = replace(row, note=brief(error), failed=True)
            yield row

    def _theirs(self, job: Job, frontend: Frontend, baseline: Baseline) -> Iterator[Row]:
        full = full_call(job)
        for which in passes_of(job.op):
            row = self._row(job, frontend, baseline.name, which, full)
            refused = baseline.refuse(full)
            try:
                if refused:
                    yield replace(row, note=refused)
                    continue
                difference = self._difference(job, frontend, baseline)
                if not difference <= AGREES[job.dtype]:
                    yield replace(row, note=f"its results differ by {difference:.0e}: not timed")
                    continue
                _, inputs, cotangents = draw(job, frontend)
                prepared = other(job, frontend, baseline, inputs, cotangents, which)
                yield self._timed(row, frontend, prepared, full, job.op)
            except Exception as error:  # of others' code: memory that runs out, kernels that don't compile
                yield replace(row, note=brief(error))

    def _difference(self, job: Job, frontend: Frontend, baseline: Baseline) -> float:
        """How far the baseline is from the op, outputs and gradients, on inputs of one period: compared once."""
        key = frontend.name, baseline.name, job.op.name, job.dtype, tuple(job.case.options.items())
        if key not in self.compared:
            small = replace(job, case=thin(job)[0])
            _, inputs, cotangents = draw(small, frontend)
            function, worst = partial(frontend.function(job.op), **job.case.options), 0.0
            for which in passes_of(job.op):
                ours = frontend.prepare(function, inputs, cotangents, which)()
                theirs = other(job, frontend, baseline, inputs, cotangents, which)()
                for a, b in zip(arrays(theirs), arrays(ours), strict=True):
                    difference = errors(frontend.numpy(baseline.leave(a)), frontend.numpy(b))[0]
                    worst = max(worst, difference) if difference == difference else math.inf
            self.compared[key] = worst
        return self.compared[key]

    def _row(self, job: Job, frontend: Frontend, by: str, which: str, call: Call) -> Row:
        backend = choose(job.op.name, None, frontend.gpu)[0] if by == OURS else ""
        size = call.sizes.get(job.sweep, math.prod(call.sizes.leading))
        moved, made = limits.moved(job.op, call, which), limits.made(job.op, call, which)
        return Row(job.op.name, job.case.name, job.sweep, size, job.dtype, which, frontend.name, by, backend, moved=moved, made=made)

    def _timed(self, row: Row, frontend: Frontend, prepared: Any, call: Call, op: Op) -> Row:
        timing = frontend.time(prepared, self.seconds)
        row = replace(row, seconds=timing.seconds, starved=timing.starved)
        if frontend.gpu:
            count = limits.exponentials(op, call, row.which) if row.by == OURS else None
            row = replace(
                row,
                copy_share=row.moved / timing.seconds / self.copy[frontend.name],
                exponential_share=count / self.card.exponentials / timing.seconds if count and self.card else None,
                peak=frontend.peak(prepared),
            )
        return row


def passes_of(op: Op) -> tuple[str, ...]:
    """Those that are timed beside others. A gradient that goes through the loop is not ours."""
    return ("forward", "backward") if op.backward else ("forward",)


def thin(job: Job) -> tuple[Case, dict[str, np.ndarray]]:
    """The case with as much as inputs are drawn for, and these. Packed sequences are drawn in full."""
    sizes = dict(job.case.sizes)
    for dim, period in PERIOD.items():
        if dim == "..." and dim in sizes:
            sizes[dim] = tuple(math.gcd(size, period) for size in sizes[dim])
        elif dim in sizes and "s" not in sizes:
            sizes[dim] = math.gcd(sizes[dim], period)
    case = replace(job.case, sizes=sizes)
    return case, case.inputs()


def repeats(job: Job, dims: tuple[str, ...], sizes: Any) -> list[int]:
    """How often the drawn array stands in the full one, along each axis."""
    full: list[int] = []
    for dim in dims:
        if dim == "...":
            full += [a // b for a, b in zip(job.case.sizes[dim], sizes[dim], strict=True)]
        else:
            full.append(job.case.sizes[dim] // sizes[dim] if dim in PERIOD else 1)
    return full


def full_call(job: Job) -> Call:
    case, values = thin(job)
    forms = call_of(job.op, case, values, job.dtype).sizes.forms
    shapes = {
        name: np.broadcast_to(np.zeros((), value.dtype), np.multiply(value.shape, repeats(job, forms[name], case.sizes)))
        for name, value in values.items()
    }
    return call_of(job.op, job.case, shapes, job.dtype)


def draw(job: Job, frontend: Frontend) -> tuple[Call, dict[str, Any], list[Any]]:
    """The call of a job, with its card; inputs, and a gradient of each output that a call returns."""
    case, values = thin(job)
    drawn = given(frontend, values, job.dtype)
    forms, rng = call_of(job.op, case, values, job.dtype).sizes.forms, np.random.default_rng(1)
    inputs = {name: frontend.tile(array, repeats(job, forms[name], case.sizes)) for name, array in drawn.items()}
    call = replace(full_call(job), card=frontend.card())
    shown = [o for o in job.op.signature.outputs if not o.optional]
    cotangents = []
    for output in shown:
        times = repeats(job, forms[output.name], case.sizes)
        small = rng.standard_normal([size // k for size, k in zip(call.outputs[output.name].shape, times, strict=True)])
        cotangents.append(frontend.tile(frontend.array(small, call.outputs[output.name].dtype), times))
    return call, inputs, cotangents


def other(job: Job, frontend: Frontend, baseline: Baseline, inputs: dict[str, Any], cotangents: list[Any], which: str) -> Any:
    """A pass of a baseline, prepared."""
    entered = {name: baseline.enter(name, array) for name, array in inputs.items()}
    function = partial(baseline.function, **job.case.options)
    return frontend.prepare(function, entered, [baseline.enter("", array) for array in cotangents], which)


def arrays(results: Any) -> list[Any]:
    """The arrays of a pass: one, several, or gradients by name in the inputs' order."""
    if isinstance(results, dict):
        return [results[name] for name in sorted(results)]
    if isinstance(results, (tuple, list)):
        return [array for each in results for array in arrays(each)]
    return [results]


def brief(error: Exception) -> str:
    """An error in one short line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:100]}"


def first_calls(job: Job, frontend: Frontend) -> dict[str, float]:
    """The seconds of this process's first calls, with all that they compile."""
    _, inputs, cotangents = draw(job, frontend)
    frontend.wait(list(inputs.values()))
    function, found = partial(frontend.function(job.op), **job.case.options), {}
    for which in passes_of(job.op):
        prepared = frontend.prepare(function, inputs, cotangents, "training forward" if which == "forward" else which)
        begun = time.perf_counter()
        frontend.wait(prepared())
        found[which] = time.perf_counter() - begun
    return found


def compile_times(job: Job, frontend: Frontend) -> Iterator[First]:
    """In two processes, one after the other, that share a new folder for Triton's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        names = ("--op", job.op.name, "--case", job.case.name, "--dtype", job.dtype, "--frontend", frontend.name)
        for cached in (False, True):
            command = [sys.executable, "-m", "bridge", "bench", *names, "--first"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            yield First(job.op.name, job.case.name, job.dtype, frontend.name, cached, found["forward"], found.get("backward"))


def growth(rows: list[Row]) -> dict[str, float]:
    """Of series over t: the time of the longest sequence over that of the shortest."""
    found = {}
    series: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.sweep == "t" and row.by == OURS and row.seconds:
            series.setdefault((row.op, row.frontend, row.dtype, row.which), []).append(row)
    for key, some in series.items():
        ordered = sorted(some, key=lambda row: row.size)
        if ordered[0].size < ordered[-1].size:
            found[", ".join(key)] = (ordered[-1].seconds or 0) / (ordered[0].seconds or math.inf)
    return found


def commit() -> str:
    """The commit of the checkout that runs, with a + where it was changed; nothing where it is none."""
    folder = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    if git("rev-parse", "--show-toplevel") != str(folder.resolve()):  # installed within another repository
        return ""
    found = git("rev-parse", "--short=12", "HEAD")
    return found + "+" * bool(found and git("status", "--porcelain", "--untracked-files=no"))


def as_json(arguments: Sequence[str], rows: list[Row], firsts: list[First], bench: Bench | None = None) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in rows],
        "first_calls": [asdict(first) for first in firsts],
        "growth": growth(rows),
        "copy": bench.copy if bench else {},
        "card": asdict(bench.card) if bench and bench.card else None,
        "command": "python -m bridge " + " ".join(arguments),
        "commit": commit(),
    }
