"""The kernels of selective_scan.

A program owns BD channels with all their states, as one [BN, BD] tile h, for one chunk of time in one batch. It reads
TILE steps at a time and takes them one after another. Where there are fewer programs than a GPU wants, time is cut
into chunks: the end of a chunk is a linear function of its start, so a first pass (`chunk_ends`) finds what each chunk
adds, `chunk_starts` strings them together, and the scan proper runs all chunks at once.

The forward pass keeps the state before every SEGMENT-th step. The backward pass runs forward from those once more to
get the state before every TILE-th (`recompute`), then goes backwards (`reverse`) with the states of a tile in
registers. What is summed over programs leaves as partial sums, which sum_leading adds in a fixed order.

Sizes: `steps` t, CHANNELS d, STATES n. Time beyond the last step has step size 0 there: decay 1, input 0, so that
states and carries pass through unchanged, and only stores need to know.
"""

import triton
import triton.language as tl

from bridge.language import LN2, LOG2E, rows, sigmoid, softplus, sum_products


@triton.jit
def place(chunks, CHANNELS: tl.constexpr, BD: tl.constexpr):
    """Which channels, chunk and batch this program owns. Neighbours share time, and so the rows of B and C."""
    blocks = tl.cdiv(CHANNELS, BD)
    program = tl.program_id(0)
    return program % blocks, program // blocks % chunks, (program // blocks // chunks).to(tl.int64)


@triton.jit
def load_channels(pointer, row, channel, inside, wide: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """[TILE, BD] from a (b t) d array, from `row` on."""
    at = tl.arange(0, TILE)[:, None] * CHANNELS + channel[None, :]
    return tl.load(pointer + row * CHANNELS + at, mask=inside, other=0.0).to(wide)


@triton.jit
def load_states(pointer, row, left, wide: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    """TILE rows [BN] from a (b t) n array, from `row` on; `left` of them lie within the sequence."""
    step, state = tl.arange(0, TILE)[:, None], tl.arange(0, BN)[None, :]
    tile = tl.load(pointer + row * STATES + step * STATES + state, mask=(step < left) & (state < STATES), other=0.0)
    return rows(tile.to(wide), TILE, BN)


@triton.jit
def load_decay(A, channel, wide: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr):
    """A log2(e), [BN, BD]: exp(dt A) is then one exp2."""
    state = tl.arange(0, BN)[:, None]
    inside = (state < STATES) & (channel < CHANNELS)[None, :]
    return tl.load(A + channel[None, :].to(tl.int64) * STATES + state, mask=inside, other=0.0).to(wide) * LOG2E


@triton.jit
def at_states(index, channel, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr):
    """Offsets [BN, BD] of block `index` in an array (...) n d."""
    return (index * STATES + tl.arange(0, BN)[:, None]) * CHANNELS + channel[None, :]


@triton.jit
def step_sizes(delta, delta_bias, inside, SOFTPLUS: tl.constexpr):
    """dt from delta, and d dt / d delta; both 0 outside the sequence."""
    dt = delta + delta_bias[None, :]
    slope = tl.full(dt.shape, 1.0, dt.dtype)
    if SOFTPLUS:
        slope = sigmoid(dt)
        dt = softplus(dt)
    return tl.where(inside, dt, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def load_vector(pointer, channel, wide: tl.constexpr, PRESENT: tl.constexpr, CHANNELS: tl.constexpr):
    """[BD] from an array d, zeros where it isn't there."""
    if PRESENT:
        return tl.load(pointer + channel, mask=channel < CHANNELS, other=0.0).to(wide)
    else:
        return tl.zeros(channel.shape, wide)


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def chunk_ends(
    x, delta, A, B, delta_bias,
    steps, chunks, span,
    ends, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """For each chunk but the last: the state at its end from a zero start (b chunks-1 n d), and its sum of dt (b chunks-1 d)."""
    wide: tl.constexpr = ends.dtype.element_ty
    block, chunk, batch = place(chunks - 1, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    bias = load_vector(delta_bias, channel, wide, HAS_BIAS, CHANNELS)
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    h = tl.zeros((BN, BD), wide)
    total = tl.zeros((BD,), wide)
    for start in tl.range(0, span, TILE):
        first = chunk * span + start
        row = batch * steps + first
        inside = (first + tl.arange(0, TILE) < steps)[:, None] & (channel < CHANNELS)[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, _ = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias, inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_states(B, row, steps - first, wide, STATES, BN, TILE)
        for i in tl.static_range(TILE):
            h = tl.exp2(dt[i][None, :] * decay) * h + u[i][None, :] * Bt[i][:, None]
            total += dt[i]
    index = batch * (chunks - 1) + chunk
    state = tl.arange(0, BN)[:, None]
    tl.store(ends + at_states(index, channel, CHANNELS, STATES, BN), h, mask=(state < STATES) & (channel < CHANNELS)[None, :])
    tl.store(elapsed + index * CHANNELS + channel, total, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["chunks"])
def chunk_starts(
    A, initial_state, ends, elapsed,
    chunks,
    starts,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """The state at the start of each chunk but the first (b chunks-1 n d)."""
    wide: tl.constexpr = starts.dtype.element_ty
    block, _, batch = place(1, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    inside = (tl.arange(0, BN)[:, None] < STATES) & (channel < CHANNELS)[None, :]
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    h = load_state(initial_state, batch, channel, wide, HAS_INITIAL, CHANNELS, STATES, BN)
    for chunk in range(chunks - 1):
        index = batch * (chunks - 1) + chunk
        at = at_states(index, channel, CHANNELS, STATES, BN)
        dt = tl.load(elapsed + index * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        h = tl.exp2(dt[None, :] * decay) * h + tl.load(ends + at, mask=inside, other=0.0)
        tl.store(starts + at, h, mask=inside)


@triton.jit
def load_state(
    pointer, batch, channel, wide: tl.constexpr, PRESENT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr
):
    """[BN, BD] from an array b d n, zeros where it isn't there."""
    state = tl.arange(0, BN)[:, None]
    if PRESENT:
        at = (batch * CHANNELS + channel[None, :]) * STATES + state
        return tl.load(pointer + at, mask=(state < STATES) & (channel < CHANNELS)[None, :], other=0.0).to(wide)
    else:
        return tl.zeros((BN, channel.shape[0]), wide)


@triton.jit
def store_state(pointer, batch, channel, h, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr):
    """h [BN, BD] into an array b d n."""
    state = tl.arange(0, BN)[:, None]
    at = (batch * CHANNELS + channel[None, :]) * STATES + state
    tl.store(pointer + at, h.to(pointer.dtype.element_ty), mask=(state < STATES) & (channel < CHANNELS)[None, :])


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def scan(
    x, delta, A, B, C, D, z, delta_bias, initial_state, starts,
    steps, chunks, span,
    y, final_state, states,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """y (b t d), final_state (b d n) and the state before every SEGMENT-th step (b ceil(t/SEGMENT) n d; none for 0)."""
    wide: tl.constexpr = final_state.dtype.element_ty
    block, chunk, batch = place(chunks, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    ours = channel < CHANNELS
    square = (tl.arange(0, BN)[:, None] < STATES) & ours[None, :]
    bias = load_vector(delta_bias, channel, wide, HAS_BIAS, CHANNELS)
    skip = load_vector(D, channel, wide, HAS_D, CHANNELS)
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    if chunk == 0:
        h = load_state(initial_state, batch, channel, wide, HAS_INITIAL, CHANNELS, STATES, BN)
    else:
        h = tl.load(starts + at_states(batch * (chunks - 1) + chunk - 1, channel, CHANNELS, STATES, BN), mask=square, other=0.0)
    for start in tl.range(0, tl.minimum(span, steps - chunk * span), TILE):
        first = chunk * span + start
        row = batch * steps + first
        if SEGMENT:
            if first % SEGMENT == 0:
                index = batch * tl.cdiv(steps, SEGMENT) + first // SEGMENT
                tl.store(states + at_states(index, channel, CHANNELS, STATES, BN), h, mask=square)
        inside = (first + tl.arange(0, TILE) < steps)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, _ = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias, inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_states(B, row, steps - first, wide, STATES, BN, TILE)
        Ct = load_states(C, row, steps - first, wide, STATES, BN, TILE)
        if HAS_D:
            through = rows(skip[None, :] * xs, TILE, BD)
        if HAS_Z:
            zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
            gate = rows(zs * sigmoid(zs), TILE, BD)
        for i in tl.static_range(TILE):
            h = tl.exp2(dt[i][None, :] * decay) * h + u[i][None, :] * Bt[i][:, None]
            out = sum_products(h * Ct[i][:, None], square, 0)
            if HAS_D:
                out += through[i]
            if HAS_Z:
                out *= gate[i]
            tl.store(
                y + (row + i) * CHANNELS + channel, out.to(y.dtype.element_ty), mask=channel < tl.where(first + i < steps, CHANNELS, 0)
            )
    if chunk == chunks - 1:
        store_state(final_state, batch, channel, h, CHANNELS, STATES, BN)


@triton.jit(do_not_specialize=["steps", "chunks", "span"])
def recompute(
    x, delta, A, B, C, z, delta_bias, states, dy,
    steps, chunks, span,
    fine, heads, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SEGMENT: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """The state before every TILE-th step (b ceil(t/TILE) n d).

    CARRY: also what each chunk adds to the carry of the backward sweep, which goes from its end to its start
    (b chunks n d): the sum over its steps of (product of the decays up to there) dp_t C_t; and its sum of dt.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, chunk, batch = place(chunks, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    ours = channel < CHANNELS
    square = (tl.arange(0, BN)[:, None] < STATES) & ours[None, :]
    bias = load_vector(delta_bias, channel, wide, HAS_BIAS, CHANNELS)
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    index = batch * tl.cdiv(steps, SEGMENT) + chunk * span // SEGMENT
    h = tl.load(states + at_states(index, channel, CHANNELS, STATES, BN), mask=square, other=0.0)
    product = tl.full((BN, BD), 1.0, wide)
    head = tl.zeros((BN, BD), wide)
    total = tl.zeros((BD,), wide)
    for start in tl.range(0, tl.minimum(span, steps - chunk * span), TILE):
        first = chunk * span + start
        row = batch * steps + first
        index = batch * tl.cdiv(steps, TILE) + first // TILE
        tl.store(fine + at_states(index, channel, CHANNELS, STATES, BN), h, mask=square)
        inside = (first + tl.arange(0, TILE) < steps)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, _ = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias, inside, SOFTPLUS)
        dt, u = rows(dts, TILE, BD), rows(dts * xs, TILE, BD)
        Bt = load_states(B, row, steps - first, wide, STATES, BN, TILE)
        if CARRY:
            dps = load_channels(dy, row, channel, inside, wide, CHANNELS, TILE)
            if HAS_Z:
                zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
                dps *= zs * sigmoid(zs)
            dp = rows(dps, TILE, BD)
            Ct = load_states(C, row, steps - first, wide, STATES, BN, TILE)
        for i in tl.static_range(TILE):
            a = tl.exp2(dt[i][None, :] * decay)
            h = a * h + u[i][None, :] * Bt[i][:, None]
            if CARRY:
                product *= a
                head += product * (dp[i][None, :] * Ct[i][:, None])
                total += dt[i]
    if CARRY:
        index = batch * chunks + chunk
        tl.store(heads + at_states(index, channel, CHANNELS, STATES, BN), head, mask=square)
        tl.store(elapsed + index * CHANNELS + channel, total, mask=ours)


@triton.jit(do_not_specialize=["chunks"])
def chunk_carries(
    A, heads, elapsed, dfinal_state,
    chunks,
    carries,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The carry that enters each chunk but the last from its right (b chunks-1 n d)."""
    wide: tl.constexpr = carries.dtype.element_ty
    block, _, batch = place(1, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    inside = (tl.arange(0, BN)[:, None] < STATES) & (channel < CHANNELS)[None, :]
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    carry = load_state(dfinal_state, batch, channel, wide, True, CHANNELS, STATES, BN)
    for k in range(chunks - 1):
        chunk = chunks - 1 - k
        index = batch * chunks + chunk
        dt = tl.load(elapsed + index * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        head = tl.load(heads + at_states(index, channel, CHANNELS, STATES, BN), mask=inside, other=0.0)
        carry = tl.exp2(dt[None, :] * decay) * carry + head
        tl.store(carries + at_states(batch * (chunks - 1) + chunk - 1, channel, CHANNELS, STATES, BN), carry, mask=inside)


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def reverse(
    x, delta, A, B, C, D, z, delta_bias, fine, carries, dy, dfinal_state,
    steps, chunks, span, batches,
    dx, ddelta, dz, dinitial_state, dA, dB, dC, dD, dbias,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DELTA: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_C: tl.constexpr,
    NEED_D: tl.constexpr, NEED_Z: tl.constexpr, NEED_BIAS: tl.constexpr, NEED_INITIAL: tl.constexpr,
):  # fmt: skip
    """The backward sweep.

    dx, ddelta, dz: b t d. dinitial_state: b d n. Partial sums: dA (b chunks) d n, dD and dbias (b chunks) d over the
    steps of a chunk; dB and dC blocks b t n over the channels of a block.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, chunk, batch = place(chunks, CHANNELS, BD)
    channel = block * BD + tl.arange(0, BD)
    state = tl.arange(0, BN)
    ours = channel < CHANNELS
    square = (state[:, None] < STATES) & ours[None, :]
    bias = load_vector(delta_bias, channel, wide, HAS_BIAS, CHANNELS)
    skip = load_vector(D, channel, wide, HAS_D, CHANNELS)
    decay = load_decay(A, channel, wide, CHANNELS, STATES, BN)
    if chunk == chunks - 1:
        carry = load_state(dfinal_state, batch, channel, wide, True, CHANNELS, STATES, BN)
    else:
        carry = tl.load(carries + at_states(batch * (chunks - 1) + chunk, channel, CHANNELS, STATES, BN), mask=square, other=0.0)
    sum_A = tl.zeros((BN, BD), wide)
    sum_D = tl.zeros((BD,), wide)
    sum_bias = tl.zeros((BD,), wide)
    tiles = tl.cdiv(tl.minimum(span, steps - chunk * span), TILE)
    for k in tl.range(0, tiles):
        first = chunk * span + (tiles - 1 - k) * TILE
        row = batch * steps + first
        inside = (first + tl.arange(0, TILE) < steps)[:, None] & ours[None, :]
        xs = load_channels(x, row, channel, inside, wide, CHANNELS, TILE)
        dts, slopes = step_sizes(load_channels(delta, row, channel, inside, wide, CHANNELS, TILE), bias, inside, SOFTPLUS)
        dps = load_channels(dy, row, channel, inside, wide, CHANNELS, TILE)
        if HAS_Z:
            zs = load_channels(z, row, channel, inside, wide, CHANNELS, TILE)
            sig = sigmoid(zs)
            if NEED_Z:
                gate_slope = rows(dps * sig * (1.0 + zs * (1.0 - sig)), TILE, BD)
            dps *= zs * sig
        xt, dt, slope, dp = rows(xs, TILE, BD), rows(dts, TILE, BD), rows(slopes, TILE, BD), rows(dps, TILE, BD)
        Bt = load_states(B, row, steps - first, wide, STATES, BN, TILE)
        Ct = load_states(C, row, steps - first, wide, STATES, BN, TILE)
        index = batch * tl.cdiv(steps, TILE) + first // TILE
        h = (tl.load(fine + at_states(index, channel, CHANNELS, STATES, BN), mask=square, other=0.0),)
        for i in tl.static_range(TILE):
            h = h + (tl.exp2(dt[i][None, :] * decay) * h[i] + (dt[i] * xt[i])[None, :] * Bt[i][:, None],)
        for i in tl.static_range(TILE - 1, -1, -1):
            at = (row + i) * CHANNELS + channel
            here = channel < tl.where(first + i < steps, CHANNELS, 0)
            g = dp[i][None, :] * Ct[i][:, None] + carry
            carry = tl.exp2(dt[i][None, :] * decay) * g
            from_decay = carry * h[i]
            du = sum_products(g * Bt[i][:, None], square, 0)
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
                ungated = sum_products(h[i + 1] * Ct[i][:, None], square, 0)
                if HAS_D:
                    ungated += skip * xt[i]
                tl.store(dz + at, (gate_slope[i] * ungated).to(dz.dtype.element_ty), mask=here)
            at = ((block * batches + batch) * steps + first + i) * STATES + state
            there = state < tl.where(first + i < steps, STATES, 0)
            if NEED_B:
                tl.store(dB + at, sum_products(g * (dt[i] * xt[i])[None, :], square, 1), mask=there)
            if NEED_C:
                tl.store(dC + at, sum_products(dp[i][None, :] * h[i + 1], square, 1), mask=there)
    partial = batch * chunks + chunk
    if NEED_A:
        store_state(dA, partial, channel, sum_A, CHANNELS, STATES, BN)
    if NEED_D:
        tl.store(dD + partial * CHANNELS + channel, sum_D, mask=ours)
    if NEED_BIAS:
        tl.store(dbias + partial * CHANNELS + channel, sum_bias, mask=ours)
    if NEED_INITIAL:
        if chunk == 0:
            store_state(dinitial_state, batch, channel, carry, CHANNELS, STATES, BN)
