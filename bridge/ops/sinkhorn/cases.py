"""Named sizes of sinkhorn and mhc_bwd, and inputs for them."""

import numpy as np

from bridge.case import Case
from bridge.ops.sinkhorn.text import text_inputs


def logits(deviation: float):
    def sample(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
        n = case.sizes["n"]
        return {"logits": deviation * rng.standard_normal((*case.sizes["..."], n, n))}

    return sample


def case(name: str, leading: int | tuple[int, ...], n: int, deviation: float = 1.0, **options) -> Case:
    return Case(name, {"...": leading if isinstance(leading, tuple) else (leading,), "n": n}, logits(deviation), options)


def result(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """What sinkhorn returns after 20 iterations, near enough to a fixed point but not at it, and a gradient."""
    n = case.sizes["n"]
    R = np.exp(1.5 * rng.standard_normal((*case.sizes["..."], n, n)))
    for _ in range(20):
        R /= R.sum(-2, keepdims=True)
        R /= R.sum(-1, keepdims=True)
    return {"out": R, "dout": rng.standard_normal(R.shape)}


def bwd_case(name: str, leading: tuple[int, ...], n: int, **options) -> Case:
    return Case(name, {"...": leading, "n": n}, result, options)


# Small enough for the interpreter. Counts are odd, sizes mostly no powers of two.
CASES = (
    case("base", 7, 4),
    case("row_col", (2, 3), 4, order="row_col", eps=1e-6),
    case("col_row eps", 5, 3, 2.0, eps=1e-6, iters=9),
    case("row_col plain", 3, 5, 2.0, order="row_col", iters=9),
    case("one by one", (), 1, iters=1),
    case("two by two", (3, 1, 2), 2, 0.5, iters=8),
    case("no iterations", 7, 4, iters=0),
    case("softmax", 3, 3, order="row_col", iters=0, eps=1e-6),
    case("one iteration", 3, 8, order="row_col", iters=1),
    case("sixteen", 3, 16, 2.0),
    case("thirty-three", 1, 33, iters=9),
    case("implicit", 7, 4, gradient="implicit"),
    case("implicit row_col", 3, 5, order="row_col", eps=1e-6, gradient="implicit"),
    case("implicit sixteen", 2, 16, gradient="implicit"),
    Case("text", {"...": (2, 9), "n": 4}, text_inputs, {"order": "row_col", "eps": 1e-6}),
)

MHC_BWD_CASES = (
    bwd_case("base", (7,), 4),
    bwd_case("sixteen", (3,), 16),
    bwd_case("conjugate gradients", (2, 3), 5, cg_iters=6),
)

# What users run, for a GPU.
MODELS = (
    case("2^20 of 4x4", 2**20, 4),
    case("2^18 of 8x8", 2**18, 8),
    case("2^16 of 16x16", 2**16, 16),
)
MHC_BWD_MODELS = (bwd_case("2^20 of 4x4", (2**20,), 4), bwd_case("2^18 of 8x8", (2**18,), 8))

# One size grows: the number of matrices.
SWEEPS = {"count": tuple(case(f"2^{k} of 4x4", 2**k, 4) for k in range(14, 23, 2))}
