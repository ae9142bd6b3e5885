"""The loop of order "col_row" with eps, where rows and columns far below eps grow by 1/eps in every division.

P = 2^(L + e + f), with L the logarithm of exp(M - r - c) and with whole numbers e over rows and f over columns, which count
the powers of two of u and v after every iteration. P is made again from L each time, lest what grows were lost before.
"""

import triton
import triton.language as tl

from bridge.ops.sinkhorn.loop import settle, shifts, step
from bridge.ops.sinkhorn.tiles import over_columns, over_rows, power

HELD = tl.constexpr(2)  # iterations whose u, v, e and f the registers hold


@triton.jit
def exponent(x):
    """The logarithm of the power of two in x."""
    p = power(x)[0]
    if p.dtype == tl.float64:
        return ((p.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.float64)
    else:
        return ((p.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def start_growing(M):
    """Columns with positive logits begin with f = 0 and a = exp(-c): the first division ends with that."""
    r, c, rows, columns, L = shifts(M)
    e, f = tl.floor(r), tl.floor(tl.minimum(c, 0.0))
    return L, e, f, tl.exp2(r - e), c * 0.0 + 1.0, tl.exp2(f - c), tl.exp2(e - r), rows, columns


@triton.jit
def step_growing(L, e, f, u, v, a, b, rows, columns, EPS: tl.constexpr):
    P = tl.exp2(L + (e + f))
    u, v, a, b = step(P, u, a, b, rows, columns, EPS)
    e, f = e + exponent(u), f + exponent(v)
    P, u, v, a, b = settle(P, u, v, a, b)
    return e, f, u, v, a, b


@triton.jit
def normalise_growing(M, iters, EPS: tl.constexpr):
    L, e, f, u, v, a, b, rows, columns = start_growing(M)
    for _ in range(iters):
        e, f, u, v, a, b = step_growing(L, e, f, u, v, a, b, rows, columns, EPS)
    return (tl.exp2(L + (e + f)) * u) * v


@triton.jit
def unrolled_growing(M, D, iters, EPS: tl.constexpr):
    """The derivative with respect to the logits, from that with respect to R. Here D is the derivative with respect to the
    logarithms of P's entries, since these may have been next to nothing before. Iterations beyond the last change nothing."""
    L, e0, f0, u0, v0, a0, b0, rows, columns = start_growing(M)
    segments = tl.cdiv(iters, HELD)
    for segment in range(segments):
        begin = (segments - 1 - segment) * HELD
        e, f, u, v, a, b = e0, f0, u0, v0, a0, b0
        for _ in range(begin):
            e, f, u, v, a, b = step_growing(L, e, f, u, v, a, b, rows, columns, EPS)
        held = ()
        for h in tl.static_range(HELD):
            P = tl.exp2(L + (e + f))
            x, y, p, q = step(P, u, a, b, rows, columns, EPS)
            held += ((e, f, u, x, y),)
            if begin + h < iters:
                e, f = e + exponent(x), f + exponent(y)
                P, u, v, a, b = settle(P, x, y, p, q)
        if segment == 0:
            D = D * ((tl.exp2(L + (e + f)) * u) * v)
        for h in tl.static_range(HELD - 1, -1, -1):
            e, f, old, u, v = held[h]
            if begin + h < iters:
                P = tl.exp2(L + (e + f))
                D = D - (P * v) * (u * over_columns(D))
                D = D - (P * old) * (v * over_rows(D))
    return D
