"""python -m bridge parity | bench | info"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bridge import bench, info, parity, plot, tuning
from bridge.case import Case
from bridge.frontend import MODULES, Frontend, installed, load
from bridge.language import INTERPRETING
from bridge.op import Op
from bridge.ops import ops


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is not zero when a check fails."""
    parser = argparse.ArgumentParser(prog="python -m bridge", description="One Triton kernel, in PyTorch and in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    check = commands.add_parser(
        "parity", parents=[both], help="check each frontend against its own autodiff of the loops", description=parity.__doc__
    )
    check.add_argument("--op", choices=list(ops), help="only this op")
    check.add_argument("--frontend", choices=list(MODULES), help="only this frontend")
    check.add_argument("--dtype", choices=list(parity.BOUNDS), help="only this dtype, and all cases in it")
    check.add_argument("--seed", type=int, default=0, help="for other random inputs")
    check.add_argument("--all", action="store_true", help="a row for every output and gradient, not just the worst of each run")
    speed = commands.add_parser("bench", parents=[both], help="speed, beside what else is installed", description=bench.__doc__)
    speed.add_argument("--op", choices=list(ops), help="only this op")
    speed.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case, small ones too; again for more")
    speed.add_argument("--dtype", choices=list(parity.BOUNDS), help=f"only this dtype; else {' and '.join(bench.DTYPES)}")
    speed.add_argument("--frontend", choices=list(MODULES), help="only this frontend")
    speed.add_argument("--alone", action="store_true", help="nothing but our own")
    speed.add_argument("--sweep", action="store_true", help="instead of models, series in which one size grows")
    speed.add_argument("--compile", action="store_true", help="also the first call in a new process, for the first case of each op")
    speed.add_argument("--plot", type=Path, metavar="DIR", help="draw the series there, those of --sweep or --from")
    speed.add_argument(
        "--from",
        type=Path,
        action="append",
        dest="sources",
        metavar="FILE",
        help="measure nothing: show what --json has written; again for more",
    )
    speed.add_argument("--tune", action="store_true", help="measure the candidates of block sizes, and write this GPU's table")
    speed.add_argument("--first", action="store_true", help=argparse.SUPPRESS)  # what --compile runs
    commands.add_parser("info", parents=[both], help="versions, devices, and which backend will run", description=info.__doc__)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
    for flag, one, others in (("--tune", "tune", ("plot",)), ("--from", "sources", ("tune",))):
        for name in (*others, "json", "case", "sweep", "compile", "alone"):
            if getattr(options, one, None) and getattr(options, name):
                parser.error(f"--{name} means nothing with {flag}")
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    try:
        return {"parity": run_parity, "bench": run_bench, "info": run_info}[options.command](options, console)
    except ImportError as error:  # what is missing, and how to get it
        return refused(console, error)


def refused(console: Console, error: Exception) -> int:
    console.print(f"[red]{escape(str(error))}[/]")
    return 2


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def chosen(options: argparse.Namespace) -> list[Frontend]:
    """The frontends to be run. Raises ImportError where there is none, or one of them can't work."""
    names = [options.frontend] if options.frontend else installed()
    if not names:
        raise ImportError("neither torch nor jax is installed: pip install 'kernel-bridge[torch]' or 'kernel-bridge[jax]'")
    return [load(name) for name in names]


def run_parity(options: argparse.Namespace, console: Console) -> int:
    frontends = chosen(options)
    if not INTERPRETING and "TRITON_INTERPRET" not in os.environ and not any(f.gpu for f in frontends):
        # Kernels can only be interpreted here, and Triton decides on that when it is imported: start over.
        arguments = [sys.executable, "-m", "bridge", *options.arguments]
        os.execve(sys.executable, arguments, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **os.environ, "TRITON_INTERPRET": "1"})
    jobs = [job for job in parity.jobs(options.dtype) if options.op in (None, job[0].name)]
    findings: list[parity.Finding] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(jobs))

        def run(job: tuple[Op, Case, str]) -> list[parity.Finding]:
            done = list(parity.check(*job, frontends, options.seed))
            progress.update(task, description=f"{job[0].name}, {job[1].name}, {job[2]}", advance=1)
            return done

        # Most of the time goes into compilers, which let other threads run.
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            for more in pool.map(run, jobs):
                findings += more
    for name in dict.fromkeys(f.op for f in findings):
        console.print(error_table(name, [f for f in findings if isinstance(f, parity.Row) and f.op == name], options.all))
    agreements = [f for f in findings if isinstance(f, parity.Agreement)]
    for found in agreements:
        if not found.passed:
            where = f"{found.op}, {found.case}, {found.dtype}, {found.backend}"
            console.print(f"[red]different bits[/] in {' and '.join(found.frontends)}: {where}: {', '.join(found.differing)}")
    if agreements:
        equal = sum(f.passed for f in agreements)
        console.print(
            f"{equal} of {len(agreements)} runs of the same kernels gave the same bits in {' and '.join(agreements[0].frontends)}."
        )
    failed = [f for f in findings if not f.passed]
    rows = sum(isinstance(f, parity.Row) for f in findings)
    console.print(
        f"{rows} outputs and gradients checked: " + (f"[red]{len(failed)} checks failed[/]" if failed else "[green]all within bounds[/]")
    )
    if options.json:
        options.json.write_text(json.dumps(parity.as_json(findings) | {"environment": info.gather()}, indent=1) + "\n")
    return 1 if failed or not findings else 0


def error_table(op: str, rows: list[parity.Row], every: bool) -> Table:
    """The errors of an op: the worst quantity of each run, or all of them."""
    table = Table(
        "case",
        "dtype",
        "frontend",
        "backend",
        "quantity" if every else "worst",
        "|error| / |truth|",
        "max / max",
        "bound",
        "",
        title=op,
        title_justify="left",
    )
    runs: dict[tuple[str, ...], list[parity.Row]] = {}
    for row in rows:
        runs.setdefault((row.case, row.dtype, row.frontend, row.backend), []).append(row)
    for run, found in runs.items():
        shown = found if every else [max(found, key=lambda r: (not r.passed, r.norm))]
        for row in shown:
            verdict = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
            table.add_row(*run, row.quantity, f"{row.norm:.1e}", f"{row.maximum:.1e}", f"{row.bound:.0e}", verdict)
    return table


def run_bench(options: argparse.Namespace, console: Console) -> int:
    if options.sources:
        found = [json.loads(source.read_text()) for source in options.sources]
        shown = [bench.Row(**row) for each in found for row in each["rows"]]
        return show_bench(shown, [bench.First(**first) for each in found for first in each["first_calls"]], options, console)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory that torch needs too
    frontends = chosen(options)
    gpu = any(f.gpu for f in frontends)
    try:
        jobs = bench.jobs(gpu, options.op, options.case, options.dtype, options.sweep or options.plot is not None)
        for frontend in frontends:
            bench.choose("bench", None, frontend.gpu)
    except ValueError as error:
        return refused(console, error)
    if options.first:
        print(json.dumps(bench.first_calls(jobs[0], frontends[0])))
        return 0
    if options.tune:
        return run_tune(options, frontends, console)
    rows: list[bench.Row] = []
    firsts: list[bench.First] = []
    failed = 0
    measured = bench.Bench(frontends, options.alone)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{job.op.name}, {job.case.name}, {job.dtype}")
            rows += measured.run(job)
            progress.advance(task)
        write(options, rows, firsts, measured)  # first of all: it has taken a while
        for job in {job.op.name: job for job in reversed(jobs)}.values() if options.compile else ():
            progress.update(task, description=f"{job.op.name}, first calls")
            for frontend in frontends:
                try:
                    firsts += bench.compile_times(job, frontend)
                except RuntimeError as error:  # the process that was to make them
                    console.print(f"[red]{escape(str(error))}[/]")
                    failed = 1
    write(options, rows, firsts, measured)
    if not gpu:
        console.print(f"No GPU: small cases on backend '{rows[0].backend}', by the clock on the wall.")
    return max(failed, show_bench(rows, firsts, options, console))


def write(options: argparse.Namespace, rows: list[bench.Row], firsts: list[bench.First], measured: bench.Bench) -> None:
    if options.json:
        told = bench.as_json(options.arguments, rows, firsts, measured) | {"environment": info.gather()}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


def run_tune(options: argparse.Namespace, frontends: list[Frontend], console: Console) -> int:
    from bridge.tuning.search import tune

    frontend = next((f for f in frontends if f.gpu), None)
    if frontend is None:
        console.print("[red]--tune needs a GPU[/]")
        return 2
    if not os.access(tuning.FOLDER, os.W_OK):  # before all the measuring
        console.print(f"[red]--tune writes to {tuning.FOLDER}, and may not[/]")
        return 2
    tuned = [ops[options.op]] if options.op else list(ops.values())
    with progress_bar(console) as progress:
        task = progress.add_task("")
        told = frontend.versions() | {"triton": info.gather()["triton"]}
        file = tune(
            frontend, tuned, options.dtype or bench.DTYPES[0],
            lambda what, total: progress.update(task, description=what, total=total, advance=1), frontend.devices()[0], told,
        )  # fmt: skip
    console.print(f"wrote {file}")
    return 0


def show_bench(rows: list[bench.Row], firsts: list[bench.First], options: argparse.Namespace, console: Console) -> int:
    for name in dict.fromkeys(row.op for row in rows):
        console.print(speed_table(name, [row for row in rows if row.op == name]))
    for series, times in bench.growth(rows).items():
        console.print(f"{series}: the longest sequence takes {times:.2f} times as long as the shortest, at the same b t d")
    if firsts:
        table = Table("op", "case", "dtype", "frontend", "Triton's cache", "forward s", "backward s", title="first call in a process")
        for first in firsts:
            seconds = f"{first.forward:.2f}", f"{first.backward:.2f}" if first.backward else "-"
            table.add_row(first.op, first.case, first.dtype, first.frontend, "full" if first.cached else "empty", *seconds)
        console.print(table)
    if options.plot:
        try:
            drawn = plot.draw([vars(row) for row in rows], options.plot)
        except ValueError as error:
            return refused(console, error)
        console.print("drew " + ", ".join(map(str, drawn)))
    failed = sum(row.failed for row in rows)
    if failed:
        console.print(f"[red]{failed} measurements failed[/]")
    return 1 if failed or not rows else 0


def speed_table(op: str, rows: list[bench.Row]) -> Table:
    """The times of an op; on a GPU with what the card could do."""
    gpu = any(row.copy_share for row in rows)
    limits = ("GB/s", "of a copy", "of exp limit", "peak MB", "floor MB", "host µs") if gpu else ()
    table = Table("case", "dtype", "pass", "by", "frontend", "ms", *limits, "", title=op, title_justify="left")
    for row in rows:
        marked = f"[red]{escape(row.note)}[/]" if row.failed else escape(row.note)
        cells = [row.case, row.dtype, row.which, row.by, row.frontend, f"{1e3 * row.seconds:.3f}" if row.seconds else "-"]
        if gpu:
            cells += [
                f"{row.moved / row.seconds / 1e9:.0f}" if row.seconds else "-",
                f"{row.copy_share:.0%}" if row.copy_share else "-",
                f"{row.exponential_share:.0%}" if row.exponential_share else "-",
                f"{row.peak / 1e6:.0f}" if row.peak is not None else "-",
                f"{row.made / 1e6:.0f}",
                f"{1e6 * row.host:.0f}" if row.host else "-",
            ]
        table.add_row(*cells, "at most: the host was behind" if row.starved else marked)
    return table


def run_info(options: argparse.Namespace, console: Console) -> int:
    found = info.gather()
    table = Table("", "", show_header=False, box=None)
    for name in ("python", "kernel-bridge", "triton", "numpy"):
        table.add_row(name, found[name])
    for name, value in found["environment"].items():
        table.add_row(name, value)
    for name, frontend in found["frontends"].items():
        versions = ", ".join(f"{k} {v}" for k, v in frontend.get("versions", {}).items())
        table.add_row(f"{name}_ops", versions or f"[red]{frontend['problem']}[/]")
        if versions:
            table.add_row("", "devices: " + ", ".join(frontend["devices"]))
            table.add_row("", frontend.get("problem") or f"runs backend '{frontend['backend']}': {frontend['reason']}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
