"""The kernels of sinkhorn and mhc_bwd.

A program owns S matrices, as one [S, N, N] tile with N the power of two from n on. Vectors over rows are [S, N, 1], over
columns [S, 1, N], so that everything below reads as it would for one matrix. Padding holds P = 0, and 1/0 counts as 0.

The matrix of the loop is kept as diag(u) P diag(v): an iteration changes u and v, whose new values are one over a sum,
v = 1/(P^T u) and u = 1/(P v). Dividing by (sum + eps) is then v = 1/(P^T u + eps/v_old). Every H iterations u and v are
multiplied into P (`absorb`), since they may grow by a factor n in each.

P = exp(M - r - c), with r and c such that every row and every column holds a 1: nothing vanishes, however large the
logits are. `start` has the details.
"""

import triton
import triton.language as tl

from bridge.language import LOG2E

TINY = tl.constexpr(1e-37)  # below it, one over a number isn't finite in float32
NEVER = tl.constexpr(1e30)  # more than any logarithm
SETTLED = tl.constexpr(20.0)  # `absorb` says what it is for


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def inverse(x):
    """1/x, and 0 where x is next to 0, as it is on the padding."""
    return 1.0 / tl.where(x < TINY, float("inf"), x)


@triton.jit
def over_rows(x):
    """Column sums, [S, 1, N]."""
    return tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def over_columns(x):
    """Row sums, [S, N, 1]."""
    return tl.sum(x, axis=2, keep_dims=True)


@triton.jit
def peak(x, inside, live, axis: tl.constexpr):
    """The maximum over an axis, and 0 where there is nothing but padding."""
    return tl.where(live, tl.max(tl.where(inside, x, float("-inf")), axis=axis, keep_dims=True), 0.0)


@triton.jit
def place(count, SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """Where this program's matrices begin, offsets from there, and which rows and columns of the tile there are."""
    first = tl.program_id(0).to(tl.int64) * S
    matrix = tl.arange(0, S)[:, None, None]
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    there = matrix < count - first
    return first * (SIZE * SIZE), matrix * (SIZE * SIZE) + i * SIZE + j, there & (i < SIZE), there & (j < SIZE)


@triton.jit
def read(pointer, at, inside):
    x = tl.load(pointer + at, mask=inside, other=0.0)
    if pointer.dtype.element_ty == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def softmax(M, rows, inside):
    e = tl.where(inside, exp(M - peak(M, inside, rows, 2)), 0.0)
    return e * inverse(over_columns(e))


@triton.jit
def start(M, rows, columns, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """P and u before the first division by column sums; the denominators a = 1/v and b = 1/u that eps is carried on, less
    a part that fades on its own; the logarithms (base 2) la and lb of that part.

    "col_row": R = exp(M), so that u = exp(r), v = exp(c). Without eps v doesn't matter. With it, a = exp(-c) and
    b = exp(-r) do. They can be beyond any float, but k divisions later what is left of them is eps^k exp(-c), which
    needs its logarithm only. r takes half of a row's logits where they are negative: v is small then just where u is,
    and neither has to become huge to make up for the other. (With logits of many hundreds of both signs it can happen
    all the same. Such a row or column comes out as 0.)

    "row_col": R = softmax(M) + eps. With eps nothing in it vanishes, and P is R. Without, P is exp(M - r - c) again.
    """
    wide: tl.constexpr = M.dtype
    S: tl.constexpr = M.shape[0]
    N: tl.constexpr = M.shape[1]
    inside = rows & columns
    u = tl.full((S, N, 1), 1.0, wide)
    a, b = tl.full((S, 1, N), 1.0, wide), u
    la, lb = a, u
    if ROW_COL:
        if EPS > 0:
            P = tl.where(inside, softmax(M, rows, inside) + EPS, 0.0)
        else:
            M = M - peak(M, inside, rows, 2)
            u = inverse(over_columns(tl.where(inside, exp(M), 0.0)))
            P = tl.where(inside, exp(M - peak(M, inside, columns, 1)), 0.0)
    else:
        half = u * 0.0
        if EPS > 0:
            half = 0.5 * tl.minimum(peak(M, inside, rows, 2), 0.0)
            M = M - half
        c = peak(M, inside, columns, 1)
        r = peak(M - c, inside, rows, 2)
        P = tl.where(inside, exp((M - c) - r), 0.0)
        u = exp(r + half)
        if EPS > 0:
            a, b = a * 0.0, b * 0.0
            la, lb = c * (-LOG2E), (r + half) * (-LOG2E)
    return P, u, a, b, la, lb


@triton.jit
def divide(s, a, la, ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr):
    """The new scaling vector, from sums s of P scaled by the other one; and the new a and la."""
    total = s
    if EPS > 0:
        a = s + EPS * a
        total = a
        if not ROW_COL:
            la = la + LOG2_EPS
            total = a + tl.exp2(tl.minimum(la, 126.0))  # beyond, 1/total is as good as 0
        total = tl.where(s == 0.0, 0.0, total)  # padding, where eps alone would drive 1/total beyond all bounds
    return inverse(total), a, la


@triton.jit
def absorb(f, a, la, last, ROW_COL: tl.constexpr, EPS: tl.constexpr):
    """What to multiply into P of a scaling vector f; what is left of f; the new a and la.

    Where the fading part still rules (la is large), f is next to nothing and P would be lost: it stays as it is. After
    the last iteration that doesn't matter any more.
    """
    one = tl.full(f.shape, 1.0, f.dtype)
    if EPS > 0:
        if ROW_COL:
            return f, one, one, la
        else:
            settled = la < tl.where(last, NEVER, SETTLED)
            return tl.where(settled, f, 1.0), tl.where(settled, 1.0, f), tl.where(settled, 1.0, a), tl.where(settled, float("-inf"), la)
    else:
        return f, one, a, la


@triton.jit
def advance(P, u, a, b, la, lb, first, iters, H: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr):
    """Iterations first to first + H - 1, as far as there are so many. "row_col" leaves out the row sums of the last."""
    v = a
    for t in range(first, tl.minimum(first + H, iters)):
        v, a, la = divide(over_rows(P * u), a, la, ROW_COL, EPS, LOG2_EPS)
        w, b, lb = divide(over_columns(P * v), b, lb, ROW_COL, EPS, LOG2_EPS)
        u = tl.where(t < iters - ROW_COL, w, u)
    last = first + H >= iters
    fu, u, b, lb = absorb(u, b, lb, last, ROW_COL, EPS)
    fv, v, a, la = absorb(v, a, la, last, ROW_COL, EPS)
    return (P * fu) * fv, u, a, b, la, lb


@triton.jit
def normalise(
    M, rows, columns, iters,
    H: tl.constexpr, ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """R from the logits M."""
    if ITERATES:
        P, u, a, b, la, lb = start(M, rows, columns, ROW_COL, EPS)
        for first in range(0, iters, H):
            P, u, a, b, la, lb = advance(P, u, a, b, la, lb, first, iters, H, ROW_COL, EPS, LOG2_EPS)
    else:
        inside = rows & columns
        if ROW_COL:
            P = tl.where(inside, softmax(M, rows, inside) + EPS, 0.0)
        else:
            P = tl.where(inside, exp(M), 0.0)
    return P


@triton.jit(do_not_specialize=["count", "iters"])
def forward(
    logits,
    count, iters,
    R,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """R (count n n) from logits (count n n)."""
    base, at, rows, columns = place(count, SIZE, S, N)
    M = read(logits + base, at, rows & columns)
    P = normalise(M, rows, columns, iters, H, ROW_COL, EPS, LOG2_EPS, ITERATES)
    tl.store(R + base + at, P.to(R.dtype.element_ty), mask=rows & columns)


@triton.jit(do_not_specialize=["count", "iters"])
def unrolled(
    logits, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr, ITERATES: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the loop.

    D is the derivative with respect to the entries of P, u and v held. Taking back a division by row sums subtracts from
    D what went through u: (u * row sums of P D) v^T; likewise for columns, whatever eps is. Segments of H iterations are
    gone through from the last to the first, each run again from the start to get its u and v. Iterations beyond the last
    leave u and v as they are, and D too.
    """
    base, at, rows, columns = place(count, SIZE, S, N)
    inside = rows & columns
    M = read(logits + base, at, inside)
    D = read(dR + base, at, inside)
    if ITERATES:
        P0, u0, a0, b0, la0, lb0 = start(M, rows, columns, ROW_COL, EPS)
        segments = tl.cdiv(iters, H)
        for segment in range(segments):
            begin = (segments - 1 - segment) * H
            P, u, a, b, la, lb = P0, u0, a0, b0, la0, lb0
            for first in range(0, begin, H):
                P, u, a, b, la, lb = advance(P, u, a, b, la, lb, first, iters, H, ROW_COL, EPS, LOG2_EPS)
            us, vs = (u,), ()
            for h in tl.static_range(H):
                t = begin + h
                v, a, la = divide(over_rows(P * us[h]), a, la, ROW_COL, EPS, LOG2_EPS)
                if h > 0:
                    v = tl.where(t < iters, v, vs[h - 1])
                w, b, lb = divide(over_columns(P * v), b, lb, ROW_COL, EPS, LOG2_EPS)
                us, vs = us + (tl.where(t < iters - ROW_COL, w, us[h]),), vs + (v,)
            fu, _, _, _ = absorb(us[H], b, lb, segment == 0, ROW_COL, EPS)
            fv, _, _, _ = absorb(vs[H - 1], a, la, segment == 0, ROW_COL, EPS)
            D = tl.where(P == 0.0, 0.0, (D * fu) * fv)
            for back in tl.static_range(H):
                t = begin + H - 1 - back
                u, v = us[H - back], vs[H - 1 - back]
                w = u * over_columns(P * D)
                D = D - tl.where(t < iters - ROW_COL, w, 0.0) * v
                w = v * over_rows(P * D)
                D = D - us[H - 1 - back] * tl.where(t < iters, w, 0.0)
        if ROW_COL:
            R = softmax(M, rows, inside)
            E = P0 * D
            if EPS > 0:
                E = R * D
            dM = E - R * over_columns(E)
        else:
            dM = P0 * D
    else:
        if ROW_COL:
            R = softmax(M, rows, inside)
            dM = R * D
            dM = dM - R * over_columns(dM)
        else:
            dM = exp(M) * D
    tl.store(dlogits + base + at, dM.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def row(X, p):
    """Row p, [S, 1, N]."""
    return over_rows(tl.where(tl.arange(0, X.shape[1])[None, :, None] == p, X, 0.0))


@triton.jit
def column(X, p):
    """Column p, [S, N, 1]."""
    return over_columns(tl.where(tl.arange(0, X.shape[2])[None, None, :] == p, X, 0.0))


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
    return E - R * (u + v)


@triton.jit
def balance(R, G, steps, SIZE: tl.constexpr, DIRECT: tl.constexpr):
    """dM, from G divided by its maximum: products with small gradients would vanish."""
    scale = tl.max(tl.max(tl.abs(G), axis=2, keep_dims=True), axis=1, keep_dims=True)
    G = G * inverse(scale)
    if DIRECT:
        return solve(R, G, SIZE) * scale
    else:
        return descend(R, G, steps) * scale


@triton.jit(do_not_specialize=["count", "iters"])
def implicit(
    logits, R, dR,
    count, iters,
    dlogits,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    ROW_COL: tl.constexpr, EPS: tl.constexpr, LOG2_EPS: tl.constexpr, ITERATES: tl.constexpr,
    SAVED: tl.constexpr,
):  # fmt: skip
    """dlogits (count n n), the derivative of the fixed point at R, which is read where it was SAVED and else made again."""
    base, at, rows, columns = place(count, SIZE, S, N)
    if SAVED:
        P = read(R + base, at, rows & columns)
    else:
        M = read(logits + base, at, rows & columns)
        P = normalise(M, rows, columns, iters, H, ROW_COL, EPS, LOG2_EPS, ITERATES)
    G = read(dR + base, at, rows & columns)
    tl.store(dlogits + base + at, balance(P, G, 0, SIZE, True).to(dlogits.dtype.element_ty), mask=rows & columns)


@triton.jit(do_not_specialize=["count", "steps"])
def mhc_bwd(
    out, dout,
    count, steps,
    dM,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """dM (count n n): the system solved, or approached in `steps` steps."""
    base, at, rows, columns = place(count, SIZE, S, N)
    R = read(out + base, at, rows & columns)
    G = read(dout + base, at, rows & columns)
    tl.store(dM + base + at, balance(R, G, steps, SIZE, DIRECT).to(dM.dtype.element_ty), mask=rows & columns)
