"""The loop of sinkhorn, and the kernel of its forward pass.

A program owns S matrices, as one [S, N, N] tile with N the power of two from n on; up to N = 8 a matrix lies in the
registers of one lane. Vectors over rows are [S, N, 1], over columns [S, 1, N], so that everything below reads as it would
for one matrix. Padding holds logits of -inf, as masked entries do.

The matrix of the loop is kept as diag(u) P diag(v): an iteration changes u and v, whose new values are one over a sum,
v = 1/(P^T u) and u = 1/(P v). Dividing by (sum + eps) is then v = 1/(P^T u + eps a), with a = 1/v of before; b = 1/u
likewise. Every so often `settle` moves the powers of two in u and v into P, which rounds nothing.

A row or column that is masked altogether has sums of 0. It stays 0: `dead` is 1 there and 0 elsewhere, and is added to sums.
"""

import triton
import triton.language as tl

from bridge.language import LOG2E
from bridge.ops.sinkhorn.fast import reciprocal


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def product(x, y):
    """x * y, to be summed. Where a matrix lies in several lanes, these add up in pairs, and a product that is fused into
    such a sum is rounded in one lane of the two only: their copies of the sum would differ. This one is fused with a 0."""
    if max(x.shape[1], x.shape[2]) > 8:
        return tl.fma(x, y, tl.zeros_like(x))
    else:
        return x * y


@triton.jit
def over_rows(x):
    """Column sums, [S, 1, N]."""
    return tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def over_columns(x):
    """Row sums, [S, N, 1]."""
    return tl.sum(x, axis=2, keep_dims=True)


@triton.jit
def peak(x, axis: tl.constexpr):
    """The maximum over an axis, and 0 where all is masked; and whether it is."""
    top = tl.max(x, axis=axis, keep_dims=True)
    dead = top == float("-inf")
    return tl.where(dead, 0.0, top), tl.where(dead, 1.0, 0.0).to(x.dtype)


@triton.jit
def place(count, SIZE: tl.constexpr, S: tl.constexpr):
    """Where this program's matrices begin, and how many of them there are."""
    first = tl.program_id(0).to(tl.int64) * S
    return first * (SIZE * SIZE), count - first


@triton.jit
def read(pointer, left, other: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr):
    """A tile, `other` where there is no element. Small matrices are put together from pieces, a lane a matrix: elements, or
    four in a row where rows are whole multiples of that. Then sums need no other lane."""
    matrix = tl.arange(0, S)
    if N > 8:
        i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
        inside = (matrix < left)[:, None, None] & (i < SIZE) & (j < SIZE)
        x = tl.load(pointer + matrix[:, None, None] * (SIZE * SIZE) + i * SIZE + j, mask=inside, other=other)
    else:
        C: tl.constexpr = 4 if SIZE % 4 == 0 else 1
        j = tl.arange(0, C)[None, :]
        pieces = ()
        for begin in tl.static_range(0, N, C):
            for i in tl.static_range(N):
                if i < SIZE:
                    inside = (matrix < left)[:, None] & (begin + j < SIZE)
                    at = matrix[:, None] * (SIZE * SIZE) + (i * SIZE + begin) + j
                    piece = tl.load(pointer + at, mask=inside, other=other)
                else:
                    piece = tl.full((S, C), other, pointer.dtype.element_ty)
                pieces += (piece,)
        for _ in tl.static_range(6):
            if len(pieces) > 1:
                pairs = ()
                for k in tl.static_range(len(pieces) // 2):
                    pairs += (tl.join(pieces[k], pieces[k + len(pieces) // 2]),)
                pieces = pairs
        x = tl.reshape(tl.permute(tl.reshape(pieces[0], (S, C, N // C, N)), (0, 3, 2, 1)), (S, N, N))
    if pointer.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)  # from 16 bits to 64 in two steps: the interpreter knows no other way
    return x.to(tl.float64) if WIDE else x


@triton.jit
def write(pointer, left, x, SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """A tile, matrices one after another."""
    matrix, k = tl.arange(0, S)[:, None], tl.arange(0, N * N)[None, :]
    i, j = k // N, k % N
    inside = (matrix < left) & (i < SIZE) & (j < SIZE)
    if pointer.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    x = tl.reshape(x.to(pointer.dtype.element_ty), (S, N * N))
    tl.store(pointer + matrix * (SIZE * SIZE) + i * SIZE + j, x, mask=inside)


@triton.jit
def power(x):
    """The power of two in x > 0, and one over it."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        return bits.to(tl.float64, bitcast=True), (0x7FE0000000000000 - bits).to(tl.float64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7F800000
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def exponent(p):
    """The logarithm of a power of two."""
    if p.dtype == tl.float64:
        return ((p.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.float64)
    else:
        return ((p.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def softmax(M):
    """Of each row; 0 where all of it is masked."""
    top, dead = peak(M, 2)
    e = exp(M - top)
    return e / (over_columns(e) + dead)


@triton.jit
def start(M, SIZE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """The state before the first division, and `dead` for rows and columns. The state is P, u, v, a, b, and e, f and L,
    which are for order "col_row" with eps.

    Without eps the logits' large parts r and c are left to u and v: P = exp(M - r - c) has a 1 in each row and column, so
    that nothing vanishes, however large the logits are. What v is doesn't matter then.

    With eps it does, and a row or column far below eps grows by 1/eps in every division until it comes up to it. "row_col"
    has no such rows. For "col_row", P = 2^(L + e + f) with L the logarithm of exp(M - r - c) and with whole numbers e over
    rows and f over columns, where `settle` counts the powers of two: P is no larger than 1 and made again from L, lest what
    grows were lost before. Columns with positive logits begin with f = 0 and a = exp(-c): the first division ends with that.
    """
    wide: tl.constexpr = M.dtype
    S: tl.constexpr = M.shape[0]
    N: tl.constexpr = M.shape[1]
    u, v = tl.full((S, N, 1), 1.0, wide), tl.full((S, 1, N), 1.0, wide)
    b, a = u, v
    e, f, L = u, v, M
    if ROW_COL and EPS > 0:
        i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
        P = softmax(M) + EPS
        if N > SIZE:
            P = tl.where((i < SIZE) & (j < SIZE), P, 0.0)
        rows, columns = tl.where(i < SIZE, 0.0, u), tl.where(j < SIZE, 0.0, v)
    elif ROW_COL:
        r, rows = peak(M, 2)
        c, columns = peak(M - r, 1)
        u, v = 1.0 / (over_columns(exp(M - r)) + rows), exp(c)
        P = exp((M - r) - c)
    else:
        c, columns = peak(M, 1)
        r, rows = peak(M - c, 2)
        L = ((M - c) - r) * LOG2E
        r, c = r * LOG2E, c * LOG2E
        if EPS > 0:
            e, f = tl.floor(r), tl.floor(tl.minimum(c, 0.0))
            u, b, a = tl.exp2(r - e), tl.exp2(e - r), tl.exp2(f - c)
            P = tl.exp2(L + (e + f))
        else:
            u = tl.exp2(r)
            P = tl.exp2(L)
    return P, u, v, a, b, e, f, L, rows, columns


@triton.jit
def divide(s, a, dead, EPS: tl.constexpr):
    """The new scaling vector, from the sums s of P scaled by the other one; and one over it."""
    a = s + EPS * a + dead if EPS > 0 else s + dead
    return reciprocal(a), a


@triton.jit
def settle(P, u, v, a, b, e, f, L, GROWS: tl.constexpr):
    """The same state, with the powers of two of u and v in P; and these powers."""
    pu, qu = power(u)
    pv, qv = power(v)
    if GROWS:
        e, f = e + exponent(pu), f + exponent(pv)
        P = tl.exp2(L + (e + f))
    else:
        P = (P * pu) * pv
    return P, u * qu, v * qv, a * pv, b * pu, e, f, pu, pv


@triton.jit
def iterate(P, u, v, a, b, rows, columns, first, stop, iters, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """Iterations first to stop - 1. "row_col" leaves out the row sums of the last of all."""
    for t in range(first, stop):
        v, a = divide(over_rows(product(P, u)), a, columns, EPS)
        w, d = divide(over_columns(product(P, v)), b, rows, EPS)
        if ROW_COL:
            w, d = tl.where(t < iters - 1, w, u), tl.where(t < iters - 1, d, b)
        u, b = w, d
    return u, v, a, b


@triton.jit
def advance(
    P, u, v, a, b, e, f, L, rows, columns, stop, iters,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The first `stop` iterations, settled after every SETTLE of them. With SETTLE = 0 there are too few to need it."""
    if SETTLE > 0:
        for first in range(0, stop, SETTLE):
            u, v, a, b = iterate(P, u, v, a, b, rows, columns, first, tl.minimum(first + SETTLE, stop), iters, ROW_COL, EPS)
            P, u, v, a, b, e, f, _, _ = settle(P, u, v, a, b, e, f, L, EPS > 0 and not ROW_COL)
    else:
        u, v, a, b = iterate(P, u, v, a, b, rows, columns, 0, stop, iters, ROW_COL, EPS)
    return P, u, v, a, b, e, f


@triton.jit
def normalise(
    M, iters,
    SIZE: tl.constexpr, SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """R from the logits M."""
    if ITERATES:
        P, u, v, a, b, e, f, L, rows, columns = start(M, SIZE, ROW_COL, EPS)
        P, u, v, _, _, _, _ = advance(P, u, v, a, b, e, f, L, rows, columns, iters, iters, SETTLE, ROW_COL, EPS)
        return (P * u) * v
    else:
        return softmax(M) + EPS if ROW_COL else exp(M)


@triton.jit(do_not_specialize=["count", "iters"])
def forward(
    logits,
    count, iters,
    R,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """R (count n n) from logits (count n n)."""
    base, left = place(count, SIZE, S)
    M = read(logits + base, left, float("-inf"), SIZE, S, N, WIDE)
    write(R + base, left, normalise(M, iters, SIZE, SETTLE, ROW_COL, EPS, ITERATES), SIZE, S, N)
