"""Inputs of sinkhorn as a block with manifold-constrained hyper-connections makes them from real text."""

import numpy as np

from bridge.case import Case
from bridge.text import embed, passages


def text_inputs(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """Bytes as n residual streams, and the mixing logits of a block (Xie et al., 2025, equation 7).

    The streams of a byte begin equal and have grown apart by earlier blocks. Together they are normalised by their root
    mean square and projected to n n numbers; a small learned scale and a bias towards keeping each stream follow.
    """
    *leading, batch, length = case.sizes["..."]
    n, width = case.sizes["n"], 32
    assert not leading, "text has the leading dimensions (batch, length)"
    hidden = embed(rng, passages(rng, batch, length), width)
    grown = np.stack([hidden @ rng.standard_normal((width, width)) / np.sqrt(width) for _ in range(n)], axis=-2)
    streams = (hidden[..., None, :] + grown).reshape(batch, length, n * width)
    streams /= np.sqrt(np.mean(streams**2, -1, keepdims=True) + 1e-6)
    projection = rng.standard_normal((n * width, n * n)) / np.sqrt(n * width)
    logits = 0.3 * (streams @ projection).reshape(batch, length, n, n) + 2 * np.eye(n)
    return {"logits": logits}
