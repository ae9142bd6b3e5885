"""python -m bridge parity | info"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bridge import info, parity
from bridge.case import Case
from bridge.frontend import MODULES, installed, load
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
    commands.add_parser("info", parents=[both], help="versions, devices, and which backend will run", description=info.__doc__)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    return run_parity(options, console) if options.command == "parity" else run_info(options, console)


def run_parity(options: argparse.Namespace, console: Console) -> int:
    names = [options.frontend] if options.frontend else installed()
    if not names:
        console.print("neither torch nor jax is installed: pip install 'kernel-bridge\\[torch]' or 'kernel-bridge\\[jax]'")
        return 2
    frontends = [load(name) for name in names]
    if not INTERPRETING and "TRITON_INTERPRET" not in os.environ and not any(f.gpu for f in frontends):
        # Kernels can only be interpreted here, and Triton decides on that when it is imported: start over.
        arguments = [sys.executable, "-m", "bridge", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **os.environ, "TRITON_INTERPRET": "1"})
    jobs = [job for job in parity.jobs(options.dtype) if options.op in (None, job[0].name)]
    findings: list[parity.Finding] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
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
