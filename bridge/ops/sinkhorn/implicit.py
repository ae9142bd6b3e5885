"""The gradient of sinkhorn's fixed point."""

import triton
import triton.language as tl

from bridge.fast import reciprocal
from bridge.ops.sinkhorn.tiles import (
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


@triton.jit
def inverse(x):
    """1/x, and 0 where x is next to 0: where 1/x might not be finite."""
    tiny: tl.constexpr = 1e-307 if x.dtype == tl.float64 else 1e-37
    return reciprocal(tl.where(x < tiny, float("inf"), x))


@triton.jit
def scales(G):
    """The power of two in the largest number of each matrix, and one over it, both normal numbers whatever G is."""
    bits: tl.constexpr = 1022 if G.dtype == tl.float64 else 126
    largest = top_column(top_row(tl.abs(G)))
    return power(tl.minimum(tl.maximum(largest, 2.0**-bits), 2.0**bits))


@triton.jit
def own_row(x, k):
    """Row k of each block of rows."""
    return tl.sum(tl.where(tl.arange(0, x.shape[2])[None, None, :, None, None] == k, x, -0.0), axis=2, keep_dims=True)


@triton.jit
def row(x, block, k):
    """Row k of one block of rows, in all lanes."""
    own = own_row(x, k)
    block_of = tl.arange(0, x.shape[1])[None, :, None, None, None]
    return tl.sum(tl.where(block_of == block, own, -0.0), axis=1, keep_dims=True) if x.shape[1] > 1 else own


@triton.jit
def transpose(x):
    return tl.permute(x, (0, 3, 4, 1, 2))


@triton.jit
def connect(R, G, share):
    """W and F above the diagonal, whole in each lane. Lanes have some rows each, and add up."""
    K: tl.constexpr = R.shape[4]
    W, F = tl.zeros((R.shape[0], R.shape[1], K, 1, K), R.dtype), tl.zeros((R.shape[0], R.shape[1], K, 1, K), R.dtype)
    for k in tl.static_range(R.shape[2]):
        x, g = own_row(R, k), own_row(G, k)
        q = tl.permute(x * own_row(share, k), (0, 1, 4, 3, 2)) * x
        W += q
        F += q * (tl.permute(g, (0, 1, 4, 3, 2)) - g)
    i, j = tl.arange(0, K)[None, None, :, None, None], tl.arange(0, K)[None, None, None, None, :]
    both = tl.where(i < j, W, tl.permute(F, (0, 1, 4, 3, 2)))  # half of each: half as many sums
    both = tl.sum(both, axis=1, keep_dims=True)
    return both, transpose(both)


@triton.jit
def connect_blocks(
    out, dout, share, over, left,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """W and F, in blocks of a lane, each of which needs all rows."""
    W, F = tl.zeros((S, N // I, I, N // J, J), share.dtype), tl.zeros((S, N // I, I, N // J, J), share.dtype)
    for block in range(N // I):
        for k in tl.static_range(I):
            p = block * I + k
            x = read_row(out, left, p, SIZE, S, N, I, J, WIDE, False)
            y = read_row(out, left, p, SIZE, S, N, I, J, WIDE, True)
            g = read_row(dout, left, p, SIZE, S, N, I, J, WIDE, True)
            q = y * row(share, block, k)
            W += q * x
            F += (q * (g * over)) * x
    return W, F - transpose(F)


@triton.jit
def later(x, block, k):
    """Which columns are of nodes that are taken out after (block, k): the first of all blocks go first, then the second."""
    j = tl.arange(0, x.shape[4])[None, None, None, None, :]
    return (j > k) | ((j == k) & (tl.arange(0, x.shape[3])[None, None, None, :, None] > block))


@triton.jit
def eliminate(W, F, block, k):
    """Takes node (block, k) out."""
    w, f = tl.where(later(W, block, k), row(W, block, k), 0.0), tl.where(later(W, block, k), row(F, block, k), 0.0)
    scale = inverse(over_columns(w))
    if W.shape[1] == 1:
        ws, fs = transpose(w), -transpose(f)
    else:
        rows = transpose(later(W, block, k))
        ws = tl.where(rows, transpose(row(transpose(W), block, k)), 0.0)
        fs = tl.where(rows, transpose(row(transpose(F), block, k)), 0.0)
    ws, fs = ws * scale, fs * scale
    i, j = tl.arange(0, W.shape[2])[None, None, :, None, None], tl.arange(0, W.shape[4])[None, None, None, None, :]
    changes = (i >= k) & (j >= k)
    return tl.where(changes, W + ws * w, W), tl.where(changes, (F + ws * f) + fs * w, F)


@triton.jit
def substitute(W, F, v, block, k):
    """v with the potential of node (block, k), from those of later ones."""
    w, f = tl.where(later(W, block, k), own_row(W, k), 0.0), tl.where(later(W, block, k), own_row(F, k), 0.0)
    potential = row(over_columns(w * v + f) * inverse(over_columns(w)), block, 0)
    j, block_of = tl.arange(0, v.shape[4])[None, None, None, None, :], tl.arange(0, v.shape[3])[None, None, None, :, None]
    return tl.where((j == k) & (block_of == block), potential, v)


@triton.jit
def solve(
    out, dout, left,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dM = R * (G - u 1^T - 1 v^T), whose row and column sums are 0.

    Without u, the equations of v are those of a network of resistors between the columns: conductances
    W_jk = sum_i R_ij R_ik / r_i, and on each a source that drives F_jk = sum_i R_ij R_ik / r_i (G_ij - G_ik) through it.
    A node p is taken out by joining its neighbours (star to mesh), which only ever adds conductances; its potential is
    then a weighted mean. A number added to a row of h = G - v changes nothing, so that at the largest entry of R is made 0
    first. Then nothing that cancels is larger than what it leaves, and no conditioning makes it blow up.

    G is taken over the power of two in its maximum: products with small gradients would vanish.
    """
    R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE)
    G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE)
    largest, over = scales(G)
    share = inverse(over_columns(R))
    if J == N:
        W, F = connect(R, G * over, share)
    else:
        W, F = connect_blocks(out, dout, share, over, left, SIZE, S, N, I, J, WIDE)
    v = tl.zeros((S, 1, 1, N // J, J), R.dtype)
    for k in tl.static_range(J):
        for block in range(N // J):
            W, F = eliminate(W, F, block, k)
    for k in tl.static_range(J - 1, -1, -1):
        for back in range(N // J):
            v = substitute(W, F, v, N // J - 1 - back, k)
    if J < N:
        R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=True)
        G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=True)
    h = G * over - v
    h -= top_column(tl.where(R == top_column(R), h, float("-inf")))
    return (R * (h - share * over_columns(R * h))) * largest


@triton.jit
def descend(R, G, steps):
    """As `solve`, by `steps` steps of conjugate gradients from u = v = 0."""
    largest, over = scales(G)
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
