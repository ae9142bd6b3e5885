"""The loop of sinkhorn.

The matrix of the loop is kept as diag(u) P diag(v): an iteration changes u and v, whose new values are one over a sum,
v = 1/(P^T u) and u = 1/(P v). Dividing by (sum + eps) is then v = 1/(P^T u + eps a), with a = 1/v of before; b = 1/u
likewise. Every so often `settle` moves the powers of two in u and v into P, which rounds nothing.

Padding holds logits of -inf, as masked entries do. A row or column that is masked altogether has sums of 0. It stays 0:
`dead` is 1 there and 0 elsewhere, and is added to sums.
"""

import triton
import triton.language as tl

from bridge.language import LOG2E
from bridge.ops.sinkhorn.fast import reciprocal, reciprocals
from bridge.ops.sinkhorn.tiles import exp, living, numbers, over_columns, power, top_column, top_row, weigh_columns, weigh_rows

FAINT = tl.constexpr(2.0**-62)  # what sums of small matrices begin with, so that none is 0: see `faint`
MILD = tl.constexpr(20.0)  # bits by which maxima of rows and columns may lie below 1, if eps is to be carried in u and v


@triton.jit
def faint(dead):
    """What takes the place of `dead` where it can: a constant, for which no registers are needed. It changes no sum of matrices
    up to 4 x 4 in the iterations until `settle`, and has a finite product with itself."""
    if dead.dtype == tl.float32 and dead.shape[1] * dead.shape[2] <= 4 and dead.shape[3] * dead.shape[4] <= 4:
        return tl.full(dead.shape, FAINT, tl.float32)
    else:
        return dead


@triton.jit
def softmax(M):
    """Of each row; 0 where all of it is masked."""
    top, dead = living(top_column(M))
    e = exp(M - top)
    return e / (over_columns(e) + dead)


@triton.jit
def shifts(M):
    """The maxima c of columns and r of rows of M - c, each with `dead`, and M - r - c: all as logarithms to base 2."""
    c, columns = living(top_row(M))
    r, rows = living(top_column(M - c))
    return r * LOG2E, c * LOG2E, rows, columns, ((M - c) - r) * LOG2E


@triton.jit
def wild(M):
    """Which matrices [S, 1, 1, 1, 1] have a row or column so small that eps lets it grow beyond what u and v can carry."""
    r, c, _, _, _ = shifts(M)
    return tl.minimum(-top_row(-r), -top_column(-c)) < -MILD


@triton.jit
def start(M, SIZE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """The state before the first division: P, u, v, a, b, and `dead` for rows and columns.

    Without eps the logits' large parts r and c are left to u and v: P = exp(M - r - c) has a 1 in each row and column, so
    that nothing vanishes, however large the logits are. What v is doesn't matter then. With eps and "row_col" no row or column
    is far below eps; with "col_row" all of this is for matrices that aren't `wild`.
    """
    if ROW_COL and EPS > 0:
        i, j = numbers(M)
        P = softmax(M) + EPS
        if SIZE < i.shape[1] * i.shape[2]:
            P = tl.where((i < SIZE) & (j < SIZE), P, 0.0)
        u = tl.full((M.shape[0], M.shape[1], M.shape[2], 1, 1), 1.0, M.dtype)
        v = tl.full((M.shape[0], 1, 1, M.shape[3], M.shape[4]), 1.0, M.dtype)
        rows, columns = tl.where(i < SIZE, 0.0, u), tl.where(j < SIZE, 0.0, v)
        a, b = v, u
    elif ROW_COL:
        r, rows = living(top_column(M))
        c, columns = living(top_row(M - r))
        u, v = 1.0 / (over_columns(exp(M - r)) + rows), exp(c)
        P = exp((M - r) - c)
        a, b = v, u
    else:
        r, c, rows, columns, L = shifts(M)
        P, u = tl.exp2(L), tl.exp2(r)
        v, a, b = tl.exp2(c), tl.exp2(-c), tl.exp2(-r)
    if EPS == 0:
        rows, columns = faint(rows), faint(columns)
    return P, u, v, a, b, rows, columns


@triton.jit
def invert(a, EPS: tl.constexpr):
    return reciprocal(a) if EPS > 0 and EPS < 1e-12 else reciprocals(a)


@triton.jit
def divide_columns(P, u, a, dead, EPS: tl.constexpr):
    """The new v, and one over it."""
    a = weigh_rows(P, u, EPS * a + dead if EPS > 0 else dead)
    return invert(a, EPS), a


@triton.jit
def divide_rows(P, v, b, dead, EPS: tl.constexpr):
    """The new u, and one over it."""
    b = weigh_columns(P, v, EPS * b + dead if EPS > 0 else dead)
    return invert(b, EPS), b


@triton.jit
def step(P, u, a, b, rows, columns, EPS: tl.constexpr):
    v, a = divide_columns(P, u, a, columns, EPS)
    u, b = divide_rows(P, v, b, rows, EPS)
    return u, v, a, b


@triton.jit
def settle(P, u, v, a, b):
    """The same state, with the powers of two of u and v in P."""
    pu, qu = power(u)
    pv, qv = power(v)
    return (P * pu) * pv, u * qu, v * qv, a * pv, b * pu


@triton.jit
def iterate(P, u, v, a, b, rows, columns, steps, EPS: tl.constexpr):
    """Steps, two in a trip."""
    for _ in range(steps // 2):
        u, v, a, b = step(P, u, a, b, rows, columns, EPS)
        u, v, a, b = step(P, u, a, b, rows, columns, EPS)
    for _ in range(steps % 2):
        u, v, a, b = step(P, u, a, b, rows, columns, EPS)
    return u, v, a, b


@triton.jit
def advance(P, u, v, a, b, rows, columns, steps, SETTLE: tl.constexpr, EPS: tl.constexpr):
    """Steps, settled after every SETTLE of them. With SETTLE = 0 there are too few to need it."""
    if SETTLE > 0:
        for first in range(0, steps, SETTLE):
            u, v, a, b = iterate(P, u, v, a, b, rows, columns, tl.minimum(SETTLE, steps - first), EPS)
            P, u, v, a, b = settle(P, u, v, a, b)
    else:
        u, v, a, b = iterate(P, u, v, a, b, rows, columns, steps, EPS)
    return P, u, v, a, b


@triton.jit
def normalise(M, iters, SIZE: tl.constexpr, SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """R from the logits M, after iters > 0 iterations. "row_col" leaves out the row sums of the last of all."""
    P, u, v, a, b, rows, columns = start(M, SIZE, ROW_COL, EPS)
    P, u, v, a, b = advance(P, u, v, a, b, rows, columns, iters - ROW_COL, SETTLE, EPS)
    if ROW_COL:
        v, a = divide_columns(P, u, a, columns, EPS)
    return (P * u) * v
