"""selective_scan and sinkhorn over several GPUs: compared with one GPU, then timed.

    torchrun --nproc-per-node 8 -- examples/several_gpus.py --framework torch    # a process for each GPU; "--", or torchrun takes --d
    python examples/several_gpus.py --framework jax                              # one process for all

Forward and backward, split over the batch, over channels, and over time. Results have to be those of one device on the same
inputs, gradients of weights included, or the exit status is 1. Without GPUs sizes are tiny, and devices are gloo's processes, or
those of XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from math import inf, isnan, prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bridge import ops
from bridge.backends import BACKENDS, choose
from bridge.case import Case
from bridge.dtypes import FLOATS, SIZES
from bridge.op import Call, Op
from bridge.ops.selective_scan.cases import case as scan_case
from bridge.ops.sinkhorn.cases import case as sinkhorn_case
from bridge.parity import call_of, draw_cotangents, errors, given
from bridge.sharding import part
from bridge.signature import ELLIPSIS

ROUNDING = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 1e-2}  # relative norm of the difference
SPLITS = {
    ("selective_scan", "b"): "batch",
    ("selective_scan", "d"): "channels",
    ("selective_scan", "t"): "time",
    ("sinkhorn", ELLIPSIS): "batch",
}

COLUMNS = (
    "op", "split over", "sizes", "ms, one", "ms, all", "speed-up", "ms, a part", "communication", "bytes sent", "largest error", "bits",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Times in milliseconds; bytes are what each device sends."""

    op: str
    split: str
    sizes: str
    one: float
    all: float
    speedup: float
    part: float  # the same call on one part alone, on one device
    communication: float  # share of the time that one part alone doesn't take
    bytes: int
    worst: str  # the result that differs most from that of one device
    error: float
    bits: str  # of the outputs
    passed: bool


def seconds(run, step: Callable[[], object], repeat: int) -> float:
    """Of a call among `repeat` that are started one behind another; the median of three rounds, of the slowest process."""
    run.wait(step())
    found = []
    for _ in range(3):
        run.meet()
        begun = time.perf_counter()
        for _ in range(repeat):
            results = step()
        run.wait(results)
        found.append((time.perf_counter() - begun) / repeat)
    return run.most(statistics.median(found))


def cut(op: Op, call: Call, card: str) -> tuple:
    """How the forward pass of training cuts time; sinkhorn has none."""
    launches = op.forward_plan(replace(call, card=card), True).launches
    return (len(launches), launches[-1].scalars) if "t" in call.sizes else ()


def measure(run, op: Op, dim: str, case: Case, backend: str | None, dtype: str, repeat: int) -> Row:
    """One op, split along `dim`. `run` is Devices of either framework."""
    values = given(run.frontend, case.inputs(), dtype)
    call, name = call_of(op, case, values), op.output_names[0]
    dy = draw_cotangents(op, case, values, run.frontend, 0)[0]
    axes = {key: form.index(dim) if dim in form else None for key, form in call.sizes.forms.items() if key in values}
    axes["y"] = next(iter(axes.values()))  # outputs are split as the first input is
    if dy.shape[axes["y"]] % run.count:
        raise SystemExit(f"{op.name}: {SPLITS[op.name, dim]} must divide by {run.count}, the number of devices, in {dict(case.sizes)}")

    options = {**case.options, "backend": backend}
    function = partial(getattr(run.ops, op.name), **options)
    split = partial(run.over_time, options) if dim == "t" else partial(run.over_batch, function)
    one = run.one_device(function, values, dy)
    several = split(run.all, {key: run.mine(v, axes[key]) for key, v in values.items()}, axes, run.mine(dy, axes["y"]))
    alone = split(run.alone, {key: run.part(v, axes[key]) for key, v in values.items()}, axes, run.part(dy, axes["y"]))

    def results(y, gradients, place=lambda array, axis: array):
        return {name: place(y, axes["y"]), **{f"d{key}": place(g, axes[key]) for key, g in gradients.items()}}

    found, wanted, numpy, bits = results(*several()), results(*one(), run.mine), run.frontend.numpy, run.frontend.bits
    differences = {key: errors(numpy(found[key]), numpy(wanted[key]))[0] for key in wanted}
    differences = {key: run.most(inf if isnan(error) else error) for key, error in differences.items()}
    worst = max(differences, key=lambda key: differences[key])
    same, promised = run.most(float((bits(found[name]) != bits(wanted[name])).any())) == 0, False
    verdict = "same" if same else "other"
    if dim != "t" and choose(op.name, backend, run.frontend.gpu)[0] != "reference":
        local, card = part(op, call, {f"{dim}0" if dim == ELLIPSIS else dim: run.count}), run.frontend.card()
        promised = local is not None and cut(op, call, card) == cut(op, local, card)
        if "t" in case.sizes:
            verdict += f", time is cut {'alike' if promised else 'otherwise'}"

    ring = 2 * (run.count - 1) / run.count  # how often a device sends an array for it to be summed over all, around a ring
    sent = sum(ring * prod(v.shape) * SIZES[dtype] for key, v in values.items() if axes[key] is None)
    if dim == "t":
        sizes = case.sizes
        sent += run.carries(sizes["b"] * sizes["d"] * (sizes["n"] + 1) * (8 if dtype == "float64" else 4))
    t_one, t_all, t_alone = (1e3 * seconds(run, step, repeat) for step in (one, several, alone))
    passed = differences[worst] <= ROUNDING[dtype] and (same or not promised)
    shown = " ".join(f"{key}={size}" for key, size in case.sizes.items() if key != "g")
    return Row(
        op.name, SPLITS[op.name, dim], shown, t_one, t_all, t_one / t_all, t_alone, 1 - t_alone / t_all, int(sent), worst,
        differences[worst], verdict, passed,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "jax"), required=True)
    for name in "btdn":
        parser.add_argument(f"--{name}", type=int, help="on a GPU 8 2048 2048 16, and over time 1 65536 2048 16")
    parser.add_argument("--dtype", choices=FLOATS, default="float32")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--repeat", type=int, help="calls of a timed round: 20, on a CPU 2")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    if asked.framework == "torch" and "RANK" not in os.environ:
        parser.error(
            "PyTorch takes a process for each device: torchrun --nproc-per-node COUNT -- examples/several_gpus.py --framework torch"
        )
    run = import_module(f"gpus.with_{asked.framework}").Devices()
    gpu, rows = run.frontend.gpu, []
    for name, dim in SPLITS:
        usual = ((1, 65536, 2048, 16) if dim == "t" else (8, 2048, 2048, 16)) if gpu else ((1, 32, 8, 4) if dim == "t" else (8, 8, 8, 4))
        b, t, d, n = (getattr(asked, key) or size for key, size in zip("btdn", usual, strict=True))
        # As many numbers in the matrices as in x.
        matrices = sinkhorn_case("", (b, max(t * d // n**2, 1)), n)
        case = matrices if name == "sinkhorn" else scan_case("", b, t, d, n, ("z", "initial_state"), delta_softplus=True)
        rows.append(measure(run, ops[name], dim, case, asked.backend, asked.dtype, asked.repeat or (20 if gpu else 2)))
    if run.rank == 0:
        kind = run.frontend.devices()[0]
        table = Table(*COLUMNS)
        for r in rows:
            times = f"{r.one:.3f}", f"{r.all:.3f}", f"{r.speedup:.2f}", f"{r.part:.3f}", f"{r.communication:.0%}"
            error = f"{'' if r.passed else 'FAILED: '}{r.worst} {r.error:.1e}"
            table.add_row(r.op, r.split, r.sizes, *times, str(r.bytes), error, r.bits, style=None if r.passed else "red")
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(f"{asked.framework}, {asked.dtype}, {run.count} x {kind}", table)
        if asked.json:
            about = {"framework": asked.framework, "dtype": asked.dtype, "devices": run.count, "device": kind}
            Path(asked.json).write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    run.close()
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main()
