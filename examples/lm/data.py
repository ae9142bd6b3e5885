"""Real text: the sources of the Python standard library that this interpreter came with, byte by byte."""

import sysconfig
from pathlib import Path

import numpy as np

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT = 0.05  # of the text, at its end


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Text to train on, and text held out, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    if not len(text):
        raise FileNotFoundError(f"no sources in {root}")
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def passages(text: np.ndarray, count: int, length: int, *seed: int) -> np.ndarray:
    """count x (length + 1) bytes as int32, from random places: the same for the same seed, whatever came before."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
