"""The backward pass of selective_scan.

It runs forward once more, from the states that the forward pass kept, to get the state before every TILE-th step of a
sequence (`recompute`), then goes backwards (`reverse`) with the states of a tile in registers. What is summed over
programs leaves as partial sums, which sum_leading adds in a fixed order.
"""

import triton
import triton.language as tl

from bridge.language import LN2, rows, sigmoid, sum_products
from bridge.ops.selective_scan.tiles import (
    at_states,
    at_tile,
    chunk_of,
    chunks_of,
    grow,
    load_channels,
    load_decay,
    load_matrix,
    load_projection,
    load_state,
    load_vector,
    own,
    step_sizes,
    store_state,
    where_true,
)  # fmt: skip


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def recompute(
    x, delta, A, B, C, z, delta_bias, initial_state, states, cuts, poison, dy,
    steps, chunks, span, batches,
    fine, heads, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """The state before every TILE-th step of a sequence but the first, into the workspace.

    CARRY: also what each chunk adds to the carry of the backward sweep, which goes from its end to its start
    (chunks n d): the sum over its steps of (product of the decays up to there) dp_t C_t; and its sum of dt (chunks d).
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    square = (tl.arange(0, BN)[:, None] < STATES) & ours[None, :]
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    decay = load_decay(A, channel, ours, wide, STATES, BN)
    constant_B = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN)
    constant_C = load_matrix(C, channel, ours, wide, CARRY and GC == 0, STATES, BN)
    if opens:
        h = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN)
    else:
        kept = batch * tl.cdiv(steps, SEGMENT) + begin // SEGMENT
        there = (tl.arange(0, BN)[:, None] < STATES) & where_true(channel, ours, begin < end, CHANNELS)[None, :]
        h = tl.load(states + at_states(kept, channel, CHANNELS, STATES, BN), mask=there, other=0.0)
    if PACKED:
        h += tl.load(poison)
    product = tl.full((BN, BD), 1.0, wide)
    head = tl.zeros((BN, BD), wide)
    total = tl.zeros((BD,), wide)
    for start in tl.range(0, end - begin, TILE):
        first = begin + start
        row = batch * steps + first
        if (start > 0) | (opens == 0):
            at = at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
            tl.store(fine + at + tl.arange(0, BN)[:, None] * BD + tl.arange(0, BD)[None, :], h, mask=square)
        inside = (first + tl.arange(0, TILE) < end)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slope = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias[None, :], inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_projection(B, constant_B, row, end - first, group, wide, GB, STATES, BN, TILE)
        if CARRY:
            dps = load_channels(dy, row, channel, inside, wide, CHANNELS, TILE)
            if HAS_Z:
                zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
                dps *= zs * sigmoid(zs)
            dp = rows(dps, TILE, BD)
            Ct = load_projection(C, constant_C, row, end - first, group, wide, GC, STATES, BN, TILE)
        for i in tl.static_range(TILE):
            a = grow(dt[i][None, :] * decay)
            h = a * h + u[i][None, :] * Bt[i]
            if CARRY:
                total += dt[i]
                product = a * product
                head += product * (dp[i][None, :] * Ct[i])
    if CARRY:
        index = index.to(tl.int64)
        tl.store(heads + at_states(index, channel, CHANNELS, STATES, BN), head, mask=square)
        tl.store(elapsed + index * CHANNELS + channel, total, mask=ours)


@triton.jit(do_not_specialize=["chunks"])
def chunk_carries(
    A, heads, elapsed, dfinal_state, offsets,
    chunks,
    carries,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The carry that enters each chunk from its right (chunks n d), but for the last of its sequence."""
    wide: tl.constexpr = carries.dtype.element_ty
    block, group, channel, ours, sequence = own(CHANNELS, GROUPS, BD)
    first, last = chunks_of(offsets, sequence, chunks, PACKED)
    square = (tl.arange(0, BN)[:, None] < STATES) & ours[None, :]
    decay = load_decay(A, channel, ours, wide, STATES, BN)
    carry = load_state(dfinal_state, sequence.to(tl.int64), channel, ours, wide, True, CHANNELS, STATES, BN)
    for k in range(last - 1 - first):
        index = tl.cast(last - 1 - k, tl.int64)
        dt = tl.load(elapsed + index * CHANNELS + channel, mask=ours, other=0.0)
        head = tl.load(heads + at_states(index, channel, CHANNELS, STATES, BN), mask=square, other=0.0)
        carry = grow(dt[None, :] * decay) * carry + head
        tl.store(carries + at_states(index - 1, channel, CHANNELS, STATES, BN), carry, mask=square)


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def reverse(
    x, delta, A, B, C, D, z, delta_bias, initial_state, fine, carries, cuts, poison, dy, dfinal_state,
    steps, chunks, span, batches,
    dx, ddelta, dz, dinitial_state, dA, dB, dC, dD, dbias, parts,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DELTA: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_C: tl.constexpr,
    NEED_D: tl.constexpr, NEED_Z: tl.constexpr, NEED_BIAS: tl.constexpr, NEED_INITIAL: tl.constexpr,
):  # fmt: skip
    """The backward sweep.

    dx, ddelta, dz: b t d. dinitial_state: b d n, or s d n. Partial sums: dA, and dB and dC where they are constant in
    time, chunks d n, dD and dbias chunks d over the steps of a chunk. Else dB and dC over the channels of a block are left
    in `parts`.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, group, channel, ours, index = own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = chunk_of(cuts, index, steps, chunks, span, PACKED)
    state = tl.arange(0, BN)
    square = (state[:, None] < STATES) & ours[None, :]
    bias = load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    skip = load_vector(D, channel, ours, wide, HAS_D)
    decay = load_decay(A, channel, ours, wide, STATES, BN)
    constant_B = load_matrix(B, channel, ours, wide, GB == 0, STATES, BN)
    constant_C = load_matrix(C, channel, ours, wide, GC == 0, STATES, BN)
    chunk = index.to(tl.int64)
    if closes:
        carry = load_state(dfinal_state, sequence, channel, ours, wide, True, CHANNELS, STATES, BN)
    else:
        there = (state[:, None] < STATES) & where_true(channel, ours, begin < end, CHANNELS)[None, :]
        carry = tl.load(carries + at_states(chunk, channel, CHANNELS, STATES, BN), mask=there, other=0.0)
    if PACKED:
        carry += tl.load(poison)
    sum_A = tl.zeros((BN, BD), wide)
    sum_B = tl.zeros((BN, BD), wide)
    sum_C = tl.zeros((BN, BD), wide)
    sum_D = tl.zeros((BD,), wide)
    sum_bias = tl.zeros((BD,), wide)
    tiles = tl.cdiv(end - begin, TILE)
    for k in tl.range(0, tiles):
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
        Bt = load_projection(B, constant_B, row, end - first, group, wide, GB, STATES, BN, TILE)
        Ct = load_projection(C, constant_C, row, end - first, group, wide, GC, STATES, BN, TILE)
        if (k == tiles - 1) & opens:
            start = load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN)
        else:
            at = at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
            start = tl.load(fine + at + state[:, None] * BD + tl.arange(0, BD)[None, :], mask=square, other=0.0)
        if PACKED:
            start += tl.load(poison)
        tl.debug_barrier()  # `parts` can be `fine`: no warp writes there before all have read
        h = (start,)
        for i in tl.static_range(TILE):
            h = h + (grow(dt[i][None, :] * decay) * h[i] + (dt[i] * xt[i])[None, :] * Bt[i],)
        for i in tl.static_range(TILE - 1, -1, -1):
            at = (row + i) * CHANNELS + channel
            here = where_true(channel, ours, first + i < end, CHANNELS)
            a = grow(dt[i][None, :] * decay)
            g = dp[i][None, :] * Ct[i] + carry
            carry = a * g
            from_decay = g * (a * h[i])  # and not carry h: that were NaN where the decay is beyond all numbers and h is zero
            du = sum_products(g * Bt[i], square, 0)
            if NEED_A:
                sum_A += dt[i][None, :] * from_decay
            if NEED_X:
                grad = dt[i] * du
                if HAS_D:
                    grad += skip * dp[i]
                tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=here)
            if NEED_DELTA or NEED_BIAS:
                grad = (xt[i] * du + sum_products(decay * from_decay, square, 0) * LN2) * slope[i]
                if NEED_DELTA:
                    tl.store(ddelta + at, grad.to(ddelta.dtype.element_ty), mask=here)
                if NEED_BIAS:
                    sum_bias += grad
            if NEED_D:
                sum_D += dp[i] * xt[i]
            if NEED_Z:
                ungated = sum_products(h[i + 1] * Ct[i], square, 0)
                if HAS_D:
                    ungated += skip * xt[i]
                tl.store(dz + at, (gate_slope[i] * ungated).to(dz.dtype.element_ty), mask=here)
            at = at_tile(block, batch, batches, first + i, steps, TILE, STATES, BD) + (first + i) % TILE * STATES + state
            there = state < tl.where(first + i < end, STATES, 0)
            if NEED_B:
                of_B = g * (dt[i] * xt[i])[None, :]
                if GB == 0:
                    sum_B += of_B
                else:
                    tl.store(parts + at, sum_products(of_B, square, 1), mask=there)
            if NEED_C:
                of_C = dp[i][None, :] * h[i + 1]
                if GC == 0:
                    sum_C += of_C
                else:
                    tl.store(parts + at + TILE * STATES, sum_products(of_C, square, 1), mask=there)
    if NEED_A:
        store_state(dA, chunk, channel, ours, sum_A, CHANNELS, STATES, BN)
    if NEED_B and GB == 0:
        store_state(dB, chunk, channel, ours, sum_B, CHANNELS, STATES, BN)
    if NEED_C and GC == 0:
        store_state(dC, chunk, channel, ours, sum_C, CHANNELS, STATES, BN)
    if NEED_D:
        tl.store(dD + chunk * CHANNELS + channel, sum_D, mask=ours)
    if NEED_BIAS:
        tl.store(dbias + chunk * CHANNELS + channel, sum_bias, mask=ours)
    if NEED_INITIAL:
        if opens:
            store_state(dinitial_state, sequence, channel, ours, carry, CHANNELS, STATES, BN)


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
