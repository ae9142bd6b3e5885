"""Plots of what bench has measured, a file for each series in which one size grows. Needs matplotlib: the extra "bench"."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLES = {"forward": "-", "training forward": "--", "backward": ":"}
LABELS = {"t": "t, time steps", "b": "b, batch", "count": "matrices"}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Time over size, for every series among the rows. Raises ImportError without matplotlib, ValueError where nothing is to be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: pip install 'kernel-bridge[bench]' ({error})") from error
    series = list(dict.fromkeys((row["op"], row["sweep"]) for row in rows if row["sweep"]))
    if not series:
        raise ValueError("no series among the measurements: measure with --sweep")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for op, sweep in series:
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        found = lines(rows, op, sweep)
        who = list(dict.fromkeys(label for label, _ in found))
        for (label, which), points in found.items():  # a colour for each, a dash for each pass
            axes.plot(*zip(*points, strict=True), STYLES[which], color=f"C{who.index(label)}", marker=".", label=f"{label}, {which}")
        axes.set(xscale="log", yscale="log", xlabel=LABELS[sweep], ylabel="milliseconds", title=op)
        axes.set_xscale("log", base=2)
        axes.grid(which="both", alpha=0.3)
        axes.legend(fontsize="small")
        files.append(folder / f"{op}_{sweep}.svg")
        figure.savefig(files[-1])
    return files


def lines(rows: Sequence[Mapping[str, Any]], op: str, sweep: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(who, pass) -> points of size and milliseconds, in order of size."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if (row["op"], row["sweep"]) == (op, sweep) and row["seconds"]:
            found.setdefault((f"{row['by']} ({row['frontend']}, {row['dtype']})", row["which"]), []).append(
                (row["size"], 1e3 * row["seconds"])
            )
    return {key: sorted(points) for key, points in found.items()}
