"""The forward pass of selective_scan. It keeps the state before every SEGMENT-th step of a sequence."""

import triton
import triton.language as tl

from bridge.fast import roomy
from bridge.language import collect, groups, rows
from bridge.ops.selective_scan import tiles


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
        at, here = cuts + chunk.to(tl.int64) * tiles.CUT, chunk < last
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
    block, group, channel, ours, index = tiles.own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = tiles.chunk_of(cuts, index, steps, chunks, span, PACKED)
    if closes:
        end = begin
    bias = tiles.load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    decay = tiles.load_decay(A, channel, ours, wide, STATES, BN, R)
    constant = tiles.load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    LANES: tl.constexpr = BN // R
    h, total, wrong = tiles.zeros(BD, wide, BN, R), tl.zeros((LANES, BD), wide), True
    for CAREFUL in tl.static_range(2):
        if wrong:
            AT_ONCE: tl.constexpr = 1 if CAREFUL else TILE
            TOGETHER: tl.constexpr = 1 if R == 1 else (LANES if LANES < AT_ONCE else AT_ONCE)  # steps that lanes share out
            h, total = tiles.zeros(BD, wide, BN, R), tl.zeros((LANES, BD), wide)
            for start in tl.range(0, end - begin, AT_ONCE, num_stages=3):
                row, left = batch * steps + begin + start, end - begin - start
                x_rows = tiles.load_rows(x, row, left, channel, ours, CHANNELS, AT_ONCE)
                deltas = tiles.load_tile(delta, row, left, channel, ours, CHANNELS, AT_ONCE)
                dt, dt_groups = tiles.step_sizes(deltas, bias, left, wide, SOFTPLUS, HAS_BIAS, TOGETHER, LANES)
                Bt = tiles.load_projection(B, constant, row, left, group, wide, GB, STATES, BN, R, AT_ONCE)
                for i in tl.static_range(AT_ONCE):
                    h = tiles.advance(h, decay, dt[i], dt[i] * x_rows[i].to(wide), Bt[i], CAREFUL)
                    total += dt[i]
            wrong = tiles.undefined(h)
    index = index.to(tl.int64)
    tiles.store_states(ends, index, roomy(channel), ours, h, CHANNELS, STATES, BN, R)
    tiles.store_first(elapsed + index * CHANNELS, channel, ours, total)


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def scan(
    x, delta, A, B, C, D, z, delta_bias, initial_state, starts, cuts, poison,
    steps, chunks, span,
    y, final_state, states,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """y (b t d), final_state (b d n, or s d n) and the states to keep (b ceil(t/SEGMENT) n d; none for SEGMENT = 0).

    The second sweep is for chunks that the first left with a NaN, since a decay was beyond all numbers.
    """
    wide: tl.constexpr = final_state.dtype.element_ty
    block, group, channel, ours, index = tiles.own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = tiles.chunk_of(cuts, index, steps, chunks, span, PACKED)
    bias = tiles.load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    skip = tiles.load_vector(D, channel, ours, wide, HAS_D)
    decay = tiles.load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = tiles.load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = tiles.load_matrix(C, channel, ours, wide, GC == 0, STATES, BN, R)
    if opens:
        initial = tiles.load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
    else:
        there = tiles.where_true(channel, ours, begin < end, CHANNELS)
        initial = tiles.load_states(starts, index.to(tl.int64), channel, there, CHANNELS, STATES, BN, R)
    if PACKED:
        initial = tiles.shift(initial, tl.load(poison))
    LANES: tl.constexpr = BN // R
    h, wrong = initial, True
    for CAREFUL in tl.static_range(2):
        if wrong:
            AT_ONCE: tl.constexpr = 1 if CAREFUL else TILE
            TOGETHER: tl.constexpr = 1 if R == 1 else (LANES if LANES < AT_ONCE else AT_ONCE)  # steps that lanes share out
            h = initial
            for start in tl.range(0, end - begin, AT_ONCE, num_stages=3):
                first, left = begin + start, end - begin - start
                row = batch * steps + first
                if SEGMENT:
                    # Where sequences are packed, the first segments of several could have one place: those are initial states anyway.
                    keep = (start % SEGMENT == 0) & ((start > 0) | ((opens == 0) | (not PACKED)))
                    kept = tiles.where_true(channel, ours, keep, CHANNELS)  # a mask and no branch, which the loop's pipeline would pay for
                    tiles.store_states(
                        states, batch * tl.cdiv(steps, SEGMENT) + first // SEGMENT, channel, kept, h, CHANNELS, STATES, BN, R
                    )
                x_tile = tiles.load_tile(x, row, left, channel, ours, CHANNELS, AT_ONCE)
                x_rows = rows(x_tile)
                deltas = tiles.load_tile(delta, row, left, channel, ours, CHANNELS, AT_ONCE)
                dt, dt_groups = tiles.step_sizes(deltas, bias, left, wide, SOFTPLUS, HAS_BIAS, TOGETHER, LANES)
                Bt = tiles.load_projection(B, constant_B, row, left, group, wide, GB, STATES, BN, R, AT_ONCE)
                Ct = tiles.load_projection(C, constant_C, row, left, group, wide, GC, STATES, BN, R, AT_ONCE)
                if HAS_Z:
                    gates, slopes = tiles.load_gate(z, row, left, channel, ours, wide, CHANNELS, AT_ONCE, TOGETHER)
                if HAS_D:
                    through = groups(x_tile, TOGETHER)
                sums, outs = (), ()
                for i in tl.static_range(AT_ONCE):
                    h = tiles.advance(h, decay, dt[i], dt[i] * x_rows[i].to(wide), Bt[i], CAREFUL)
                    sums = collect(sums, tiles.dot(h, Ct[i]), i, TOGETHER)
                    if (i + 1) % TOGETHER == 0:
                        out = tiles.sum_lanes(sums, TOGETHER)
                        if HAS_D:
                            out += skip[None, :] * through[i // TOGETHER].to(wide)
                        if HAS_Z:
                            out *= gates[i // TOGETHER]
                        sums, outs = (), outs + (out,)
                        if len(outs) == 4 or i == AT_ONCE - 1:
                            tiles.store_sums(y + row * CHANNELS, channel, ours, i + 1 - len(outs) * TOGETHER, left, outs, CHANNELS, LANES)
                            outs = ()
            wrong = tiles.undefined(h)
    if closes:
        tiles.store_state(final_state, sequence, roomy(channel), ours, h, CHANNELS, STATES, BN, R)
