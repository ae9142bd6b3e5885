"""Many small matrices in the registers of a program: how they lie there, are read, summed and written.

A program owns S matrices of N rows and columns, N the power of two from n on. Up to N = 8 a matrix lies in the registers of
one lane; a larger one is cut into blocks of I x J, a lane each. So a tile is [S, N/I, I, N/J, J], a vector over rows is
[S, N/I, I, 1, 1] and one over columns [S, 1, 1, N/J, J], and what is done with them reads as it would for one matrix.
"""

import triton
import triton.language as tl

from bridge.language import LOG2E
from bridge.ops.sinkhorn.fast import chain

ONCE = tl.constexpr("")  # how a load is cached, if nothing is said


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def over_rows(x):
    """Column sums."""
    x = tl.sum(x, axis=2, keep_dims=True)
    return tl.sum(x, axis=1, keep_dims=True) if x.shape[1] > 1 else x


@triton.jit
def over_columns(x):
    """Row sums."""
    x = tl.sum(x, axis=4, keep_dims=True)
    return tl.sum(x, axis=3, keep_dims=True) if x.shape[3] > 1 else x


@triton.jit
def weigh_rows(x, y, more=None):
    """Column sums of x y, and `more`."""
    products = tl.permute(x * y, (0, 1, 3, 4, 2))
    if x.shape[1] > 1:
        total = tl.sum(tl.permute(chain(products), (0, 1, 4, 2, 3)), axis=1, keep_dims=True)
        return total if more is None else total + more
    elif more is None:
        return tl.permute(chain(products), (0, 1, 4, 2, 3))
    else:
        return tl.permute(chain(products, tl.permute(more, (0, 1, 3, 4, 2))), (0, 1, 4, 2, 3))


@triton.jit
def weigh_columns(x, y, more=None):
    """Row sums of x y, and `more`."""
    if x.shape[3] > 1:
        total = tl.sum(chain(x * y), axis=3, keep_dims=True)
        return total if more is None else total + more
    else:
        return chain(x * y, more)


@triton.jit
def top_row(x):
    """The maximum of each column."""
    x = tl.max(x, axis=2, keep_dims=True)
    return tl.max(x, axis=1, keep_dims=True) if x.shape[1] > 1 else x


@triton.jit
def top_column(x):
    """The maximum of each row."""
    x = tl.max(x, axis=4, keep_dims=True)
    return tl.max(x, axis=3, keep_dims=True) if x.shape[3] > 1 else x


@triton.jit
def living(top):
    """A maximum, and 0 where all is masked; and whether it is."""
    dead = top == float("-inf")
    return tl.where(dead, 0.0, top), tl.where(dead, 1.0, 0.0).to(top.dtype)


@triton.jit
def place(count, SIZE: tl.constexpr, S: tl.constexpr):
    """Where this program's matrices begin, and how many of them there are."""
    first = tl.program_id(0).to(tl.int64) * S
    return first * (SIZE * SIZE), count - first


@triton.jit
def matrices(left, S: tl.constexpr):
    """Which matrices are read. Where none are left the last is, again: a load without a mask needs no zeros beforehand."""
    return tl.minimum(tl.arange(0, S), (tl.minimum(left, S) - 1).to(tl.int32))


@triton.jit
def numbers(x):
    """The numbers of rows and columns of a tile or a vector."""
    i = tl.reshape(tl.arange(0, x.shape[1] * x.shape[2]), (1, x.shape[1], x.shape[2], 1, 1))
    return i, tl.reshape(tl.arange(0, x.shape[3] * x.shape[4]), (1, 1, 1, x.shape[3], x.shape[4]))


@triton.jit
def join(pieces):
    """The pieces along further axes, at the end: register moves none."""
    for _ in tl.static_range(7):
        if len(pieces) > 1:
            pairs = ()
            for k in tl.static_range(len(pieces) // 2):
                pairs += (tl.join(pieces[k], pieces[k + len(pieces) // 2]),)
            pieces = pairs
    return pieces[0]


@triton.jit
def cast(x, WIDE: tl.constexpr):
    if x.dtype != tl.float64:
        x = x.to(tl.float32)  # from 16 bits to 64 in two steps: the interpreter knows no other way
    return x.to(tl.float64) if WIDE else x


@triton.jit
def read(
    pointer, left, other: tl.constexpr,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    AGAIN: tl.constexpr = ONCE,
):  # fmt: skip
    """A tile, `other` where there is no element. It is put together from pieces of a lane's rows, elements, or four where rows
    are whole multiples of that: then sums need no other lane's. What is read AGAIN isn't kept in registers till then:
    from which cache (".ca", the nearest, or ".cg") makes it another load."""
    W: tl.constexpr = 4 if SIZE % 4 == 0 else 1
    matrix = matrices(left, S)[:, None, None, None]
    row, column = tl.arange(0, N // I)[None, :, None, None] * I, tl.arange(0, N // J)[None, None, :, None] * J
    within = tl.arange(0, W)[None, None, None, :]
    pieces = ()
    for begin in tl.static_range(0, J, W):
        for i in tl.static_range(I):
            if I < N or (i < SIZE and begin < SIZE):
                at = pointer + (matrix * (SIZE * SIZE) + (row + i) * SIZE + (column + begin + within))
                inside = (row + i < SIZE) & (column + begin + within < SIZE) if SIZE < N else None
                piece = tl.load(at, mask=inside, other=other if SIZE < N else None, cache_modifier=AGAIN)
            else:
                piece = tl.full((S, N // I, N // J, W), other, pointer.dtype.element_ty)
            pieces += (piece,)
    x = tl.permute(tl.reshape(join(pieces), (S, N // I, N // J, W, J // W, I)), (0, 1, 5, 2, 4, 3))
    return cast(tl.reshape(x, (S, N // I, I, N // J, J)), WIDE)


@triton.jit
def write(pointer, left, x, SIZE: tl.constexpr):
    """A tile, matrices one after another."""
    S: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] * x.shape[2]
    matrix, k = tl.arange(0, S)[:, None], tl.arange(0, N * N)[None, :]
    i, j = k // N, k % N
    inside = matrix < left
    if SIZE < N:
        inside = inside & (i < SIZE) & (j < SIZE)
    if pointer.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    x = tl.reshape(x.to(pointer.dtype.element_ty), (S, N * N))
    tl.store(pointer + matrix * (SIZE * SIZE) + i * SIZE + j, x, mask=inside)


@triton.jit
def power(x):
    """The power of two in x > 0, and one over it."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        return bits.to(tl.float64, bitcast=True), (0x7FE0000000000000 - bits).to(tl.float64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7F800000
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def read_row(
    pointer, left, p,
    SIZE: tl.constexpr, S: tl.constexpr, N: tl.constexpr, I: tl.constexpr, WIDE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Row p of each matrix, in all lanes, which have I whole rows: a vector over columns, or TURNED, over rows."""
    B: tl.constexpr = I if TURNED else N
    W: tl.constexpr = min(B, 4) if SIZE % 4 == 0 else 1
    matrix = matrices(left, S)[:, None, None, None]
    lane = tl.arange(0, N // I)[None, :, None, None]
    k = lane * (I if TURNED else 0) + tl.arange(0, W)[None, None, None, :]
    pieces = ()
    for begin in tl.static_range(0, B, W):
        inside = (k + begin < SIZE) & (p + k * 0 < SIZE) if SIZE < N else None
        at = pointer + (matrix * (SIZE * SIZE) + p * SIZE + begin + k)
        pieces += (tl.load(at, mask=inside, other=0.0 if SIZE < N else None),)
    x = tl.reshape(tl.permute(tl.reshape(join(pieces), (S, N // I, 1, W, B // W)), (0, 1, 2, 4, 3)), (S, N // I, 1, B, 1))
    return cast(tl.permute(x, (0, 1, 3, 2, 4) if TURNED else (0, 1, 4, 2, 3)), WIDE)
