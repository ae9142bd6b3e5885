"""Named sizes of selective_scan, and inputs for them."""

import numpy as np

from bridge.case import Case
from bridge.ops.selective_scan.text import text_inputs

OPTIONAL = ("D", "z", "delta_bias", "initial_state")


def sample(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """Values of the size that they have in a Mamba block: A from -1 to about -8, dt mostly below 1 and never negative."""
    b, t, d, n = (case.sizes[dim] for dim in "btdn")
    normal = rng.standard_normal
    delta, bias = normal((b, t, d)) - 2, normal(d) / 4
    softplus = case.options.get("delta_softplus")
    return {
        "x": normal((b, t, d)),
        "delta": delta if softplus else np.log1p(np.exp(delta)),
        "A": -np.exp(rng.uniform(0, 2, (d, n))),
        "B": normal((b, t, n)),
        "C": normal((b, t, n)),
        "D": normal(d),
        "z": normal((b, t, d)),
        "delta_bias": bias if softplus else np.abs(bias),
        "initial_state": normal((b, d, n)),
    }


def case(name: str, b: int, t: int, d: int, n: int, without: tuple[str, ...] = (), **options) -> Case:
    return Case(name, dict(b=b, t=t, d=d, n=n), sample, options, without)


PLAIN = ("D", "z", "delta_bias")

# Small enough for the interpreter; every size is ragged somewhere.
CASES = (
    case("base", 2, 19, 20, 16, PLAIN),
    case("no initial state", 1, 9, 5, 3, OPTIONAL),
    case("one step", 2, 1, 17, 4, PLAIN),
    case("everything", 2, 21, 7, 5, delta_softplus=True),
    case("several segments", 1, 67, 3, 2, PLAIN),
    Case("text", dict(b=2, t=24, d=16, n=8), text_inputs, {"delta_softplus": True}, ("initial_state",)),
)

# What users run, for a GPU.
MODELS = (
    case("mamba 8x2048x2048", 8, 2048, 2048, 16, OPTIONAL),
    case("mamba 1x8192x2048", 1, 8192, 2048, 16, OPTIONAL),
    case("mamba 1x65536x2048", 1, 65536, 2048, 16, OPTIONAL),
    case("mamba 2x4096x5120", 2, 4096, 5120, 16, OPTIONAL),
    case("mamba 64x512x1536", 64, 512, 1536, 16, OPTIONAL),
)
