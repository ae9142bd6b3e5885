"""Train a byte-level Mamba language model on the sources of the Python standard library, in PyTorch, in JAX, or in both.

    python examples/train_lm.py --framework both

The two frameworks start from the same weights, see the same batches and have the same hyper-parameters. A checkpoint that
one has written can be resumed in the other.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks may share a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a CPU the loop's operations are small: threads cost PyTorch more than they save

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parent))

from lm import checkpoint, data, plot
from lm.settings import SIZES, Settings

PROMPTS = (b"def ", b"import ", b"class ")
EVERY = 10  # steps between two looks at the losses, which wait for a GPU


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch", "both"), default="both")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--streams", type=int, help="residual streams, mixed by sinkhorn (mHC); 1 by default")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int, help="bytes of a passage")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="what is computed in; weights are float32")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, default=Path("build/lm"), help="folder for checkpoints and the picture")
    parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from a checkpoint, of either framework")
    parser.add_argument("--samples", type=int, default=200, metavar="BYTES", help="length of the samples at the end; 0 for none")
    return parser.parse_args()


def settings(given: argparse.Namespace) -> Settings:
    named = {name: getattr(given, name) for name in ("steps", "batch", "length", "rate", "dtype", "seed")}
    chosen = SIZES[given.size].changed(**named)
    return chosen if given.streams is None else replace(chosen, config=replace(chosen.config, streams=given.streams))


def train(trainer, chosen: Settings, losses: list[float], folder: Path, save_every: int, console: Console, name: str) -> list[float]:
    """Goes on from the losses so far, and writes checkpoints. Returns all losses."""
    text, held_out = data.corpus()
    shown = data.passages(held_out, chosen.batch, chosen.length, chosen.seed)
    columns = (TextColumn(f"{name:5}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    begun, pending = time.perf_counter(), []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=chosen.steps, completed=len(losses), loss="")
        for step in range(len(losses), chosen.steps):
            pending.append(trainer.step(step, data.passages(text, chosen.batch, chosen.length, chosen.seed, step)))
            last = step + 1 == chosen.steps
            if len(pending) == EVERY or last or (step + 1) % save_every == 0:
                losses += map(float, pending)
                pending.clear()
                progress.update(task, completed=step + 1, loss=f"{np.mean(losses[-EVERY:]):.3f} nats a byte")
            if last or (step + 1) % save_every == 0:
                checkpoint.save(folder, chosen.config, trainer.arrays(), losses)
    seconds = time.perf_counter() - begun
    console.print(f"{name}: {losses[0]:.3f} at first, {np.mean(losses[-EVERY:]):.3f} at the end, "
                  f"{trainer.evaluate(shown):.3f} nats a byte on held-out text; {seconds:.0f} s; {folder}")  # fmt: skip
    return losses


def main() -> None:
    given, console = arguments(), Console(highlight=False)
    chosen, arrays, before = settings(given), None, []
    if given.resume:
        config, arrays, before = checkpoint.load(given.resume)
        if given.streams not in (None, config.streams):
            sys.exit(f"--streams {given.streams}: the model of {given.resume} has {config.streams}")
        if len(before) >= chosen.steps:
            sys.exit(f"{given.resume} has been trained for {len(before)} steps of {chosen.steps}: ask for more with --steps")
        chosen = replace(chosen, config=config)
    given.out.mkdir(parents=True, exist_ok=True)
    curves = {}
    for name in ("torch", "jax") if given.framework == "both" else (given.framework,):
        trainer = import_module(f"lm.with_{name}").Trainer(chosen, arrays, len(before))
        arrays = arrays or trainer.arrays()  # so that the other one starts from the same weights
        curves[name] = train(trainer, chosen, list(before), given.out / name, given.save_every, console, name)
        for i, prompt in enumerate(PROMPTS if given.samples else ()):
            sample = prompt + trainer.generate(prompt, given.samples, 0.8, chosen.seed + i)
            console.rule(f"{name}: {prompt.decode()}")
            console.print(sample.decode(errors="replace"), markup=False)
        del trainer
    plot.draw(curves, given.out / "losses.png")
    if len(curves) == 2:
        apart = plot.difference(*curves.values())
        console.print(f"relative difference of the losses: {apart[0]:.1e} at first, at most {apart.max():.1e}; {given.out / 'losses.png'}")


if __name__ == "__main__":
    main()
