"""The loops that define sinkhorn and mhc_bwd."""

import math


def rows(x):
    return x.sum(-1)[..., None]


def columns(x):
    return x.sum(-2)[..., None, :]


def sinkhorn(xp, scan, logits, *, iters=20, eps=0.0, order="col_row", gradient="unrolled"):
    """In logarithms, where nothing overflows or vanishes."""

    def add_eps(x):
        return xp.logaddexp(x, xp.zeros_like(x) + math.log(eps)) if eps else x

    def divide(x, axis):
        """x less the logarithm of (sum of exp(x) + eps)."""
        expand = (..., None) if axis == -1 else (..., None, slice(None))
        top = xp.stop_gradient(xp.max(x, axis))[expand]  # what is computed doesn't depend on it
        return x - add_eps(top + xp.log(xp.sum(xp.exp(x - top), axis)[expand]))

    x = logits
    if order == "col_row":
        for _ in range(iters):
            x = divide(divide(x, -2), -1)
    else:
        top = xp.stop_gradient(xp.max(x, -1))[..., None]
        x = add_eps(x - top - xp.log(rows(xp.exp(x - top))))
        for i in range(iters):
            x = divide(x if i == 0 else divide(x, -1), -2)
    return (xp.exp(x),)


def sinkhorn_backward(xp, scan, inputs, cotangents, **options):
    if options["gradient"] == "unrolled":
        return None
    (R,) = sinkhorn(xp, scan, *inputs, **options)
    return (implicit(xp, R, cotangents[0]),)


def implicit(xp, R, dR):
    """R * (dR - u 1^T - 1 v^T), with u and v such that its row and column sums are 0.

    The equations of v are those of a network of resistors between the columns. Its nodes are taken out one after another,
    each replaced by conductances and sources between its neighbours (star to mesh).
    """
    n = R.shape[-1]
    share = R / rows(R)
    W, F = xp.zeros_like(R), xp.zeros_like(R)
    for i in range(n):
        q = share[..., i, :, None] * R[..., i, None, :]
        W = W + q
        F = F + q * (dR[..., i, :, None] - dR[..., i, None, :])
    stars = []
    for _ in range(n - 1):
        w, f = W[..., 0, 1:], F[..., 0, 1:]
        total = xp.sum(w, -1)[..., None]
        linked = total > 1e-37
        scale = xp.where(linked, 1 / xp.where(linked, total, xp.ones_like(total)), xp.zeros_like(total))
        ws, fs = w * scale, f * scale
        stars.append((ws, fs))
        W = W[..., 1:, 1:] + ws[..., :, None] * w[..., None, :]
        F = F[..., 1:, 1:] + (ws[..., :, None] * f[..., None, :] - fs[..., :, None] * w[..., None, :])
    potentials = [xp.zeros_like(R[..., 0, 0])]
    for ws, fs in reversed(stars):
        potentials.insert(0, xp.sum(ws * xp.stack(potentials, -1) + fs, -1))
    v = xp.stack(potentials, -1)[..., None, :]
    dM = xp.zeros_like(R)
    for k in range(n):
        dM = dM + share * R[..., k, None] * ((dR - dR[..., k, None]) - (v - v[..., k, None]))
    return dM


def mhc_bwd(xp, scan, out, dout, *, cg_iters=None):
    if cg_iters is None:
        return (implicit(xp, out, dout),)

    def divide(a, b):
        return xp.where(b > 0, a / xp.where(b > 0, b, xp.ones_like(b)), xp.zeros_like(b))

    def system(u, v):
        return rows(out) * u + rows(out * v), columns(out * u) + columns(out) * v

    def product(a, b):
        return sum((x * y).sum((-2, -1))[..., None, None] for x, y in zip(a, b, strict=True))

    scale = xp.stop_gradient(xp.max(xp.abs(dout), (-2, -1)))[..., None, None]  # squares of small gradients would vanish
    E = out * divide(dout, scale + xp.zeros_like(dout))
    x, residual = (xp.zeros_like(rows(E)), xp.zeros_like(columns(E))), (rows(E), columns(E))
    direction, norm = residual, product(residual, residual)
    for _ in range(cg_iters):
        image = system(*direction)
        alpha = divide(norm, product(direction, image))
        x = tuple(a + alpha * b for a, b in zip(x, direction, strict=True))
        residual = tuple(a - alpha * b for a, b in zip(residual, image, strict=True))
        before, norm = norm, product(residual, residual)
        direction = tuple(a + divide(norm, before) * b for a, b in zip(residual, direction, strict=True))
    return ((E - out * (x[0] + x[1])) * scale,)
