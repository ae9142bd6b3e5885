"""Two loss curves and their difference, in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def draw(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both = len(losses) == 2
    figure, axes = plt.subplots(1 + both, squeeze=False, sharex=True, figsize=(7, 4 + 2 * both), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=False):
        axes[0, 0].plot(values, style, label=name)
    axes[0, 0].set(ylabel="loss in nats a byte")
    axes[0, 0].legend()
    if both:
        axes[1, 0].semilogy(difference(*losses.values()))
        axes[1, 0].set(ylabel="relative difference")
    axes[-1, 0].set(xlabel="step")
    figure.savefig(path)
    plt.close(figure)


def difference(one: Sequence[float], other: Sequence[float]) -> np.ndarray:
    a, b = np.asarray(one), np.asarray(other)
    return np.abs(a - b) / np.abs(a)
