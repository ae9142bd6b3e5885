"""The backward pass of selective_scan.

It runs forward once more, from the states that the forward pass kept, to get the state before every TILE-th step of a
sequence (`recompute`), then goes backwards (`reverse`) with the states of a tile in registers. What is summed over
programs leaves as partial sums, which sum_leading adds in a fixed order.
"""

import triton
import triton.language as tl

from bridge.language import LN2, product, rows, sigmoid, sum_each
from bridge.ops.selective_scan.tiles import (
    advance, at_tile, chunk_of, chunks_of, dot, first_states, grow, load_channels, load_decay, load_matrix, load_projection, load_state,
    load_states, load_vector, own, shift, step_sizes, store_state, store_states, where_true, zeros,
)  # fmt: skip


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def recompute(
    x, delta, A, B, C, z, delta_bias, initial_state, states, cuts, poison, dy,
    steps, chunks, span, batches,
    fine, heads, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """The state before every TILE-th step of a sequence but the first, into the workspace.

    CARRY: also what each chunk adds to the carry of the backward sweep, which goes from its end to its start
    (chunks n d): the sum over its steps of (product of the decays up to there) dp_t C_t; and its sum of dt (chunks d).
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    state = first_states(BN, R)
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = load_matrix(C, channel, ours, wide, CARRY and GC == 0, STATES, BN, R)
    if opens:
        h = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
    else:
        kept = batch * tl.cdiv(steps, SEGMENT) + begin // SEGMENT
        h = load_states(states, kept, channel, where_true(channel, ours, begin < end, CHANNELS), CHANNELS, STATES, BN, R)
    if PACKED:
        h = shift(h, tl.load(poison))
    head = zeros(BD, wide, BN, R)
    product = shift(head, 1.0)
    total = tl.zeros((BD,), wide)
    for start in tl.range(0, end - begin, TILE, num_stages=3):
        first = begin + start
        row = batch * steps + first
        here = where_true(channel, ours, (start > 0) | ((opens == 0) | (not PACKED)), CHANNELS)[None, :]
        at = at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
        for r in tl.static_range(R):
            tl.store(fine + at + (state + r) * BD + tl.arange(0, BD)[None, :], h[r], mask=(state + r < STATES) & here)
        inside = (first + tl.arange(0, TILE) < end)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slope = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias[None, :], inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_projection(B, constant_B, row, end - first, group, wide, GB, STATES, BN, R, TILE)
        if CARRY:
            dps = load_channels(dy, row, channel, inside, wide, CHANNELS, TILE)
            if HAS_Z:
                zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
                dps *= zs * sigmoid(zs)
            dp = rows(dps, TILE, BD)
            Ct = load_projection(C, constant_C, row, end - first, group, wide, GC, STATES, BN, R, TILE)
        for i in tl.static_range(TILE):
            now, products, sums = (), (), ()
            for r in tl.static_range(R):
                a = grow(dt[i][None, :] * decay[r])
                now = now + (a * h[r] + u[i][None, :] * Bt[i][r],)
                if CARRY:
                    products = products + (a * product[r],)
                    sums = sums + (head[r] + products[r] * (dp[i][None, :] * Ct[i][r]),)
            h = now
            if CARRY:
                total += dt[i]
                product, head = products, sums
    if CARRY:
        index = index.to(tl.int64)
        store_states(heads, index, channel, ours, head, CHANNELS, STATES, BN, R)
        tl.store(elapsed + index * CHANNELS + channel, total, mask=ours)


@triton.jit(do_not_specialize=["chunks"])
def chunk_carries(
    A, heads, elapsed, dfinal_state, offsets,
    chunks,
    carries,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The carry that enters each chunk from its right (chunks n d), but for the last of its sequence."""
    wide: tl.constexpr = carries.dtype.element_ty
    block, group, channel, ours, sequence = own(CHANNELS, GROUPS, BD)
    first, last = chunks_of(offsets, sequence, chunks, PACKED)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    carry = load_state(dfinal_state, sequence.to(tl.int64), channel, ours, wide, True, CHANNELS, STATES, BN, R)
    for k in range(last - 1 - first):
        index = tl.cast(last - 1 - k, tl.int64)
        dt = tl.load(elapsed + index * CHANNELS + channel, mask=ours, other=0.0)
        carry = advance(carry, decay, dt, tl.full((BD,), 1.0, wide), load_states(heads, index, channel, ours, CHANNELS, STATES, BN, R))
        store_states(carries, index - 1, channel, ours, carry, CHANNELS, STATES, BN, R)


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def reverse(
    x, delta, A, B, C, D, z, delta_bias, initial_state, fine, carries, cuts, poison, dy, dfinal_state,
    steps, chunks, span, batches,
    dx, ddelta, dz, dinitial_state, dA, dB, dC, dD, dbias, parts,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, HAS_FINE: tl.constexpr, SHARED: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DELTA: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_C: tl.constexpr,
    NEED_D: tl.constexpr, NEED_Z: tl.constexpr, NEED_BIAS: tl.constexpr, NEED_INITIAL: tl.constexpr,
):  # fmt: skip
    """The backward sweep, of one tile from the initial state where there is no `fine`.

    dx, ddelta, dz: b t d. dinitial_state: b d n, or s d n. Partial sums: dA, and dB and dC where they are constant in
    time, chunks d n, dD and dbias chunks d over the steps of a chunk. Else dB and dC over the channels of a block are left
    in `parts`.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    state, lane = first_states(BN, R), tl.arange(0, BD)[None, :]
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    skip = load_vector(D, channel, ours, wide, HAS_D)
    decay = load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = load_matrix(C, channel, ours, wide, GC == 0, STATES, BN, R)
    chunk = index.to(tl.int64)
    if closes:
        carry = load_state(dfinal_state, sequence, channel, ours, wide, True, CHANNELS, STATES, BN, R)
    else:
        carry = load_states(carries, chunk, channel, where_true(channel, ours, begin < end, CHANNELS), CHANNELS, STATES, BN, R)
    if PACKED:
        carry = shift(carry, tl.load(poison))
    sum_A, sum_B, sum_C = zeros(BD, wide, BN, R), zeros(BD, wide, BN, R), zeros(BD, wide, BN, R)
    sum_D, sum_bias = tl.zeros((BD,), wide), tl.zeros((BD,), wide)
    tiles = tl.cdiv(end - begin, TILE)
    for k in tl.range(0, tiles, num_stages=3):
        first = begin + (tiles - 1 - k) * TILE
        row = batch * steps + first
        inside = (first + tl.arange(0, TILE) < end)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slopes = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias[None, :], inside, SOFTPLUS)
        dps = load_channels(dy, row, channel, inside, wide, CHANNELS, TILE)
        if HAS_Z:
            zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
            sig = sigmoid(zs)
            if NEED_Z:
                gate_slope = rows(dps * sig * (1.0 + zs * (1.0 - sig)), TILE, BD)
            dps *= zs * sig
        xt, dt, slope, dp = rows(xs, TILE, BD), rows(dts, TILE, BD), rows(slopes, TILE, BD), rows(dps, TILE, BD)
        Bt = load_projection(B, constant_B, row, end - first, group, wide, GB, STATES, BN, R, TILE)
        Ct = load_projection(C, constant_C, row, end - first, group, wide, GC, STATES, BN, R, TILE)
        place = at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
        known = ours
        if PACKED:
            known = where_true(channel, ours, (k < tiles - 1) | (opens == 0), CHANNELS)
        if HAS_FINE:
            start = ()
            for r in tl.static_range(R):
                start = start + (tl.load(fine + place + (state + r) * BD + lane, mask=(state + r < STATES) & known[None, :], other=0.0),)
            if PACKED:
                if (k == tiles - 1) & opens:
                    start = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
                start = shift(start, tl.load(poison))
        else:
            start = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
        if SHARED:
            tl.debug_barrier()  # `parts` can be `fine`: no warp writes there before all have read
        h = (start,)
        for i in tl.static_range(TILE):
            h = h + (advance(h[i], decay, dt[i], dt[i] * xt[i], Bt[i]),)
        for i in tl.static_range(TILE - 1, -1, -1):
            at = (row + i) * CHANNELS + channel
            here = where_true(channel, ours, first + i < end, CHANNELS)
            steady = dt[i][None, :]
            carried, sums_A, sums_B, sums_C, each = (), (), (), (), ()
            of_u = tl.zeros((BN // R, BD), wide)
            of_decay = tl.zeros((BN // R, BD), wide)
            for r in tl.static_range(R):
                a = grow(steady * decay[r])
                g = dp[i][None, :] * Ct[i][r] + carry[r]
                carried = carried + (a * g,)
                from_decay = g * (a * h[i][r])  # and not carried h: that were NaN where the decay is beyond all numbers and h zero
                of_u += g * Bt[i][r]
                of_decay += decay[r] * from_decay
                sums_A = sums_A + (sum_A[r] + steady * from_decay,)
                if NEED_B:
                    of_B = product(g, (dt[i] * xt[i])[None, :])
                    if GB == 0:
                        sums_B = sums_B + (sum_B[r] + of_B,)
                    else:
                        each = each + (of_B,)
            for r in tl.static_range(R):
                if NEED_C:
                    of_C = product(dp[i][None, :], h[i + 1][r])
                    if GC == 0:
                        sums_C = sums_C + (sum_C[r] + of_C,)
                    else:
                        each = each + (of_C,)
            if len(each) > 0:
                column = tl.arange(0, len(each))[None, :] + (0 if NEED_B and GB > 0 else R)  # below R of B, from there on of C
                of = state + column % R
                here_in = place + i * STATES
                if PACKED:  # where a tile can begin anywhere
                    here_in = at_tile(block, batch, batches, first + i, steps, TILE, STATES, BD) + (first + i) % TILE * STATES
                at_part = parts + here_in + of + column // R * (TILE * STATES)
                tl.store(at_part, sum_each(each), mask=of < tl.where(first + i < end, STATES, 0))
            carry, sum_A = carried, sums_A
            if NEED_B and GB == 0:
                sum_B = sums_B
            if NEED_C and GC == 0:
                sum_C = sums_C
            du = tl.sum(of_u, axis=0)
            if NEED_X:
                grad = dt[i] * du
                if HAS_D:
                    grad += skip * dp[i]
                tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=here)
            if NEED_DELTA or NEED_BIAS:
                grad = (xt[i] * du + tl.sum(of_decay, axis=0) * LN2) * slope[i]
                if NEED_DELTA:
                    tl.store(ddelta + at, grad.to(ddelta.dtype.element_ty), mask=here)
                if NEED_BIAS:
                    sum_bias += grad
            if NEED_D:
                sum_D += dp[i] * xt[i]
            if NEED_Z:
                ungated = dot(h[i + 1], Ct[i])
                if HAS_D:
                    ungated += skip * xt[i]
                tl.store(dz + at, (gate_slope[i] * ungated).to(dz.dtype.element_ty), mask=here)
    if NEED_A:
        store_state(dA, chunk, channel, ours, sum_A, CHANNELS, STATES, BN, R)
    if NEED_B and GB == 0:
        store_state(dB, chunk, channel, ours, sum_B, CHANNELS, STATES, BN, R)
    if NEED_C and GC == 0:
        store_state(dC, chunk, channel, ours, sum_C, CHANNELS, STATES, BN, R)
    if NEED_D:
        tl.store(dD + chunk * CHANNELS + channel, sum_D, mask=ours)
    if NEED_BIAS:
        tl.store(dbias + chunk * CHANNELS + channel, sum_bias, mask=ours)
    if NEED_INITIAL:
        if opens:
            store_state(dinitial_state, sequence, channel, ours, carry, CHANNELS, STATES, BN, R)


@triton.jit(do_not_specialize=["steps", "batches"])
def sum_blocks(
    parts,
    steps, batches,
    total,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr,
    SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dB, or with SECOND dC (b t g n): for each step and group the sum of what its blocks of channels add, in their order."""
    blocks: tl.constexpr = (CHANNELS // GROUPS + BD - 1) // BD
    count: tl.constexpr = blocks if G == GROUPS else GROUPS * blocks
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    state, group, row = i % STATES, i // STATES % G, i // (STATES * G)
    batch, step = row // steps, row % steps
    here = batch < batches
    at = step % TILE * STATES + state + (TILE * STATES if SECOND else 0)
    acc = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for k in range(count):
        block = group * count + k
        acc += tl.load(parts + at_tile(block, batch, batches, step, steps, TILE, STATES, BD) + at, mask=here, other=0.0)
    tl.store(total + i, acc.to(total.dtype.element_ty), mask=here)
