"""Inputs of selective_scan as a Mamba block makes them from real text."""

import numpy as np

from bridge.case import Case
from bridge.text import embed, passages


def text_inputs(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """Bytes through an embedding and the projections of a Mamba block (Gu and Dao, 2023), weights as it initialises them.

    in_proj gives x and z, a causal convolution of width 4 and silu follow, x_proj gives a low-rank delta, B and C,
    dt_proj widens delta; delta_bias is the inverse softplus of steps between 0.001 and 0.1, A = -(1, ..., n).
    """
    b, t, d, n = (case.sizes[dim] for dim in "btdn")
    model, rank = max(d // 2, 1), max(d // 16, 1)

    def linear(inputs, outputs):
        return rng.uniform(-1, 1, (inputs, outputs)) / np.sqrt(inputs)

    hidden = embed(rng, passages(rng, b, t), model)
    x, z = np.split(hidden @ linear(model, 2 * d), 2, axis=-1)
    taps = rng.uniform(-1, 1, (4, d)) / 2
    padded = np.pad(x, ((0, 0), (3, 0), (0, 0)))
    x = sum(padded[:, i : i + t] * taps[i] for i in range(4))
    x = x / (1 + np.exp(-x))
    low, B, C = np.split(x @ linear(d, rank + 2 * n), [rank, rank + n], axis=-1)
    dt = np.exp(rng.uniform(np.log(0.001), np.log(0.1), d))
    return {
        "x": x,
        "delta": low @ (rng.uniform(-1, 1, (rank, d)) * rank**-0.5),
        "A": -np.tile(np.arange(1.0, n + 1), (d, 1)),
        "B": B,
        "C": C,
        "D": np.ones(d),
        "z": z,
        "delta_bias": dt + np.log(-np.expm1(-dt)),
        "initial_state": np.zeros((b, d, n)),
    }
