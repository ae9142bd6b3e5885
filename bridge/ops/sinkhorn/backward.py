"""The gradients of sinkhorn: that of the loop, and that of its fixed point. `forward` says how matrices lie."""

import triton
import triton.language as tl

from bridge.ops.sinkhorn.forward import (
    advance,
    divide,
    exp,
    normalise,
    over_columns,
    over_rows,
    place,
    power,
    product,
    read,
    settle,
    softmax,
    start,
    write,
)

TINY = tl.constexpr(1e-37)  # below it, one over a number isn't finite in float32


@triton.jit
def take_back(P, D, own, along, axis: tl.constexpr, GROWS: tl.constexpr):
    """D before a division by the sums over an axis: less what went through the scaling vector `own` that it made. `along`
    is the other one. Where GROWS, D stands for P D."""
    if GROWS:
        return D - (P * along) * (own * tl.sum(D, axis=axis, keep_dims=True))
    else:
        return D - along * (own * tl.sum(product(P, D), axis=axis, keep_dims=True))


@triton.jit
def take_back_softmax(P, D, u, v):
    """The derivative with respect to the logits, from D before the first division, where P u v is their softmax.

    Where one entry of a row is nearly all of it, what comes out is the small difference of equal numbers, with their
    rounding errors; and near a permutation all of the gradient is that small. A multiple of v added to a row of D changes
    nothing, so the largest entry's D is made 0 first.
    """
    Q = P * v
    largest = tl.max(Q, axis=2, keep_dims=True) == Q
    alone = over_columns(tl.where(largest, 1.0, 0.0)) == 1.0
    shift = over_columns(tl.where(largest, D, 0.0)) / over_columns(tl.where(largest, v, 0.0))
    D = tl.where(largest & alone, 0.0, D - v * shift)
    return P * take_back(P, D, u, v, 2, False)


@triton.jit(do_not_specialize=["count", "iters"])
def unrolled(
    logits, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr,
    H: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the loop.

    D is the derivative with respect to the entries of P, u and v held; P D is that with respect to the logits. Segments of
    H iterations are gone through from the last to the first, each run again from the start to get its u and v. Iterations
    beyond the last leave u and v as they are, and D too; EVEN says that there are none. Where rows and columns can grow
    without bounds (`start`), P is made again in every iteration, and its entries may have been next to nothing before:
    P D takes the place of D there.
    """
    GROWS: tl.constexpr = EPS > 0 and not ROW_COL
    base, left = place(count, SIZE, S)
    M = read(logits + base, left, float("-inf"), SIZE, S, N, WIDE)
    D = read(dR + base, left, 0.0, SIZE, S, N, WIDE)
    if ITERATES:
        P0, u0, v0, a0, b0, e0, f0, L, rows, columns = start(M, SIZE, ROW_COL, EPS)
        segments = tl.cdiv(iters, H)
        for segment in range(segments):
            begin = (segments - 1 - segment) * H
            P, u, v, a, b, e, f = advance(P0, u0, v0, a0, b0, e0, f0, L, rows, columns, begin, iters, SETTLE, ROW_COL, EPS)
            history = ()
            for h in tl.static_range(H):
                old = u
                x, d = divide(over_rows(product(P, u)), a, columns, EPS)
                if not EVEN:
                    x, d = tl.where(begin + h < iters, x, v), tl.where(begin + h < iters, d, a)
                v, a = x, d
                x, d = divide(over_columns(product(P, v)), b, rows, EPS)
                if not EVEN or (ROW_COL and h == H - 1):
                    x, d = tl.where(begin + h < iters - ROW_COL, x, u), tl.where(begin + h < iters - ROW_COL, d, b)
                u, b = x, d
                history += ((old, v, u, e, f),)
                if GROWS:
                    P, u, v, a, b, e, f, _, _ = settle(P, u, v, a, b, e, f, L, GROWS)
            if segment == 0:
                D = D * ((P * u) * v) if GROWS else (D * u) * v
            elif SETTLE > 0 and not GROWS:
                D = (D * power(u)[0]) * power(v)[0]
            if not GROWS:
                D = tl.where(P == 0.0, 0.0, D)  # what is masked could grow without bounds
            for h in tl.static_range(H - 1, -1, -1):
                old, v, u, e, f = history[h]
                if GROWS:
                    P = tl.exp2(L + (e + f))
                x = take_back(P, D, u, v, 2, GROWS)
                if not EVEN or (ROW_COL and h == H - 1):
                    x = tl.where(begin + h < iters - ROW_COL, x, D)
                y = take_back(P, x, v, old, 1, GROWS)
                D = y if EVEN else tl.where(begin + h < iters, y, D)
        if ROW_COL and EPS > 0:
            dM = take_back_softmax(softmax(M), D, u0, v0)
        elif ROW_COL:
            dM = take_back_softmax(P0, D, u0, v0)
        else:
            dM = D if GROWS else P0 * D
    elif ROW_COL:
        dM = take_back_softmax(softmax(M), D, 1.0, tl.full((S, 1, N), 1.0, M.dtype))
    else:
        dM = exp(M) * D
    write(dlogits + base, left, dM, SIZE, S, N)


@triton.jit
def inverse(x):
    """1/x, and 0 where x is next to 0."""
    return 1.0 / tl.where(x < TINY, float("inf"), x)


@triton.jit
def row(X, p):
    """Row p, [S, 1, N]."""
    return over_rows(tl.where(tl.arange(0, X.shape[1])[None, :, None] == p, X, -0.0))


@triton.jit
def column(X, p):
    """Column p, [S, N, 1]."""
    return over_columns(tl.where(tl.arange(0, X.shape[2])[None, None, :] == p, X, -0.0))


@triton.jit
def turn(x):
    """A vector over columns as one over rows."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def solve(R, G, SIZE: tl.constexpr):
    """dM = R * (G - u 1^T - 1 v^T), whose row and column sums are 0.

    Without u, the equations of v are those of a network of resistors between the columns: conductances
    W_jk = sum_i R_ij R_ik / r_i, and on each a source that drives F_jk = sum_i R_ij R_ik / r_i (G_ij - G_ik) through it.
    A node p is taken out by joining its neighbours (star to mesh), which only ever adds conductances; its potential is
    then a weighted mean. Nothing is subtracted but differences of G and v, so that no conditioning makes it blow up.
    """
    N: tl.constexpr = R.shape[1]
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    share = R * inverse(over_columns(R))
    W, F = tl.zeros(R.shape, R.dtype), tl.zeros(R.shape, R.dtype)
    for p in range(SIZE):
        g = row(G, p)
        q = turn(row(share, p)) * row(R, p)
        W += q
        F += q * (turn(g) - g)
    for p in range(SIZE - 1):
        later = j > p
        w, f = tl.where(later, row(W, p), 0.0), tl.where(later, row(F, p), 0.0)
        scale = inverse(over_columns(w))
        ws, fs = w * scale, f * scale
        W += turn(ws) * w
        F += turn(ws) * f - turn(fs) * w
        W, F = tl.where(i == p, ws, W), tl.where(i == p, fs, F)
    v = tl.zeros((R.shape[0], 1, N), R.dtype)
    for back in range(1, SIZE):
        p = SIZE - 1 - back
        v = tl.where(j == p, over_columns(row(W, p) * v + row(F, p)), v)
    total = tl.zeros(R.shape, R.dtype)
    for k in range(SIZE):
        total += column(R, k) * ((G - column(G, k)) - (v - column(v, k)))
    return share * total


@triton.jit
def descend(R, G, steps):
    """As `solve`, by `steps` steps of conjugate gradients from u = v = 0."""
    E = R * G
    r, c = over_columns(R), over_rows(R)
    ru, rv = over_columns(E), over_rows(E)
    pu, pv = ru, rv
    u, v = ru * 0.0, rv * 0.0
    rr = over_rows(product(ru, ru)) + over_columns(product(rv, rv))
    for _ in range(steps):
        au, av = r * pu + over_columns(product(R, pv)), over_rows(product(R, pu)) + c * pv
        pap = over_rows(product(pu, au)) + over_columns(product(pv, av))
        alpha = tl.where(pap > 0, rr / tl.where(pap > 0, pap, 1.0), 0.0)
        u += alpha * pu
        v += alpha * pv
        ru -= alpha * au
        rv -= alpha * av
        new = over_rows(product(ru, ru)) + over_columns(product(rv, rv))
        beta = tl.where(rr > 0, new / tl.where(rr > 0, rr, 1.0), 0.0)
        pu, pv, rr = ru + beta * pu, rv + beta * pv, new
    return E - R * (u + v)


@triton.jit
def balance(R, G, steps, SIZE: tl.constexpr, DIRECT: tl.constexpr):
    """dM, from G over the power of two in its maximum: products with small gradients would vanish."""
    largest, over = power(tl.max(tl.max(tl.abs(G), axis=2, keep_dims=True), axis=1, keep_dims=True))
    if DIRECT:
        return solve(R, G * over, SIZE) * largest
    else:
        return descend(R, G * over, steps) * largest


@triton.jit(do_not_specialize=["count", "iters"])
def implicit(
    logits, R, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    SETTLE: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, ITERATES: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the fixed point at R, which is read where it was SAVED and else made again.

    What is masked has R = 0 and a gradient of 0, but in "row_col" with eps, where eps is added to it.
    """
    UNMASKS: tl.constexpr = ROW_COL and EPS > 0
    base, left = place(count, SIZE, S)
    if UNMASKS or not SAVED:
        x = read(logits + base, left, float("-inf"), SIZE, S, N, WIDE)
    P = read(R + base, left, 0.0, SIZE, S, N, WIDE) if SAVED else normalise(x, iters, SIZE, SETTLE, ROW_COL, EPS, ITERATES)
    G = read(dR + base, left, 0.0, SIZE, S, N, WIDE)
    dM = balance(P, G, 0, SIZE, True)
    if UNMASKS:
        dM = tl.where(x == float("-inf"), 0.0, dM)
    write(dlogits + base, left, dM, SIZE, S, N)


@triton.jit(do_not_specialize=["count", "steps"])
def mhc_bwd(
    out, dout,
    count, steps,
    dM,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """dM (count n n): the system solved, or approached in `steps` steps."""
    base, left = place(count, SIZE, S)
    R = read(out + base, left, 0.0, SIZE, S, N, WIDE)
    G = read(dout + base, left, 0.0, SIZE, S, N, WIDE)
    write(dM + base, left, balance(R, G, steps, SIZE, DIRECT), SIZE, S, N)
