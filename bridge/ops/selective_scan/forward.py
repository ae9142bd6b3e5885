"""The forward pass of selective_scan. It keeps the state before every SEGMENT-th step of a sequence."""

import triton
import triton.language as tl

from bridge.language import rows, sigmoid
from bridge.ops.selective_scan.tiles import (
    CUT, advance, chunk_of, chunks_of, dot, load_channels, load_decay, load_matrix, load_projection, load_state, load_states, load_vector,
    own, shift, step_sizes, store_state, store_states, where_true, zeros,
)  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "steps", "chunks", "span"])
def cut_sequences(
    cu_seqlens,
    sequences, steps, chunks, span,
    cuts, offsets, poison,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cuts packed sequences into chunks of `span` steps, each sequence into one at least. A program for each sequence, and
    one for the chunks that are left over, which hold no steps.

    cuts, a row for each of `chunks`: sequence, first step, the one behind the last; then the same two of the sequence.
    offsets: s+1, the first chunk of each sequence. poison: 0, or NaN where cu_seqlens doesn't rise from 0 to t. Then all
    steps count as those of the first sequence, and every result that depends on where sequences begin has poison added.
    """
    sequence = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    valid = (tl.load(cu_seqlens) == 0) & (tl.load(cu_seqlens + sequences) == steps)
    for start in range(0, sequences, BLOCK):
        i = start + lane
        low = tl.load(cu_seqlens + i, mask=i < sequences, other=0)
        high = tl.load(cu_seqlens + i + 1, mask=i < sequences, other=0)
        valid = valid & (tl.min((low <= high).to(tl.int32), axis=0) > 0)
    first, begin, end = 0, steps, steps  # of this sequence: its first chunk, its first step and the one behind its last
    for start in range(0, sequences, BLOCK):
        i = start + lane
        low = tl.where(valid, tl.load(cu_seqlens + i, mask=i < sequences, other=0).to(tl.int32), tl.where(i == 0, 0, steps))
        high = tl.where(valid, tl.load(cu_seqlens + i + 1, mask=i < sequences, other=0).to(tl.int32), steps)
        count = tl.maximum(tl.cdiv(high - low, span), 1)
        first += tl.sum(tl.where((i < sequence) & (i < sequences), count, 0), axis=0)
        begin = tl.minimum(begin, tl.min(tl.where(i == sequence, low, steps), axis=0))
        end = tl.minimum(end, tl.min(tl.where(i == sequence, high, steps), axis=0))
    tl.store(offsets + sequence, first)
    if sequence < sequences:
        last = first + tl.maximum(tl.cdiv(end - begin, span), 1)
        origin, finish = begin, end
    else:
        last, origin, finish = chunks, steps * 0 - 1, steps * 0 - 1
        tl.store(poison, tl.where(valid, 0.0, float("nan")))
    for start in range(first, last, BLOCK):
        chunk = start + lane
        at, here = cuts + chunk.to(tl.int64) * CUT, chunk < last
        low = tl.minimum(begin + (chunk - first) * span, end)
        tl.store(at, lane * 0 + sequence, mask=here)
        tl.store(at + 1, low, mask=here)
        tl.store(at + 2, tl.minimum(low + span, end), mask=here)
        tl.store(at + 3, lane * 0 + origin, mask=here)
        tl.store(at + 4, lane * 0 + finish, mask=here)


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def chunk_ends(
    x, delta, A, B, delta_bias, cuts,
    steps, chunks, span,
    ends, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For each chunk that another follows: the state at its end from a zero start (chunks n d), and its sum of dt (chunks d)."""
    wide: tl.constexpr = ends.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    if closes:
        end = begin
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    constant = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    h = zeros(BD, wide, BN, R)
    total = tl.zeros((BD,), wide)
    for start in tl.range(0, end - begin, TILE, num_stages=3):
        first = begin + start
        row = batch * steps + first
        inside = (first + tl.arange(0, TILE) < end)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slope = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias[None, :], inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_projection(B, constant, row, end - first, group, wide, GB, STATES, BN, R, TILE)
        for i in tl.static_range(TILE):
            h = advance(h, decay, dt[i], u[i], Bt[i])
            total += dt[i]
    index = index.to(tl.int64)
    store_states(ends, index, channel, ours, h, CHANNELS, STATES, BN, R)
    tl.store(elapsed + index * CHANNELS + channel, total, mask=ours)


@triton.jit(do_not_specialize=["chunks"])
def chunk_starts(
    A, initial_state, ends, elapsed, offsets,
    chunks,
    starts,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The state at the start of each chunk (chunks n d) but the first of its sequence."""
    wide: tl.constexpr = starts.dtype.element_ty
    block, group, channel, ours, sequence = own(CHANNELS, GROUPS, BD)
    first, last = chunks_of(offsets, sequence, chunks, PACKED)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    h = load_state(initial_state, sequence.to(tl.int64), channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
    for chunk in range(first, last - 1):
        index = tl.cast(chunk, tl.int64)
        dt = tl.load(elapsed + index * CHANNELS + channel, mask=ours, other=0.0)
        h = advance(h, decay, dt, tl.full((BD,), 1.0, wide), load_states(ends, index, channel, ours, CHANNELS, STATES, BN, R))
        store_states(starts, index + 1, channel, ours, h, CHANNELS, STATES, BN, R)


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def scan(
    x, delta, A, B, C, D, z, delta_bias, initial_state, starts, cuts, poison,
    steps, chunks, span,
    y, final_state, states,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """y (b t d), final_state (b d n, or s d n) and the states to keep (b ceil(t/SEGMENT) n d; none for SEGMENT = 0)."""
    wide: tl.constexpr = final_state.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    skip = load_vector(D, channel, ours, wide, HAS_D)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = load_matrix(C, channel, ours, wide, GC == 0, STATES, BN, R)
    if opens:
        h = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
    else:
        there = where_true(channel, ours, begin < end, CHANNELS)
        h = load_states(starts, index.to(tl.int64), channel, there, CHANNELS, STATES, BN, R)
    if PACKED:
        h = shift(h, tl.load(poison))
    for start in tl.range(0, end - begin, TILE, num_stages=3):
        first = begin + start
        row = batch * steps + first
        if SEGMENT:
            # Where sequences are packed, the first segments of several could have one place: those are initial states anyway.
            keep = (start % SEGMENT == 0) & ((start > 0) | ((opens == 0) | (not PACKED)))
            kept = where_true(channel, ours, keep, CHANNELS)  # a mask and no branch, which the loop's pipeline would pay for
            store_states(states, batch * tl.cdiv(steps, SEGMENT) + first // SEGMENT, channel, kept, h, CHANNELS, STATES, BN, R)
        inside = (first + tl.arange(0, TILE) < end)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slope = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias[None, :], inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_projection(B, constant_B, row, end - first, group, wide, GB, STATES, BN, R, TILE)
        Ct = load_projection(C, constant_C, row, end - first, group, wide, GC, STATES, BN, R, TILE)
        if HAS_D:
            through = rows(skip[None, :] * xs, TILE, BD)
        if HAS_Z:
            zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
            gate = rows(zs * sigmoid(zs), TILE, BD)
        for i in tl.static_range(TILE):
            h = advance(h, decay, dt[i], u[i], Bt[i])
            out = dot(h, Ct[i])
            if HAS_D:
                out += through[i]
            if HAS_Z:
                out *= gate[i]
            here = where_true(channel, ours, first + i < end, CHANNELS)
            tl.store(y + (row + i) * CHANNELS + channel, out.to(y.dtype.element_ty), mask=here)
    if closes:
        store_state(final_state, sequence, channel, ours, h, CHANNELS, STATES, BN, R)
