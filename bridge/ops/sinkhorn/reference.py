"""The loops that define sinkhorn and mhc_bwd."""

import math


def rows(x):
    return x.sum(-1)[..., None]


def columns(x):
    return x.sum(-2)[..., None, :]


def sinkhorn(xp, scan, logits, *, iters=20, eps=0.0, order="col_row", gradient="unrolled"):
    """In logarithms, where nothing overflows or vanishes. Entries of -inf are masked; what is masked altogether stays 0."""

    def add_eps(x):
        return xp.logaddexp(x, xp.zeros_like(x) + math.log(eps)) if eps else x

    def total(x, axis):
        """The logarithm of the sum of exp(x), and 0 for a sum of 0."""
        expand = (..., None) if axis == -1 else (..., None, slice(None))
        top = xp.stop_gradient(xp.max(x, axis))[expand]  # what is computed doesn't depend on it
        top = xp.where(top == -math.inf, xp.zeros_like(top), top)
        sum = xp.sum(xp.exp(x - top), axis)[expand]
        return top + xp.log(xp.where(sum == 0, xp.ones_like(sum), sum))

    def divide(x, axis):
        return x - add_eps(total(x, axis))

    if order == "col_row":
        return (xp.exp(xp.repeat(iters, lambda x: divide(divide(x, -2), -1), logits)),)
    x = add_eps(logits - total(logits, -1))
    if iters:
        x = xp.repeat(iters - 1, lambda x: divide(divide(x, -1), -2), divide(x, -2))
    return (xp.exp(x),)


def sinkhorn_backward(xp, scan, inputs, cotangents, **options):
    if options["gradient"] == "unrolled":
        return None
    (R,) = sinkhorn(xp, scan, *inputs, **options)
    (logits,) = inputs
    return (xp.where(logits == -math.inf, xp.zeros_like(R), implicit(xp, R, cotangents[0])),)


def implicit(xp, R, dR):
    """R * (dR - u 1^T - 1 v^T), with u and v such that its row and column sums are 0.

    The equations of v are those of a network of resistors between the columns: conductances W, and sources F. Its nodes are
    taken out one after another, each replaced by conductances and sources between its neighbours (star to mesh).
    """

    def inverse(x):
        """1/x, and 0 where x is next to 0: where 1/x might not be finite."""
        there = x > 8 * xp.finfo(x.dtype).tiny
        return xp.where(there, 1 / xp.where(there, x, xp.ones_like(x)), xp.where(x == x, xp.zeros_like(x), x))

    n = R.shape[-1]
    k = xp.arange(n, like=R) + xp.zeros_like(R[..., :1, :])  # 0, ..., n - 1 along a row
    zero, share = xp.zeros_like(R), R * inverse(rows(R))

    def turn(row):
        return xp.swapaxes(row, -1, -2)

    def row(x, p):
        return columns(xp.where(turn(k) == p, x, zero))

    def column(x, p):
        return rows(xp.where(k == p, x, zero))

    def connect(state):
        i, W, F = state
        g, q = row(dR, i), turn(row(share, i)) * row(R, i)
        return i + 1, W + q, F + q * (turn(g) - g)

    def eliminate(state):
        p, W, F = state
        w, f = xp.where(k > p, row(W, p), zero[..., :1, :]), xp.where(k > p, row(F, p), zero[..., :1, :])
        scale = inverse(rows(w))
        ws, fs = w * scale, f * scale
        W, F = W + turn(ws) * w, F + turn(ws) * f - turn(fs) * w
        return p + 1, xp.where(turn(k) == p, ws, W), xp.where(turn(k) == p, fs, F)

    def substitute(state):
        p, v = state
        return p - 1, xp.where(k == p, rows(row(W, p) * v + row(F, p)), v)

    def collect(state):
        j, dM = state
        return j + 1, dM + share * column(R, j) * ((dR - column(dR, j)) - (v - column(v, j)))

    first = k[..., :1]
    _, W, F = xp.repeat(n, connect, (first, zero, zero))
    _, W, F = xp.repeat(n - 1, eliminate, (first, W, F))
    _, v = xp.repeat(n - 1, substitute, (first + n - 2, zero[..., :1, :]))
    return xp.repeat(n, collect, (first, zero))[1]


def mhc_bwd(xp, scan, out, dout, *, cg_iters=None):
    if cg_iters is None:
        return (implicit(xp, out, dout),)

    def divide(a, b):
        return xp.where(b > 0, a / xp.where(b > 0, b, xp.ones_like(b)), xp.zeros_like(b))

    def system(u, v):
        return rows(out) * u + rows(out * v), columns(out * u) + columns(out) * v

    def product(a, b):
        return sum((x * y).sum((-2, -1))[..., None, None] for x, y in zip(a, b, strict=True))

    def step(state):
        x, residual, direction, norm = state
        image = system(*direction)
        alpha = divide(norm, product(direction, image))
        x = tuple(a + alpha * b for a, b in zip(x, direction, strict=True))
        residual = tuple(a - alpha * b for a, b in zip(residual, image, strict=True))
        before, norm = norm, product(residual, residual)
        direction = tuple(a + divide(norm, before) * b for a, b in zip(residual, direction, strict=True))
        return x, residual, direction, norm

    scale = xp.stop_gradient(xp.max(xp.abs(dout), (-2, -1)))[..., None, None]  # squares of small gradients would vanish
    E = out * divide(dout, scale + xp.zeros_like(dout))
    start, residual = (xp.zeros_like(rows(E)), xp.zeros_like(columns(E))), (rows(E), columns(E))
    x, *_ = xp.repeat(cg_iters, step, (start, residual, residual, product(residual, residual)))
    return ((E - out * (x[0] + x[1])) * scale,)
