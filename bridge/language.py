"""What kernels share beyond triton.language."""

import os

import triton
import triton.language as tl

from bridge.fast import PORTABLE, reciprocal

# Triton decides on its interpreter when a kernel is decorated; what the environment says later changes nothing.
INTERPRETING: bool = PORTABLE.value


def mend_cache_folder() -> None:
    """Undo what importing jax-triton does to Triton: it sets TRITON_CACHE_DIR to "", with which no kernel can be stored."""
    if os.environ.get("TRITON_CACHE_DIR") == "":
        del os.environ["TRITON_CACHE_DIR"]


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def columns(tile):
    """The N columns of a [W, N] tile, N a power of two, as a tuple of [W] vectors.

    A register can't be indexed by a loop variable, so the tile is halved until single columns are left: each round splits
    every piece into its even and its odd columns, and the pieces come out in bit-reversed order.
    """
    W: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    pieces = (tile,)
    for level in tl.static_range(5):
        if len(pieces) < N:
            halves = ()
            for p in tl.static_range(len(pieces)):
                even, odd = tl.split(tl.reshape(pieces[p], (W, N // (2 * len(pieces)), 2)))
                halves = halves + (even, odd)
            pieces = halves
    ordered = ()
    for n in tl.static_range(N):
        piece = pieces[((n & 1) * 16 + (n & 2) * 4 + (n & 4) + (n & 8) // 4 + (n & 16) // 16) * N // 32]
        ordered = ordered + (tl.reshape(piece, (W,)),)
    return ordered


@triton.jit
def rows(tile):
    """The N rows of a [N, W] tile, as tiles [1, W]."""
    made = ()
    pieces = columns(tl.trans(tile))
    for n in tl.static_range(tile.shape[0]):
        made = made + (tl.reshape(pieces[n], (1, tile.shape[1])),)
    return made


@triton.jit
def groups(tile, J: tl.constexpr):
    """The rows of a [N, W] tile J at a time, as N/J tiles [J, W]."""
    N: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    made = rows(tl.reshape(tile, (N // J, J * W)))
    if J > 1:
        pieces, made = made, ()
        for n in tl.static_range(N // J):
            made = made + (tl.reshape(pieces[n], (J, W)),)
    return made


@triton.jit
def spread(pieces, LANES: tl.constexpr):
    """The rows of tiles [J, W] in turn, each row in all of J lanes (and over again in others, up to LANES): tiles [1, W] or [J, W].

    For tiles that take long to compute. Left alone, the compiler computes a tile where it is used: each of those lanes would compute
    all of it. Here each computes a row of J, and gets the others. From 4 lanes on the compiler's own exchange, through shared
    memory, keeps fewer registers: a row can be read when it is needed. It comes behind a scan, across which no layout is
    moved; over an axis of a single entry a scan does nothing else.
    """
    J: tl.constexpr = pieces[0].shape[0]
    W: tl.constexpr = pieces[0].shape[1]
    m: tl.constexpr = len(pieces)
    if J == 1:
        return pieces
    elif J == LANES and J == 2:
        made = ()
        for k in tl.static_range(m):
            made = made + everywhere(pieces[k])
        return made
    else:
        tile = tl.reshape(tl.cumsum(stack(pieces)[:, :, :, None], axis=3), (J, W, m))
        return rows(tl.reshape(tl.permute(tile, (2, 0, 1)), (m * J, W)))


@triton.jit
def everywhere(tile):
    """The J rows of a [J, W] tile, as tiles [J, W] that have a row J times: where J lanes have one each, each gets all."""
    known = (tile,)
    for level in tl.static_range(6):
        if len(known) < tile.shape[0]:
            known = twice(known)
    return known


@triton.jit
def swap(tile, bit: tl.constexpr):
    """The rows of a tile [J, W], each in the place of the one whose index differs in a bit."""
    J: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    return tl.reshape(flip(tl.reshape(tile, (J, W, 1)), bit * W), (J, W))


@triton.jit
def twice(known):
    """Of tiles [J, W] that each know a row for every bit of it below `bit`, those that know twice as many: the exchange of
    `everywhere` over one bit."""
    bit: tl.constexpr = len(known)
    low = (tl.arange(0, known[0].shape[0])[:, None] & bit) == 0
    lower, upper = (), ()
    for k in tl.static_range(bit):
        other = swap(known[k], bit)
        lower, upper = lower + (tl.where(low, known[k], other),), upper + (tl.where(low, other, known[k]),)
    return lower + upper


@triton.jit
def halves(lower, upper, bit: tl.constexpr):
    """[J, W]: rows of `lower`, or where a row's index has the bit, of `upper`; each with that of the row where the bit differs added."""
    low = (tl.arange(0, lower.shape[0])[:, None] & bit) == 0
    return tl.where(low, lower, upper) + swap(tl.where(low, upper, lower), bit)


@triton.jit
def collect(sums, value, k: tl.constexpr, COUNT: tl.constexpr, DOWN: tl.constexpr = False):
    """Sums over the rows of tiles [J, W], collected as the tiles come, COUNT of them (a power of two up to J) at a time. `value` is the
    k-th; DOWN: they come from the last to the first. After COUNT `sums` is a single tile, whose rows j, COUNT + j, ... add up to the
    sum for the j-th.

    Pairs are summed at once, so that few tiles are kept: each lane sends half of what it has, and keeps the other half.
    """
    came: tl.constexpr = COUNT - k % COUNT if DOWN else k % COUNT + 1
    merged, rest = value, sums
    for level in tl.static_range(5):
        if came % (2 << level) == 0:
            if DOWN:
                merged = halves(merged, rest[0], 1 << level)
            else:
                merged = halves(rest[0], merged, 1 << level)
            rest = rest[1:]
    return (merged,) + rest


@triton.jit
def stack(values):
    """[J, W, m] from m tiles [J, W], m a power of two: the inverse. What is stacked stays in the lanes where it is."""
    m: tl.constexpr = len(values)
    pieces = values
    for level in tl.static_range(5):
        if len(pieces) > 1:
            joined = ()
            for p in tl.static_range(len(pieces) // 2):
                joined = joined + (tl.join(pieces[p], pieces[p + len(pieces) // 2]),)
            pieces = joined
    return tl.reshape(pieces[0], (values[0].shape[0], values[0].shape[1], m))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)). Where the exponential is beyond all numbers it is 0, as it is to precision."""
    return reciprocal(1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to full relative precision at every x.

    The part beyond max(x, 0) is log1p(e), e = exp(-|x|) <= 1. From log(1 + e) a small e would be lost altogether.
    """
    e = tl.exp2(-tl.abs(x) * LOG2E)
    if x.dtype == tl.float64:
        # With s = e / (2 + e) <= 1/3 it is 2 artanh(s) = 2 s (1 + q/3 + q^2/5 + ...), q = s^2: up to q^16/33 it is 2e-17 off.
        s = e / (2.0 + e)
        series = s * 0.0 + 1.0 / 33.0
        for k in tl.static_range(16):
            series = series * (s * s) + 1.0 / (31 - 2 * k)
        return tl.maximum(x, 0.0) + 2.0 * s * series
    else:
        # log1p(e) / e on [0, 1], the polynomial of degree 8 with the smallest relative error, 3e-8.
        p = 0.005231836017 * e - 0.029501617066
        p = p * e + 0.078219658388
        p = p * e - 0.13662665469
        p = p * e + 0.19105701983
        p = p * e - 0.24842891415
        p = p * e + 0.33319082465
        p = p * e - 0.49999492124
        p = p * e + 0.99999996967
        return tl.maximum(x, 0.0) + p * e


@triton.jit
def product(x, y):
    """x y, rounded, to be summed over lanes that each hold a copy of the sum: the same bits in all of them.

    Lanes add up in pairs. Left alone, the compiler fuses a lane's own product with the sum of the pair, so that each of the
    two rounds the other's product and not its own: their copies differ in the last bit, and which of them is stored is
    chance. A product that is a fused one already, with zero, can't be fused again.
    """
    return tl.fma(x, y, tl.zeros((1, 1), x.dtype))


@triton.jit
def flip(x, M: tl.constexpr):
    """x [A, m, V] with its entries exchanged where bit M of their index in row-major order differs: what is here is there.

    Written as x ^ (x ^ there), with the inner part as a sum over an axis of two, so that no layout is assumed. Where the bit is
    one of the lane's, the compiler leaves a single shuffle.
    """
    kind: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    bits = tl.reshape(x.to(kind, bitcast=True), (x.shape[0] * x.shape[1] * x.shape[2] // (2 * M), 2, M))
    return tl.reshape(bits ^ tl.xor_sum(bits, axis=1, keep_dims=True), x.shape).to(x.dtype, bitcast=True)


@triton.jit
def sum_each(values):
    """[A, m], entry k of which is the sum over the second axis of values[:, :, k] [A, W]; m is a power of two up to W.

    A reduce-scatter: each round sends half of the values to the lanes that will keep them, and keeps the other half.
    """
    A: tl.constexpr = values.shape[0]
    W: tl.constexpr = values.shape[1]
    m: tl.constexpr = values.shape[2]
    left = values
    if W > m:
        left = tl.sum(tl.reshape(values, (A, W // m, m, m)), axis=1)
    for level in tl.static_range(6):
        if left.shape[2] > 1:
            left = halve(left)
    return tl.reshape(left, (A, m))


@triton.jit
def halve(values):
    """[A, m, V/2] from [A, m, V]: where a column has the bit V/2, the upper half of the values, else the lower; each with what
    stands in the column without the bit, or with it, added."""
    A: tl.constexpr = values.shape[0]
    m: tl.constexpr = values.shape[1]
    half: tl.constexpr = values.shape[2] // 2
    lower, upper = tl.split(tl.permute(tl.reshape(values, (A, m, 2, half)), (0, 1, 3, 2)))
    high = ((tl.arange(0, m) & half) != 0)[None, :, None]
    kept, sent = tl.where(high, upper, lower), tl.where(high, lower, upper)
    return kept + flip(sent, half * half)


@triton.jit(do_not_specialize=["size", "second_size"])
def widen(first, second, size, second_size, first_wide, second_wide, BLOCK: tl.constexpr):
    """The same numbers in a wider type, of two arrays: kernels that read them many times convert them once."""
    program, blocks = tl.program_id(0), tl.cdiv(size, BLOCK)
    if program < blocks:
        widen_block(first, size, first_wide, program, BLOCK)
    else:
        widen_block(second, second_size, second_wide, program - blocks, BLOCK)


@triton.jit
def widen_block(source, size, wide, block, BLOCK: tl.constexpr):
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(wide + i, tl.load(source + i, mask=i < size, other=0.0).to(wide.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["count", "size"])
def sum_leading(source, count, size, total, BLOCK: tl.constexpr):
    """total[i] = source[0, i] + source[1, i] + ..., in this order. source: count x size."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    acc = tl.zeros((BLOCK,), source.dtype.element_ty)
    for k in range(count):
        acc += tl.load(source + k * size.to(tl.int64) + i, mask=inside, other=0.0)
    tl.store(total + i, acc.to(total.dtype.element_ty), mask=inside)
