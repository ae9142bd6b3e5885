"""What sinkhorn and mhc_bwd are counted as: the arithmetic of their definition, and of its derivative. Additions of eps aren't."""

import math

from bridge.op import Call


def sinkhorn_flops(call: Call) -> tuple[int, int]:
    count, n, iters = math.prod(call.sizes.leading), call.sizes["n"], call.options["iters"]
    divisions = 2 * iters if iters or call.options["order"] == "col_row" else 1  # by sums; the softmax has the first
    # Of an entry: its exponential, and of each division the sum and the quotient; backwards (dR - sum of dR R) / sum.
    backward = n * n * (1 + 4 * divisions) if call.options["gradient"] == "unrolled" else _solution(n, None)
    return count * n * n * (1 + 2 * divisions), count * backward


def mhc_bwd_flops(call: Call) -> tuple[int, int]:
    forward = math.prod(call.sizes.leading) * _solution(call.sizes["n"], call.options["cg_iters"])
    return forward, 2 * forward


def _solution(n: int, steps: int | None) -> int:
    """The system of u and v, and R (G - u - v): by elimination of u, and of v as a symmetric matrix; or a step of conjugate
    gradients as two products with R and six operations on vectors."""
    return 4 * n**3 // 3 + 13 * n * n if steps is None else 6 * n * n + steps * (4 * n * n + 24 * n)
