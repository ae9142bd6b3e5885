"""Sums and reciprocals of what a lane holds, in the order that takes a GPU the fewest instructions."""

import triton
import triton.language as tl

from bridge.fast import PORTABLE, reciprocal


@triton.jit
def reciprocals(x):
    """1/x of a vector with sizes 2^-60 to 2^60, two at a time: where r = 1/(ef), 1/e = rf and 1/f = re. In a clock a quarter as
    many reciprocals as products are made, which the few products of a small matrix would wait for."""
    M: tl.constexpr = x.shape[2] * x.shape[4]
    if PORTABLE or x.dtype == tl.float64 or M != 4:
        return reciprocal(x)
    else:
        e, f = tl.split(tl.reshape(x, (x.shape[0], M // 2, 2)))
        r = reciprocal(e * f)
        return tl.reshape(tl.join(r * f, r * e), x.shape)


@triton.jit
def chain(x, more=None):
    """The sum over the last axis of five, which a lane has for itself, and `more`: one after another, where tl.sum makes a tree.
    Of a sum of products, a tree fuses every other one only with an addition."""
    M: tl.constexpr = x.shape[4]
    if PORTABLE or M == 1:
        total = tl.sum(x, axis=4, keep_dims=True)
        return total if more is None else total + more
    else:
        parts = (x,)
        for _ in tl.static_range(4):
            if len(parts) < M:
                halves = ()
                for k in tl.static_range(len(parts)):
                    left = tl.reshape(parts[k], (x.shape[0], x.shape[1], x.shape[2], x.shape[3], M // (2 * len(parts)), 2))
                    halves += tl.split(left)
                parts = halves
        total = parts[0] if more is None else parts[0] + more
        for k in tl.static_range(1, M):
            total += parts[k]
        return total
