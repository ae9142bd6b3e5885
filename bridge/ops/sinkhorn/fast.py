"""What is particular to NVIDIA's GPUs, and its portable form for the interpreter."""

import triton
import triton.language as tl

from bridge import language

PORTABLE = tl.constexpr(language.INTERPRETING)


@triton.jit
def reciprocal(x):
    """1/x of numbers that are neither huge nor tiny, by the instruction for it: a division takes several times as long."""
    if PORTABLE or x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
def quarter(x):
    """The last axis of five taken apart, by its two lowest bits. No register moves."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.shape[4] // 4, 2, 2))
    even, odd = tl.split(x)
    return tl.split(even) + tl.split(odd)


@triton.jit
def gather(x, y, more):
    """The sum of x y over the last axis of five, and `more`, where a lane has all of a matrix. A tree of sums takes an addition for each two products that a lane
    has. Four chains of fused products and sums take none, or one."""
    M: tl.constexpr = x.shape[4]
    if PORTABLE or M < 4:
        return tl.sum(x * y, axis=4, keep_dims=True) + more
    else:
        xs, ys = quarter(x), quarter(y)
        total = xs[0] * ys[0] + more * (4 / M)
        for k in tl.static_range(1, 4):
            total += xs[k] * ys[k]
        return tl.sum(total, axis=4, keep_dims=True) if M > 4 else total
