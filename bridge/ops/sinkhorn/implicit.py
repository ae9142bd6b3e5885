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


@triton.jit
def inverse(x):
    """1/x, and 0 where x is next to 0: where 1/x might not be finite."""
    tiny: tl.constexpr = 1e-307 if x.dtype == tl.float64 else 1e-37
    return reciprocal(tl.where(x < tiny, float("inf"), x))


@triton.jit
def scales(G):
    """The power of two in the largest number of each matrix, and one over it, both normal numbers whatever G is."""
    bits: tl.constexpr = 1022 if G.dtype == tl.float64 else 126
    largest = top_row(top_column(tl.abs(G)))
    return power(tl.minimum(tl.maximum(largest, 2.0**-bits), 2.0**bits))


@triton.jit
def nothing(x):
    """-0.0, with which every sum is what it was without. As a literal it would be made 0.0, and 0.0 would be added."""
    return tl.zeros((1, 1, 1, 1, 1), x.dtype) * -1.0


@triton.jit
def own_row(x, k):
    """Row k of each lane."""
    k_of = tl.arange(0, x.shape[2])[None, None, :, None, None]
    return tl.sum(tl.where(k_of == k, x, nothing(x)), axis=2, keep_dims=True) if x.shape[2] > 1 else x


@triton.jit
def row(x, p, I: tl.constexpr):
    """Row p, in all lanes: each has I rows, or the one that is to be spread."""
    S: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    own = own_row(x, p % I)
    if L == 1:
        return own
    else:
        # Matrices come first in the order of lanes (`read`), so that all lie where gather wants them, and one exchange does.
        lanes = tl.reshape(tl.permute(own, (1, 0, 2, 3, 4)), (L * S, x.shape[4]))
        lane = (tl.arange(0, L * S) % S + p // I * S)[:, None] + tl.zeros((1, x.shape[4]), tl.int32)
        return tl.permute(tl.reshape(tl.gather(lanes, lane, axis=0), (L, S, 1, 1, x.shape[4])), (1, 0, 2, 3, 4))


@triton.jit
def column(x, p):
    j = tl.arange(0, x.shape[4])[None, None, None, None, :]
    return tl.sum(tl.where(j == p, x, nothing(x)), axis=4, keep_dims=True)


@triton.jit
def transpose(x):
    return tl.permute(x, (0, 3, 4, 1, 2))


@triton.jit
def halves(x):
    """The first and the second half of the columns."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 1, 2, x.shape[4] // 2))
    return tl.split(tl.permute(x, (0, 1, 2, 3, 5, 4)))


@triton.jit
def at_largest(R, h):
    """Of each row h where R is largest."""
    for _ in tl.static_range(6):
        if R.shape[4] > 1:
            a, b = halves(R)
            x, y = halves(h)
            R, h = tl.where(b > a, b, a), tl.where(b > a, y, x)
    return h


@triton.jit
def connect(R, G, share):
    """W and F, whole in each lane. Lanes have some rows of R each, and add up."""
    K: tl.constexpr = R.shape[4]
    W, F = tl.zeros((R.shape[0], R.shape[1], K, 1, K), R.dtype), tl.zeros((R.shape[0], R.shape[1], K, 1, K), R.dtype)
    for k in tl.static_range(R.shape[2]):
        x, g = own_row(R, k), own_row(G, k)
        q = tl.permute(x * own_row(share, k), (0, 1, 4, 3, 2)) * x
        W += q
        F += q * (tl.permute(g, (0, 1, 4, 3, 2)) - g)
    i, j = tl.arange(0, K)[None, None, :, None, None], tl.arange(0, K)[None, None, None, None, :]
    both = tl.where(i < j, W, tl.permute(F, (0, 1, 4, 3, 2)))  # half of each: half as many sums
    both = tl.sum(both, axis=1, keep_dims=True) if R.shape[1] > 1 else both
    return tl.where(i < j, both, transpose(both)), tl.where(i < j, transpose(both), -both)


@triton.jit
def connect_rows(
    out, dout, share, over, left,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """W and F, some rows of them in a lane. Each row of R adds to all: it is read again, whole, by all lanes."""
    W, F = tl.zeros((S, N // I, I, 1, N), share.dtype), tl.zeros((S, N // I, I, 1, N), share.dtype)
    for block in range(tl.cdiv(SIZE, I)):
        for k in tl.static_range(I):
            p = block * I + k
            x = read_row(out, left, p, SIZE, S, N, I, WIDE, False)
            y = read_row(out, left, p, SIZE, S, N, I, WIDE, True) * row(share, p, I)
            g = read_row(dout, left, p, SIZE, S, N, I, WIDE, True)
            W += y * x
            F += (y * (g * over)) * x
    return W, F - tl.reshape(transpose(F), F.shape)


@triton.jit
def eliminate(W, F, inverses, p, I: tl.constexpr):
    """Takes node p out. What later ones need no more stays as it is, for the way back."""
    i, j = numbers(W)
    scale = row(inverse(over_columns(tl.where(j > p, own_row(W, p % I), nothing(W)))), p, I)
    w, f = row(W, p, I), row(F, p, I)
    if W.shape[1] == 1:
        ws, fs = transpose(w) * scale, transpose(f) * (0.0 - scale)
        changes = (i > p) & (j > p)
    else:
        part = tl.where(i > p, scale, 0.0)
        ws, fs = column(W, p) * part, column(F, p) * part
        changes = j > p
    W, F = tl.where(changes, W + ws * w, W), tl.where(changes, (F + ws * f) + fs * w, F)
    return W, F, tl.where(i == p, scale, inverses)


@triton.jit
def substitute(W, F, inverses, known, v, p, I: tl.constexpr):
    """v with the potential of node p, whose neighbours have added to what is known."""
    _, j = numbers(W)
    potential = row(known * inverses, p, I)
    return known + (column(W, p) * potential + column(F, p)), tl.where(j == p, potential, v)


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

    Up to N = 8 a lane has all of W and F, of which it computes one half. Else it has some rows, whole: which column is meant
    the compiler knows, and from other lanes comes the row of the node that is taken out. W is symmetric, F is not but for its
    sign, and so the column of that node is at hand. Of more than 16 nodes the compiler knows but nearly which: it takes some
    in a loop.
    """
    R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE)
    G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE)
    largest, over = scales(G)
    share = inverse(over_columns(R))
    if N <= 8:
        W, F = connect(R, G * over, share)
    else:
        W, F = connect_rows(out, dout, share, over, left, SIZE, S, N, I, WIDE)
    H: tl.constexpr = I if N > 8 else N  # rows of W in a lane
    STEP: tl.constexpr = 1 if N <= 16 else N // 8
    inverses, known = tl.zeros((S, W.shape[1], H, 1, 1), R.dtype), tl.zeros((S, W.shape[1], H, 1, 1), R.dtype)
    v = tl.zeros((S, W.shape[1], 1, 1, N), R.dtype)
    for begin in tl.static_range(0, SIZE - 1, STEP):
        for p in range(begin, min(begin + STEP, SIZE - 1)):
            W, F, inverses = eliminate(W, F, inverses, p, H)
    for begin in tl.static_range((SIZE - 1) // STEP * STEP, -1, -STEP):
        for p in range(min(begin + STEP, SIZE) - 1, begin - 1, -1):
            known, v = substitute(W, F, inverses, known, v, p, H)
    if N > 8:
        R = read(out, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=".ca")
        G = read(dout, left, 0.0, SIZE, S, N, I, J, WIDE, AGAIN=".ca")
    h = G * over - v
    h -= at_largest(R, h)
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
