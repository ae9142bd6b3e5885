"""The kernel of sinkhorn's forward pass."""

import triton
import triton.language as tl

from bridge.ops.sinkhorn.growing import normalise_growing
from bridge.ops.sinkhorn.loop import normalise, softmax, wild
from bridge.ops.sinkhorn.tiles import exp, place, read, write


@triton.jit(do_not_specialize=["count", "iters"])
def forward(
    logits,
    count, iters,
    R,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """R (count n n) from logits (count n n)."""
    base, left = place(count, SIZE, S)
    M = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE)
    if ITERATES:
        rare = tl.max(wild(M).to(tl.int32)) if EPS > 0 and not ROW_COL else 0
        x = normalise(M, iters, SIZE, SETTLE, ROW_COL, EPS)
        if EPS > 0 and not ROW_COL:
            if rare > 0:
                M = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE, AGAIN=".cg")
                x = tl.where(wild(M), normalise_growing(M, iters, EPS), x)
    else:
        x = softmax(M) + EPS if ROW_COL else exp(M)
    write(R + base, left, x, SIZE)
