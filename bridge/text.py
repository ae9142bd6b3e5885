"""Real text, from what every machine has: the sources of the Python standard library."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

FILES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py", "zipfile.py")


@cache
def _corpus() -> np.ndarray:
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for name in FILES for path in [folder / name] if path.is_file())
    if not data:
        raise FileNotFoundError(f"none of {', '.join(FILES)} is in {folder}")
    return np.frombuffer(data, np.uint8)


def passages(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """count x length bytes: passages that start at random places."""
    corpus = _corpus()
    starts = rng.integers(0, len(corpus) - length, count)
    return corpus[starts[:, None] + np.arange(length)]


def embed(rng: np.random.Generator, text: np.ndarray, width: int) -> np.ndarray:
    """Each byte as a vector of `width` numbers from a fixed random table, normalised as before a block of a model."""
    vectors = rng.standard_normal((256, width))[text]
    return vectors / np.sqrt(np.mean(vectors**2, -1, keepdims=True))
