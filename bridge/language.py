"""What kernels share beyond triton.language."""

import os

import triton
import triton.language as tl
from triton import knobs

# Triton decides on its interpreter when a kernel is decorated; what the environment says later changes nothing.
INTERPRETING = bool(knobs.runtime.interpret)


def mend_cache_folder() -> None:
    """Undo what importing jax-triton does to Triton: it sets TRITON_CACHE_DIR to "", with which no kernel can be stored."""
    if os.environ.get("TRITON_CACHE_DIR") == "":
        del os.environ["TRITON_CACHE_DIR"]


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rows(tile, T: tl.constexpr, W: tl.constexpr):
    """The T rows of a [T, W] tile, T a power of two, as a tuple of [W] vectors.

    A register can't be indexed by a loop variable, so the tile is halved until single rows are left: each round splits
    every piece into its even and its odd rows, and the pieces come out in bit-reversed order.
    """
    pieces = (tl.trans(tile),)
    for level in tl.static_range(5):
        if len(pieces) < T:
            halves = ()
            for p in tl.static_range(len(pieces)):
                even, odd = tl.split(tl.reshape(pieces[p], (W, T // (2 * len(pieces)), 2)))
                halves = halves + (even, odd)
            pieces = halves
    ordered = ()
    for t in tl.static_range(T):
        piece = pieces[((t & 1) * 16 + (t & 2) * 4 + (t & 4) + (t & 8) // 4 + (t & 16) // 16) * T // 32]
        ordered = ordered + (tl.reshape(piece, (W,)),)
    return ordered


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), from the exponential of -|x|, which can't overflow."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to full relative precision at every x.

    The part beyond max(x, 0) is log1p(e), e = exp(-|x|) <= 1. With s = e / (2 + e) <= 1/3 it is 2 artanh(s), a series
    in s * s whose terms are all positive: nothing cancels, where log(1 + e) loses a small e altogether.
    """
    e = tl.exp2(-tl.abs(x) * LOG2E)
    s = e / (2.0 + e)
    q = s * s
    # 2 artanh(s) = 2 s (1 + q/3 + q^2/5 + ...); q <= 1/9, so 16 terms reach 1/9^16/33 = 2e-17, float64's precision.
    series = q * 0.0 + 1.0 / 33.0
    for k in tl.static_range(16):
        series = series * q + 1.0 / (31 - 2 * k)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sum_products(products, inside, axis: tl.constexpr):
    """The sum of products over an axis, of those inside; the same bits in every lane that holds a copy of it.

    Lanes add up in pairs. Left alone, the compiler fuses a lane's own product with the sum of the pair, so that each of the
    two rounds the other's product and not its own: their copies differ in the last bit, and which of them is stored is
    chance. What stands between product and sum here keeps them apart.
    """
    return tl.sum(tl.where(inside, products, 0.0), axis=axis)


@triton.jit(do_not_specialize=["count", "size"])
def sum_leading(source, count, size, total, BLOCK: tl.constexpr):
    """total[i] = source[0, i] + source[1, i] + ..., in this order. source: count x size."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    acc = tl.zeros((BLOCK,), source.dtype.element_ty)
    for k in range(count):
        acc += tl.load(source + k * size.to(tl.int64) + i, mask=inside, other=0.0)
    tl.store(total + i, acc.to(total.dtype.element_ty), mask=inside)
