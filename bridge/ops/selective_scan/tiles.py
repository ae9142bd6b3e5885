"""What the kernels of selective_scan share: which part of a call a program owns, and how its tiles are read.

A program owns BD channels of one group with all their states, for one chunk of time of one sequence. It reads TILE steps at a
time and takes them one after another. Its states are a tuple of R tensors [BN/R, BD]: a lane of the GPU holds R neighbouring
states of a channel, so that most of a sum over the states stays within a lane, and tensor r has state r of each lane.

Where there are fewer programs than a GPU wants, a sequence is cut into chunks: the end of a chunk is a linear function of its
start, so a first pass finds what each chunk adds, a second strings them together, and the scan proper runs all chunks at
once.

Sizes: `steps` t, CHANNELS d, STATES n, GROUPS g; GB and GC are the groups of B and of C (0 for one that is constant in
time). Time beyond the end of a chunk has step size 0: decay 1, input 0, so that states and carries pass through
unchanged, and only stores need to know.

A batch holds one sequence, or, where sequences are packed, the only batch holds them all. Then chunks are not equally
long, and `cuts` lists them (`cut_sequences` in forward.py).
"""

import triton
import triton.language as tl

from bridge.fast import exp2
from bridge.language import LOG2E, columns, groups, product, rows, sigmoid, softplus, spread, stack, sum_each

CUT = tl.constexpr(5)  # numbers in a row of `cuts`


@triton.jit
def own(CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr):
    """A program's block of channels, its group, the channels, which of them there are; and what else the program has to
    take: a chunk or a sequence. Neighbours share time, and so the rows of B and C."""
    size: tl.constexpr = CHANNELS // GROUPS
    blocks: tl.constexpr = (size + BD - 1) // BD
    program = tl.program_id(0)
    block = program % (GROUPS * blocks)
    within = block % blocks * BD + tl.arange(0, BD)
    return block, block // blocks, block // blocks * size + within, within < size, program // (GROUPS * blocks)


@triton.jit
def chunk_of(cuts, index, steps, chunks, span, PACKED: tl.constexpr):
    """A chunk's sequence and batch, its first step and the one behind its last, and whether the sequence begins with it
    and ends with it."""
    if PACKED:
        at = cuts + index.to(tl.int64) * CUT
        sequence, begin, end = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
        return sequence, sequence * 0, begin, end, begin == tl.load(at + 3), end == tl.load(at + 4)
    else:
        sequence, begin = (index // chunks).to(tl.int64), index % chunks * span
        return sequence, sequence, begin, tl.minimum(begin + span, steps), begin == 0, index % chunks == chunks - 1


@triton.jit
def chunks_of(offsets, sequence, chunks, PACKED: tl.constexpr):
    """The first chunk of a sequence, and the one behind its last."""
    if PACKED:
        return tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    else:
        return sequence * chunks, (sequence + 1) * chunks


@triton.jit
def where_true(channel, ours, condition, CHANNELS: tl.constexpr):
    """`ours` where a scalar condition holds. (The interpreter has no masks of a tile and a scalar, and a GPU has one comparison.)"""
    return tl.where(ours, channel, CHANNELS) < tl.where(condition, CHANNELS, 0)


@triton.jit
def store_first(pointer, channel, ours, value):
    """The first row of a tile [J, BD] into an array d."""
    first = tl.arange(0, value.shape[0])[:, None] == 0
    tl.store(pointer + apart(channel)[None, :] + tl.zeros_like(value).to(tl.int32), value, mask=first & ours[None, :])


@triton.jit
def apart(index):
    """The same channels or states, of which the compiler doesn't see that they are neighbours. Else it would read or write several
    of them a lane, and for that exchange states between lanes."""
    return index ^ (tl.program_id(0) >> 31)


@triton.jit
def growth(exponent, CAREFUL: tl.constexpr):
    """2^exponent; CAREFUL: at most about the largest number there is: of a state that is zero it makes zero, where infinity made NaN."""
    if CAREFUL:
        largest: tl.constexpr = 1023.9999999999999 if exponent.dtype == tl.float64 else 127.99999
        return exp2(tl.minimum(exponent, largest, propagate_nan=tl.PropagateNan.ALL))
    else:
        return exp2(exponent)


@triton.jit
def undefined(h):
    """Whether there is a NaN in a tuple of tensors."""
    found = h[0] != h[0]
    for r in tl.static_range(1, len(h)):
        found = found | (h[r] != h[r])
    return tl.max(tl.max(found.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def load_tile(pointer, row, left, channel, ours, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """[TILE, BD] from a (b t) d array, from `row` on; zeros from step `left` on."""
    step = tl.arange(0, TILE)[:, None]
    return tl.load(pointer + row * CHANNELS + (step * CHANNELS + channel[None, :]), mask=(step < left) & ours[None, :], other=0.0)


@triton.jit
def load_rows(pointer, row, left, channel, ours, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """The same as TILE tiles [1, BD]."""
    return rows(load_tile(pointer, row, left, channel, ours, CHANNELS, TILE))


@triton.jit
def step_sizes(
    tile, bias, left, wide: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, TOGETHER: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """dt from a tile of delta [TILE, BD], 0 from step `left` on. First each step by itself, [1, BD] or, the same row in several
    lanes, [TOGETHER, BD]; then again in tiles [TOGETHER, BD] of TOGETHER steps each."""
    if TOGETHER == 1:
        dts = rows(step_sizes_of((tile,), bias, left, wide, SOFTPLUS, HAS_BIAS)[0])
        return dts, dts
    else:
        dts = step_sizes_of(groups(tile, TOGETHER), bias, left, wide, SOFTPLUS, HAS_BIAS)
        if SOFTPLUS:
            return spread(dts, LANES), dts
        else:
            return step_sizes_of(rows(tile), bias, left, wide, False, HAS_BIAS), dts


@triton.jit
def step_sizes_of(pieces, bias, left, wide: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The same from tiles [J, BD], of J steps in turn."""
    J: tl.constexpr = pieces[0].shape[0]
    made = ()
    for k in tl.static_range(len(pieces)):
        dt = pieces[k].to(wide)
        if HAS_BIAS:
            dt += bias[None, :]
        if SOFTPLUS:
            dt = softplus(dt)
        if HAS_BIAS or SOFTPLUS:
            dt = tl.where(tl.arange(0, J)[:, None] + k * J < left, dt, 0.0)
        made = made + (dt,)
    return made


@triton.jit
def load_gate(z, row, left, channel, ours, wide: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr):
    """silu(z) of TILE steps, TOGETHER each in tiles [TOGETHER, BD], and its derivative."""
    tile, gates, slopes = load_tile(z, row, left, channel, ours, CHANNELS, TILE), (), ()
    pieces = groups(tile, TOGETHER) if TOGETHER > 1 else (tile,)
    for k in tl.static_range(len(pieces)):
        zs = pieces[k].to(wide)
        sig = sigmoid(zs)
        gates, slopes = gates + (zs * sig,), slopes + (sig * (1.0 + zs * (1.0 - sig)),)
    if TOGETHER == 1:
        gates, slopes = rows(gates[0]), rows(slopes[0])
    return gates, slopes


@triton.jit
def gated(pieces, gates):
    """Tiles times the gate's, one by one."""
    made = ()
    for k in tl.static_range(len(pieces)):
        made = made + (pieces[k].to(gates[k].dtype) * gates[k],)
    return made


@triton.jit
def load_vector(pointer, channel, ours, wide: tl.constexpr, PRESENT: tl.constexpr):
    """[BD] from an array d, zeros where it isn't there."""
    if PRESENT:
        return tl.load(pointer + channel, mask=ours, other=0.0).to(wide)
    else:
        return tl.zeros(channel.shape, wide)


@triton.jit
def first_states(BN: tl.constexpr, R: tl.constexpr):
    """[BN/R, 1], the first state of each lane."""
    return (tl.arange(0, BN // R) * R)[:, None]


@triton.jit
def of_lanes(tile):
    """A tile [BN/R, BD, R] as R tensors [BN/R, BD]."""
    J: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    made = ()
    pieces = columns(tl.reshape(tile, (J * W, tile.shape[2])))
    for r in tl.static_range(tile.shape[2]):
        made = made + (tl.reshape(pieces[r], (J, W)),)
    return made


@triton.jit
def in_lanes(BN: tl.constexpr, R: tl.constexpr):
    """The state that stands at each place of a tile [BN/R, 1, R]."""
    return first_states(BN, R)[:, :, None] + tl.arange(0, R)[None, None, :]


@triton.jit
def load_matrix(pointer, channel, ours, wide: tl.constexpr, PRESENT: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    """R tensors [BN/R, BD] from an array d n; nothing to speak of where it isn't wanted."""
    if PRESENT:
        state = in_lanes(BN, R)
        at = channel[None, :, None].to(tl.int64) * STATES + apart(state)
        return of_lanes(tl.load(pointer + at, mask=(state < STATES) & ours[None, :, None], other=0.0).to(wide))
    else:
        return ()


@triton.jit
def load_decay(A, channel, ours, wide: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    """A log2(e): exp(dt A) is then one exp2."""
    loaded = load_matrix(A, channel, ours, wide, True, STATES, BN, R)
    made = ()
    for r in tl.static_range(R):
        made = made + (loaded[r] * LOG2E,)
    return made


@triton.jit
def load_projection(
    pointer, constant, row, left, group, wide: tl.constexpr, G: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """TILE steps of B or C from `row` on, of which `left` lie within the chunk; each step is R tensors, to be multiplied with
    [BN/R, BD].

    pointer: (b t) g n. Where it is constant in time (G = 0), it was read before, by load_matrix.
    """
    made = ()
    if G == 0:
        for _ in tl.static_range(TILE):
            made = made + (constant,)
    else:
        step, state = tl.arange(0, TILE)[:, None], tl.arange(0, BN)[None, :]
        at = (row * G + (group if G > 1 else 0)) * STATES + step * (G * STATES) + state
        tile = tl.load(pointer + at, mask=(step < left) & (state < STATES), other=0.0)
        pieces = rows(tile)
        for i in tl.static_range(TILE):
            of_step = ()
            of_lane = columns(tl.reshape(pieces[i], (BN // R, R)))
            for r in tl.static_range(R):
                of_step = of_step + (of_lane[r][:, None].to(wide),)
            made = made + (of_step,)
    return made


@triton.jit
def at_tile(block, batch, batches, step, steps, TILE: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr):
    """Where the workspace of the backward pass has what belongs to a block of channels and the tile of a step: an array
    blocks b ceil(t/TILE) of places that hold the state before the tile, or dB and dC of its steps."""
    place: tl.constexpr = STATES * (BD if BD > 2 * TILE else 2 * TILE)
    return ((block * tl.cast(batches, tl.int64) + batch) * tl.cdiv(steps, TILE) + step // TILE) * place


@triton.jit
def load_states(pointer, index, channel, there, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    """R tensors [BN/R, BD]: entry `index` of an array (...) n d, for channels that are `there`."""
    state = in_lanes(BN, R)
    at = pointer + (index * (STATES * CHANNELS) + first_states(BN, R) * CHANNELS + apart(channel)[None, :])[:, :, None]
    inside = (state < STATES) & there[None, :, None]
    return of_lanes(tl.load(at + tl.arange(0, R)[None, None, :] * CHANNELS, mask=inside, other=0.0))


@triton.jit
def store_states(pointer, index, channel, there, h, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    """The same written."""
    state = in_lanes(BN, R)
    at = pointer + (index * (STATES * CHANNELS) + first_states(BN, R) * CHANNELS + apart(channel)[None, :])[:, :, None]
    tl.store(at + tl.arange(0, R)[None, None, :] * CHANNELS, stack(h), mask=(state < STATES) & there[None, :, None])


@triton.jit
def zeros(BD: tl.constexpr, wide: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    made = ()
    for _ in tl.static_range(R):
        made = made + (tl.zeros((BN // R, BD), wide),)
    return made


@triton.jit
def load_state(
    pointer, sequence, channel, ours, wide: tl.constexpr, PRESENT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R tensors [BN/R, BD] from an array (...) d n, zeros where it isn't there."""
    if PRESENT:
        return load_matrix(pointer + sequence * (CHANNELS * STATES), channel, ours, wide, True, STATES, BN, R)
    else:
        return zeros(channel.shape[0], wide, BN, R)


@triton.jit
def store_state(
    pointer, sequence, channel, ours, h, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """h into an array (...) d n."""
    state = in_lanes(BN, R)
    at = (sequence * CHANNELS + channel[None, :, None]) * STATES + state
    tl.store(pointer + at, stack(h).to(pointer.dtype.element_ty), mask=(state < STATES) & ours[None, :, None])


@triton.jit
def advance(h, decay, dt, u, Bt, CAREFUL: tl.constexpr):
    """exp(dt A) h + u B. dt, u: [1, BD]."""
    made = ()
    for r in tl.static_range(len(h)):
        made = made + (growth(dt * decay[r], CAREFUL) * h[r] + u * Bt[r],)
    return made


@triton.jit
def shift(h, by):
    made = ()
    for r in tl.static_range(len(h)):
        made = made + (h[r] + by,)
    return made


@triton.jit
def term(x, y, APART: tl.constexpr):
    """x y, to be summed over lanes: see `product`, which isn't needed where a lane adds up several first."""
    if APART:
        return product(x, y)
    else:
        return x * y


@triton.jit
def dot(h, w):
    """The sum over the states of each lane, [BN/R, BD]; to be summed over the lanes with the same bits in each."""
    terms = product(h[0], w[0])
    for r in tl.static_range(1, len(h)):
        terms += h[r] * w[r]
    return terms


@triton.jit
def sum_channels(values):
    """[J, m], column k of which is the sum over the channels of values[k] [J, BD]. Where a warp has them all, each of its lanes
    gets what it stores; several warps, and the interpreter, have a single state in a lane (R = 1) and plain sums."""
    m: tl.constexpr = len(values)
    if m <= 2:
        sums = ()
        for k in tl.static_range(m):
            sums = sums + (tl.sum(values[k], axis=1, keep_dims=True),)
        return tl.reshape(stack(sums), (values[0].shape[0], m))
    else:
        return sum_each(stack(values))


@triton.jit
def sum_lanes(sums, TOGETHER: tl.constexpr):
    """The [TOGETHER, BD] that is the end of `collect`: row j is the sum over the states for step j."""
    J: tl.constexpr = sums[0].shape[0]
    if J == TOGETHER:
        return sums[0]
    else:
        return tl.sum(tl.reshape(sums[0], (J // TOGETHER, TOGETHER, sums[0].shape[1])), axis=0)


@triton.jit
def store_sums(pointer, channel, ours, step, left, sums, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """What sum_lanes made for steps in turn, the first of which is `step`, into a (b t) d array; up to step `left`.

    pointer: to step 0. Of a single step all of LANES lanes have the sum, and the first writes it. One store of several steps, since
    the compiler takes long over each, and no more of them than a lane has registers for.
    """
    TOGETHER: tl.constexpr = sums[0].shape[0]
    J: tl.constexpr = LANES if TOGETHER == 1 else TOGETHER
    lane, values = tl.arange(0, J)[:, None], ()
    for k in tl.static_range(len(sums)):
        values = values + (tl.broadcast_to(sums[k], (J, sums[0].shape[1])),)
    row = lane * (1 if TOGETHER > 1 else 0)
    later = tl.arange(0, len(sums))[None, None, :] * TOGETHER
    each = apart(channel)[None, :] + tl.zeros((J, 1), tl.int32)
    writes = ours[None, :] & ((lane == 0) | (TOGETHER > 1))
    inside = tl.where(writes, each, CHANNELS)[:, :, None] < tl.where(step + row[:, :, None] + later < left, CHANNELS, 0)
    at = (pointer + (step + row) * CHANNELS + each)[:, :, None] + later * CHANNELS
    tl.store(at, stack(values).to(pointer.dtype.element_ty), mask=inside)
