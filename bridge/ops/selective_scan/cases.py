"""Named sizes of selective_scan, and inputs for them."""

from functools import partial

import numpy as np

from bridge.case import Case
from bridge.ops.selective_scan.text import text_inputs

OPTIONAL = ("D", "z", "delta_bias", "initial_state")


def sample(rng: np.random.Generator, case: Case, B: str = "b t n", C: str = "b t n") -> dict[str, np.ndarray]:
    """Values of the size that they have in a Mamba block: A from -1 to about -8, dt mostly below 1 and never negative.

    B and C have the forms that are asked for. With a size s, that many sequences are packed, of random lengths.
    """
    b, t, d, n = (case.sizes[dim] for dim in "btdn")
    normal = rng.standard_normal
    drawn: dict[str, np.ndarray] = {}
    if "s" in case.sizes:
        drawn["cu_seqlens"] = np.array([0, *np.sort(rng.integers(0, t + 1, case.sizes["s"] - 1)), t], np.int32)
    delta, bias = normal((b, t, d)) - 2, normal(d) / 4
    softplus = case.options.get("delta_softplus")
    return drawn | {
        "x": normal((b, t, d)),
        "delta": delta if softplus else np.log1p(np.exp(delta)),
        "A": -np.exp(rng.uniform(0, 2, (d, n))),
        "B": normal([case.sizes[dim] for dim in B.split()]),
        "C": normal([case.sizes[dim] for dim in C.split()]),
        "D": normal(d),
        "z": normal((b, t, d)),
        "delta_bias": bias if softplus else np.abs(bias),
        "initial_state": normal((case.sizes.get("s", b), d, n)),
    }


def case(
    name: str, b: int, t: int, d: int, n: int, without: tuple[str, ...] = (), B: str = "b t n", C: str = "b t n", g=1, s=None, **options
) -> Case:
    sizes = dict(b=b, t=t, d=d, n=n, g=g) | ({"s": s} if s else {})
    return Case(name, sizes, partial(sample, B=B, C=C), options, without)


PLAIN = ("D", "z", "delta_bias")

# Small enough for the interpreter; every size is ragged somewhere.
CASES = (
    case("base", 2, 19, 20, 16, PLAIN),
    case("no initial state", 1, 9, 5, 3, OPTIONAL, C="d n"),
    case("one step", 2, 1, 18, 4, PLAIN, B="b t g n", g=3),
    case("everything", 2, 21, 7, 5, delta_softplus=True),
    case("several segments", 1, 67, 3, 2, PLAIN, B="d n"),
    case("packed", 1, 23, 10, 4, s=5, B="b t g n", C="b t g n", g=2, delta_softplus=True),
    Case("text", dict(b=2, t=24, d=16, n=8), text_inputs, {"delta_softplus": True}, ("initial_state",)),
)

# What users run, for a GPU.
MODELS = (
    case("mamba 8x2048x2048", 8, 2048, 2048, 16, OPTIONAL),
    case("mamba 1x8192x2048", 1, 8192, 2048, 16, OPTIONAL),
    case("mamba 1x65536x2048", 1, 65536, 2048, 16, OPTIONAL),
    case("mamba 2x4096x5120", 2, 4096, 5120, 16, OPTIONAL),
    case("mamba 64x512x1536", 64, 512, 1536, 16, OPTIONAL),
    case("mamba 8x2048x2048, all options", 8, 2048, 2048, 16, ("initial_state",), delta_softplus=True),
)

# One size grows: t where b t stays as it is (2^25 elements in x, and one batch in the longest), and b.
SWEEPS = {
    "t": tuple(case(f"b t = 2^18, t = {t}", 2**18 // t, t, 128, 16, OPTIONAL) for t in (2**10, 2**12, 2**14, 2**16, 2**18)),
    "b": tuple(case(f"t = 2048, b = {b}", b, 2048, 2048, 16, OPTIONAL) for b in (1, 2, 4, 8, 16)),
}
