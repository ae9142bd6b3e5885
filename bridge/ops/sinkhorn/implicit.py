"""The gradient of sinkhorn's fixed point."""

import triton
import triton.language as tl

from bridge.fast import reciprocal
from bridge.ops.sinkhorn.tiles import (
    numbers,
    over_columns,
    over_rows,
    place,
    power,
    read,
    read_row,
    top_column,
    top_row,
    write,
)

TINY = tl.constexpr(1e-37)  # below it, one over a number isn't finite in float32


@triton.jit
def inverse(x):
    """1/x, and 0 where x is next to 0."""
    return reciprocal(tl.where(x < TINY, float("inf"), x))


@triton.jit
def row(x, block, k):
    """Row k of a block of rows, in all lanes."""
    i = tl.arange(0, x.shape[2])[None, None, :, None, None]
    block_of = tl.arange(0, x.shape[1])[None, :, None, None, None]
    return over_rows(tl.where((i == k) & (block_of == block), x, -0.0))


@triton.jit
def column(x, block, k):
    """Column k of a block of columns, in all lanes."""
    j = tl.arange(0, x.shape[4])[None, None, None, None, :]
    block_of = tl.arange(0, x.shape[3])[None, None, None, :, None]
    return over_columns(tl.where((j == k) & (block_of == block), x, -0.0))


@triton.jit
def transpose(x):
    return tl.reshape(tl.permute(x, (0, 3, 4, 1, 2)), x.shape)


@triton.jit
def at_largest(R, x):
    """What x has where a row of R is largest."""
    return top_column(tl.where(R == top_column(R), x, float("-inf")))


@triton.jit
def connect(
    W, F, out, dout, R, G, share, least, over, left, p,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds what goes from column to column by way of row p, which all lanes need: a small matrix has it, else it is read."""
    if I == N:
        x = row(R, 0, p)
        y, g = tl.permute(x, (0, 3, 4, 1, 2)), tl.permute(row(G, 0, p), (0, 3, 4, 1, 2))
    else:
        x = read_row(out, left, p, SIZE, S, N, I, J, WIDE, False)
        y = read_row(out, left, p, SIZE, S, N, I, J, WIDE, True)
        g = read_row(dout, left, p, SIZE, S, N, I, J, WIDE, True)
    q = y * row(share, p // I, p % I)
    return W + q * x, F + (q * ((g - row(least, p // I, p % I)) * over)) * x


@triton.jit
def edges(W, F, block, k: tl.constexpr):
    """Of node p = (block, k): conductances to later nodes, their sources, and one over the sum of the former."""
    _, j = numbers(W)
    later = j > block * W.shape[2] + k
    w, f = tl.where(later, row(W, block, k), 0.0), tl.where(later, row(F, block, k), 0.0)
    return w, f, inverse(over_columns(w))


@triton.jit
def eliminate(W, F, block, k: tl.constexpr):
    """Takes node p = (block, k) out."""
    I: tl.constexpr = W.shape[2]
    J: tl.constexpr = W.shape[4]
    i, _ = numbers(W)
    w, f, scale = edges(W, F, block, k)
    if I == J:
        ws, fs = column(W, block, k), column(F, block, k)
    else:
        ws, fs = column(W, (block * I + k) // J, (block * I + k) % J), column(F, (block * I + k) // J, (block * I + k) % J)
    later = i > block * I + k
    ws, fs = tl.where(later, ws * scale, 0.0), tl.where(later, fs * scale, 0.0)
    return W + ws * w, F + (ws * f + fs * w)


@triton.jit
def substitute(W, F, v, block, k: tl.constexpr):
    """v with the potential of node p = (block, k), from those of later ones."""
    _, j = numbers(W)
    w, f, scale = edges(W, F, block, k)
    return tl.where(j == block * W.shape[2] + k, over_columns(w * v + f) * scale, v)


@triton.jit
def solve(
    out, dout, left,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dM = R * (G - u 1^T - 1 v^T), whose row and column sums are 0.

    Without u, the equations of v are those of a network of resistors between the columns: conductances
    W_jk = sum_i R_ij R_ik / r_i, and on each a source that drives F_jk = sum_i R_ij R_ik / r_i (G_ij - G_ik) through it.
    A node p is taken out by joining its neighbours (star to mesh), which only ever adds conductances; its potential is
    then a weighted mean. A number added to a row of G changes nothing, so that at the largest entry of R is made 0 first.
    Then nothing that cancels is larger than what it leaves, and no conditioning makes it blow up.

    G is taken over the power of two in its maximum: products with small gradients would vanish.
    """
    R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE)
    G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE)
    largest, over = power(top_column(top_row(tl.abs(G))))
    share, least = inverse(over_columns(R)), at_largest(R, G)
    W, F = tl.zeros(R.shape, R.dtype), tl.zeros(R.shape, R.dtype)
    v = tl.zeros((S, 1, 1, N // J, J), R.dtype)
    if I == N:
        for p in tl.static_range(SIZE):
            W, F = connect(W, F, out, dout, R, G, share, least, over, left, p, SIZE, S, N, I, J, WIDE)
    else:
        for p in range(SIZE):
            W, F = connect(W, F, out, dout, R, G, share, least, over, left, p, SIZE, S, N, I, J, WIDE)
    F -= transpose(F)
    if N <= 8:
        for p in tl.static_range(SIZE - 1):
            W, F = eliminate(W, F, p // I, p % I)
        for p in tl.static_range(SIZE - 2, -1, -1):
            v = substitute(W, F, v, p // I, p % I)
    else:
        for block in range(N // I):
            for k in tl.static_range(I):
                W, F = eliminate(W, F, block, k)
        for back in range(N // I):
            for k in tl.static_range(I - 1, -1, -1):
                v = substitute(W, F, v, N // I - 1 - back, k)
    if I < N:
        R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=True)
        G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=True)
    h = (G - least) * over - v
    h -= at_largest(R, h)
    return (R * (h - share * over_columns(R * h))) * largest


@triton.jit
def descend(R, G, steps):
    """As `solve`, by `steps` steps of conjugate gradients from u = v = 0."""
    largest, over = power(top_column(top_row(tl.abs(G))))
    E = R * (G * over)
    r, c = over_columns(R), over_rows(R)
    ru, rv = over_columns(E), over_rows(E)
    pu, pv = ru, rv
    u, v = ru * 0.0, rv * 0.0
    rr = over_rows(ru * ru) + over_columns(rv * rv)
    for _ in range(steps):
        au, av = r * pu + over_columns(R * pv), over_rows(R * pu) + c * pv
        pap = over_rows(pu * au) + over_columns(pv * av)
        alpha = tl.where(pap > 0, rr / tl.where(pap > 0, pap, 1.0), 0.0)
        u += alpha * pu
        v += alpha * pv
        ru -= alpha * au
        rv -= alpha * av
        new = over_rows(ru * ru) + over_columns(rv * rv)
        beta = tl.where(rr > 0, new / tl.where(rr > 0, rr, 1.0), 0.0)
        pu, pv, rr = ru + beta * pu, rv + beta * pv, new
    return (E - R * (u + v)) * largest


@triton.jit(do_not_specialize=["count", "iters"])
def implicit(
    logits, R, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    UNMASKS: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the fixed point at R.

    What is masked has R = 0 and a gradient of 0, but where the loop UNMASKS it by adding eps.
    """
    base, left = place(count, SIZE, S)
    dM = solve(R + base, dR + base, left, SIZE, S, N, I, J, WIDE)
    if UNMASKS:
        masked = read(logits + base, left, float("-inf"), SIZE, S, N, I, J, WIDE) == float("-inf")
        dM = tl.where(masked, 0.0, dM)
    write(dlogits + base, left, dM, SIZE)


@triton.jit(do_not_specialize=["count", "steps"])
def mhc_bwd(
    out, dout,
    count, steps,
    dM,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """dM (count n n): the system solved, or approached in `steps` steps."""
    base, left = place(count, SIZE, S)
    if DIRECT:
        x = solve(out + base, dout + base, left, SIZE, S, N, I, J, WIDE)
    else:
        R = read(out + base, left, 0.0, SIZE, S, N, I, J, WIDE)
        x = descend(R, read(dout + base, left, 0.0, SIZE, S, N, I, J, WIDE), steps)
    write(dM + base, left, x, SIZE)
