"""The gradient of sinkhorn's loop."""

import triton
import triton.language as tl

from bridge.ops.sinkhorn.growing import unrolled_growing
from bridge.ops.sinkhorn.loop import advance, divide_columns, iterate, softmax, start, step, wild
from bridge.ops.sinkhorn.tiles import exp, over_columns, place, power, read, top_column, weigh_columns, weigh_rows, write


@triton.jit
def take_back_rows(P, D, u, v):
    """D before a division by row sums: less what went through the u that it made."""
    return D - v * (u * weigh_columns(P, D))


@triton.jit
def take_back_columns(P, D, u, v):
    """D before a division by column sums: less what went through the v that it made."""
    return D - u * (v * weigh_rows(P, D))


@triton.jit
def take_back_softmax(P, D, u, v):
    """The derivative with respect to the logits, from D before the first division, where P u v is their softmax.

    Where one entry of a row is nearly all of it, what comes out is the small difference of equal numbers, with their
    rounding errors; and near a permutation all of the gradient is that small. A multiple of v added to a row of D changes
    nothing, so the largest entry's D is made 0 first.
    """
    Q = P * v
    largest = top_column(Q) == Q
    alone = over_columns(tl.where(largest, 1.0, 0.0)) == 1.0
    shift = over_columns(tl.where(largest, D, 0.0)) / over_columns(tl.where(largest, v, 0.0))
    D = tl.where(largest & alone, 0.0, D - v * shift)
    return P * take_back_rows(P, D, u, v)


@triton.jit
def remember(P, u, v, a, b, rows, columns, LENGTH: tl.constexpr, EPS: tl.constexpr):
    """The u before the next LENGTH steps and behind each, their v, and a and v behind the last."""
    us, vs = (u,), ()
    for _ in tl.static_range(LENGTH):
        u, v, a, b = step(P, u, a, b, rows, columns, EPS)
        us += (u,)
        vs += (v,)
    return us, vs, a, v


@triton.jit
def take_back_scaling(P, D, u, v, a, columns, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """D from the gradient of R, behind the last step."""
    if ROW_COL:
        w, one_over = divide_columns(P, u, a, columns, EPS)
        return take_back_columns(P, tl.where(P == 0.0, 0.0, (D * u) * w), u, w)
    else:
        return tl.where(P == 0.0, 0.0, (D * u) * v)  # what is masked could grow without bounds


@triton.jit
def take_back_steps(P, D, us, vs):
    """D before steps from that behind them."""
    for h in tl.static_range(len(vs) - 1, -1, -1):
        D = take_back_rows(P, D, us[h + 1], vs[h])
        D = take_back_columns(P, D, us[h], vs[h])
    return D


@triton.jit
def take_back_segment(
    P, u, v, a, b, rows, columns, D, last,
    LENGTH: tl.constexpr, SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """D before the next LENGTH steps, which are run again. If they are the last, D is yet with respect to R."""
    us, vs, a, v = remember(P, u, v, a, b, rows, columns, LENGTH, EPS)
    if last:
        D = take_back_scaling(P, D, us[LENGTH], v, a, columns, ROW_COL, EPS)
    elif SETTLE > 0:
        D = tl.where(P == 0.0, 0.0, (D * power(us[LENGTH])[0]) * power(v)[0])
    return take_back_steps(P, D, us, vs)


@triton.jit
def take_back_loop(
    P, u, v, a, b, rows, columns, dR, left, steps,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, REST: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """D before all steps. Segments of H are gone through from the last to the first, which has the REST if there is one.

    Each is run again from the u at its start: KEPT of them are, the latest first (all but the last segment's, or none). What
    isn't kept is made again from the start of all.
    """
    start_u = u
    if KEPT > 0:
        kept = (u,) * KEPT
        u, v, a, b = iterate(P, u, v, a, b, rows, columns, REST, EPS)
        for _ in range(REST, steps - H, H):
            kept = (u,) + kept[:-1]
            u, v, a, b = iterate(P, u, v, a, b, rows, columns, H, EPS)
        # The last segment stands for itself, so that D takes no registers while its u and v are found.
        us, vs, a, v = remember(P, u, v, a, b, rows, columns, H, EPS)
        D = read(dR, left, 0.0, SIZE, S, N, I, J, WIDE)
        D = take_back_steps(P, take_back_scaling(P, D, us[H], v, a, columns, ROW_COL, EPS), us, vs)
        for _ in range(KEPT):
            D = take_back_segment(P, kept[0], v, a, b, rows, columns, D, False, H, SETTLE, ROW_COL, EPS)
            kept = kept[1:] + (kept[0],)
    else:
        D = read(dR, left, 0.0, SIZE, S, N, I, J, WIDE)
        if H > 0:
            for begin in range(steps - H, REST - 1, -H):
                Q, x, y, p, q = advance(P, u, v, a, b, rows, columns, begin, SETTLE, EPS)
                D = take_back_segment(Q, x, y, p, q, rows, columns, D, begin + H == steps, H, SETTLE, ROW_COL, EPS)
    if REST > 0 or H == 0:
        D = take_back_segment(P, start_u, v, a, b, rows, columns, D, steps == REST, REST, SETTLE, ROW_COL, EPS)
    return D


@triton.jit(do_not_specialize=["count", "iters"])
def unrolled(
    logits, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr,
    H: tl.constexpr, REST: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the loop.

    D is the derivative with respect to the entries of P, u and v held; P D is that with respect to the logits.
    """
    base, left = place(count, SIZE, S)
    M = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE)
    GROWS: tl.constexpr = EPS > 0 and not ROW_COL
    if ITERATES:
        rare = tl.max(wild(M).to(tl.int32)) if GROWS else 0
        P, u, v, a, b, rows, columns = start(M, SIZE, ROW_COL, EPS)
        D = take_back_loop(
            P, u, v, a, b, rows, columns, dR + base, left, iters - ROW_COL,
            SIZE, S, N, I, J, WIDE, SETTLE, ROW_COL, EPS, H, REST, KEPT,
        )  # fmt: skip
        if ROW_COL and EPS > 0:
            M = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE, AGAIN=".cg")
            dM = take_back_softmax(softmax(M), D, u, v)
        elif ROW_COL:
            dM = take_back_softmax(P, D, u, v)
        else:
            dM = P * D
            if GROWS:
                if rare > 0:
                    M = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE, AGAIN=".cg")
                    D = read(dR + base, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=".cg")
                    dM = tl.where(wild(M), unrolled_growing(M, D, iters, EPS), dM)
    elif ROW_COL:
        D = read(dR + base, left, 0.0, SIZE, S, N, I, J, WIDE)
        dM = take_back_softmax(softmax(M), D, tl.full((S, N // I, I, 1, 1), 1.0, M.dtype), tl.full((S, 1, 1, N // J, J), 1.0, M.dtype))
    else:
        dM = exp(M) * read(dR + base, left, 0.0, SIZE, S, N, I, J, WIDE)
    write(dlogits + base, left, dM, SIZE)
