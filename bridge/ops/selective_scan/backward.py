"""The backward pass of selective_scan.

It runs forward once more, from the states that the forward pass kept, to get the state before every TILE-th step of a
sequence (`recompute`), then goes backwards (`reverse`) with the states of a tile in registers. What is summed over
programs leaves as partial sums, which sum_leading adds in a fixed order.
"""

import triton
import triton.language as tl

from bridge.fast import roomy
from bridge.language import LN2, collect, groups, rows, sigmoid, spread, stack
from bridge.ops.selective_scan import tiles


@triton.jit
def load_kept(
    states, initial_state, sequence, batch, begin, step, steps, opens, channel, ours, wide: tl.constexpr, HAS_INITIAL: tl.constexpr,
    SEGMENT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The state before a step at the start of a segment: one that was kept, or where a sequence begins the initial one."""
    if opens & (step == begin):
        h = tiles.load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
    else:
        there = tiles.where_true(channel, ours, step < steps, CHANNELS)
        h = tiles.load_states(states, batch * tl.cdiv(steps, SEGMENT) + step // SEGMENT, channel, there, CHANNELS, STATES, BN, R)
    return h


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def recompute(
    x, delta, A, B, C, z, delta_bias, initial_state, states, cuts, poison, dy,
    steps, chunks, span, batches,
    fine, after, heads, elapsed,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """The state before every TILE-th step of a sequence but the first, into the workspace; and that at the end of a chunk of the
    backward sweep (chunks n d).

    CARRY: also what each chunk adds to the carry of the backward sweep, which goes from its end to its start
    (chunks n d): the sum over its steps of (product of the decays up to there) dp_t C_t; and its sum of dt (chunks d).
    Without it these chunks are shorter than those of the sweep, which has one for each sequence.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    block, group, channel, ours, index = tiles.own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = tiles.chunk_of(cuts, index, steps, chunks, span, PACKED)
    bias = tiles.load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    decay = tiles.load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = tiles.load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = tiles.load_matrix(C, channel, ours, wide, CARRY and GC == 0, STATES, BN, R)
    # A chunk that another follows needs no more than the state before its last tile: the next one begins with the state behind it.
    whole = (closes | CARRY | PACKED) > 0
    initial = load_kept(
        states, initial_state, sequence, batch, begin, begin, tl.where(begin < end, steps, 0), opens, channel, ours, wide, HAS_INITIAL, SEGMENT,
        CHANNELS, STATES, BN, R,
    )  # fmt: skip
    if PACKED:
        initial = tiles.shift(initial, tl.load(poison))
    one = tiles.shift(tiles.zeros(BD, wide, BN, R), 1.0)
    LANES: tl.constexpr = BN // R
    h, head, through, total, wrong = initial, tiles.zeros(BD, wide, BN, R), one, tl.zeros((LANES, BD), wide), True
    for CAREFUL in tl.static_range(2):
        if wrong:
            AT_ONCE: tl.constexpr = 1 if CAREFUL else TILE
            TOGETHER: tl.constexpr = 1 if R == 1 else (LANES if LANES < AT_ONCE else AT_ONCE)  # steps that lanes share out
            h, head, through, total = initial, tiles.zeros(BD, wide, BN, R), one, tl.zeros((LANES, BD), wide)
            for start in tl.range(0, tl.where(whole, end - begin, (end - begin - 1) // TILE * TILE), AT_ONCE, num_stages=3):
                first, left = begin + start, end - begin - start
                row = batch * steps + first
                keep = (start % TILE == 0) & ((start > 0) | ((opens == 0) | (not PACKED)))
                here = tiles.where_true(channel, ours, keep, CHANNELS)
                at = tiles.at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
                tiles.store_states(fine + at, 0, tl.arange(0, BD), here, h, BD, STATES, BN, R)
                x_rows = tiles.load_rows(x, row, left, channel, ours, CHANNELS, AT_ONCE)
                deltas = tiles.load_tile(delta, row, left, channel, ours, CHANNELS, AT_ONCE)
                dt, dt_groups = tiles.step_sizes(deltas, bias, left, wide, SOFTPLUS, HAS_BIAS, TOGETHER, LANES)
                Bt = tiles.load_projection(B, constant_B, row, left, group, wide, GB, STATES, BN, R, AT_ONCE)
                if CARRY:
                    dy_tile = tiles.load_tile(dy, row, left, channel, ours, CHANNELS, AT_ONCE)
                    Ct = tiles.load_projection(C, constant_C, row, left, group, wide, GC, STATES, BN, R, AT_ONCE)
                    if HAS_Z:
                        gates, slopes = tiles.load_gate(z, row, left, channel, ours, wide, CHANNELS, AT_ONCE, TOGETHER)
                        dp = spread(tiles.gated(groups(dy_tile, TOGETHER), gates), LANES)
                    else:
                        dp = rows(dy_tile)
                for i in tl.static_range(AT_ONCE):
                    u = dt[i] * x_rows[i].to(wide)
                    now, products, sums = (), (), ()
                    for r in tl.static_range(R):
                        a = tiles.growth(dt[i] * decay[r], CAREFUL)
                        now = now + (a * h[r] + u * Bt[i][r],)
                        if CARRY:
                            products = products + (a * through[r],)
                            sums = sums + (head[r] + products[r] * (dp[i].to(wide) * Ct[i][r]),)
                    h = now
                    if CARRY:
                        total += dt[i]
                        through, head = products, sums
            wrong = tiles.undefined(h)
            if CARRY:
                wrong = wrong | tiles.undefined(head)
    if not whole:  # the last tile was left out: the state before it is all that is left to write
        first = begin + (end - begin - 1) // TILE * TILE
        at = tiles.at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
        tiles.store_states(fine + at, 0, tl.arange(0, BD), ours, h, BD, STATES, BN, R)
    if CARRY:
        index = index.to(tl.int64)
        tiles.store_states(after, index, roomy(channel), ours, h, CHANNELS, STATES, BN, R)
        tiles.store_states(heads, index, channel, ours, head, CHANNELS, STATES, BN, R)
        tiles.store_first(elapsed + index * CHANNELS, channel, ours, total)
    else:
        of_sweep = index.to(tl.int64) if PACKED else sequence
        tiles.store_states(after, of_sweep, roomy(channel), tiles.where_true(channel, ours, whole, CHANNELS), h, CHANNELS, STATES, BN, R)


@triton.jit(do_not_specialize=["steps", "chunks", "span", "batches"])
def reverse(
    x, delta, A, B, C, D, z, delta_bias, initial_state, states, fine, after, carries, cuts, poison, dy, dfinal_state,
    steps, chunks, span, batches,
    dx, ddelta, dz, dinitial_state, dA, dB, dC, dD, dbias, blocks_sums,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr, SEGMENT: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, HAS_FINE: tl.constexpr, SHARED: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DELTA: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_C: tl.constexpr,
    NEED_D: tl.constexpr, NEED_Z: tl.constexpr, NEED_BIAS: tl.constexpr, NEED_INITIAL: tl.constexpr,
):  # fmt: skip
    """The backward sweep, of one step from the initial state where there is no `fine`.

    dx, ddelta, dz: b t d. dinitial_state: b d n, or s d n. Partial sums: dA, and dB and dC where they are constant in
    time, chunks d n, dD and dbias chunks d over the steps of a chunk. Else dB and dC over the channels of a block are left
    in `blocks_sums`.

    The second sweep is for chunks that the first left with a NaN, since a decay was beyond all numbers. What the first needed is
    written over by then: it finds the state before each step anew, from the one that was kept for its segment.
    """
    wide: tl.constexpr = fine.dtype.element_ty
    LANES: tl.constexpr = BN // R
    block, group, channel, ours, index = tiles.own(CHANNELS, GROUPS, BD)
    sequence, batch, begin, end, opens, closes = tiles.chunk_of(cuts, index, steps, chunks, span, PACKED)
    # Whether sums over the channels begin between lanes, and not within each.
    SUMS: tl.constexpr = R * ((1 if NEED_B and GB > 0 else 0) + (1 if NEED_C and GC > 0 else 0))
    APART: tl.constexpr = R == 1 or (SUMS > 0 and 32 > SUMS * LANES)
    state, lane = tiles.first_states(BN, R), tl.arange(0, BD)[None, :]
    bias = tiles.load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    skip = tiles.load_vector(D, channel, ours, wide, HAS_D)
    decay = tiles.load_decay(A, channel, ours, wide, STATES, BN, R)
    constant_B = tiles.load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, R)
    constant_C = tiles.load_matrix(C, channel, ours, wide, GC == 0, STATES, BN, R)
    chunk = index.to(tl.int64)
    if closes:
        last_carry = tiles.load_state(dfinal_state, sequence, channel, ours, wide, True, CHANNELS, STATES, BN, R)
    else:
        there = tiles.where_true(channel, ours, begin < end, CHANNELS)
        last_carry = tiles.load_states(carries, chunk, channel, there, CHANNELS, STATES, BN, R)
    if PACKED:
        last_carry = tiles.shift(last_carry, tl.load(poison))
    if HAS_FINE:
        last_state = tiles.load_states(after, chunk, channel, ours, CHANNELS, STATES, BN, R)
    else:
        last_state = tiles.zeros(BD, wide, BN, R)
    carry, sum_A, sum_B, sum_C = last_carry, tiles.zeros(BD, wide, BN, R), tiles.zeros(BD, wide, BN, R), tiles.zeros(BD, wide, BN, R)
    sum_D, sum_bias = tl.zeros((1, BD), wide), tl.zeros((1, BD), wide)
    behind, wrong = last_state, True
    for CAREFUL in tl.static_range(0 if HAS_FINE else 1, 2):
        if wrong:
            AT_ONCE: tl.constexpr = 1 if CAREFUL else TILE
            TOGETHER: tl.constexpr = 1 if R == 1 else (LANES if LANES < AT_ONCE else AT_ONCE)  # steps that lanes share out
            KNOWN: tl.constexpr = HAS_FINE and not CAREFUL  # the states before and behind each tile
            carry, sum_A, sum_B, sum_C = (
                last_carry,
                tiles.zeros(BD, wide, BN, R),
                tiles.zeros(BD, wide, BN, R),
                tiles.zeros(BD, wide, BN, R),
            )
            group_D, group_bias = tl.zeros((TOGETHER, BD), wide), tl.zeros((TOGETHER, BD), wide)
            behind = last_state
            count = tl.cdiv(end - begin, AT_ONCE)
            for k in tl.range(0, count, num_stages=3):
                start = (count - 1 - k) * AT_ONCE
                first, left = begin + start, end - begin - start
                row = batch * steps + first
                x_tile = tiles.load_tile(x, row, left, channel, ours, CHANNELS, AT_ONCE)
                x_rows, x_groups = rows(x_tile), groups(x_tile, TOGETHER)
                deltas = tiles.load_tile(delta, row, left, channel, ours, CHANNELS, AT_ONCE)
                dt, dt_groups = tiles.step_sizes(deltas, bias, left, wide, SOFTPLUS, HAS_BIAS, TOGETHER, LANES)
                Bt = tiles.load_projection(B, constant_B, row, left, group, wide, GB, STATES, BN, R, AT_ONCE)
                place = tiles.at_tile(block, batch, batches, first, steps, TILE, STATES, BD)
                if KNOWN:
                    known = ours
                    if PACKED:
                        known = tiles.where_true(channel, ours, (k < count - 1) | (opens == 0), CHANNELS)
                    all_states = tiles.in_lanes(BN, R)
                    inside = (all_states < STATES) & known[None, :, None]
                    before = tiles.of_lanes(tl.load(fine + place + all_states * BD + lane[:, :, None], mask=inside, other=0.0))
                    if PACKED:
                        if (k == count - 1) & opens:
                            before = tiles.load_state(initial_state, sequence, channel, ours, wide, HAS_INITIAL, CHANNELS, STATES, BN, R)
                        before = tiles.shift(before, tl.load(poison))
                    if SHARED:
                        tl.debug_barrier()  # `blocks_sums` can be `fine`: no warp writes there before all have read
                else:
                    origin = begin + start // SEGMENT * SEGMENT
                    before = load_kept(
                        states, initial_state, sequence, batch, begin, origin, steps, opens, channel, ours, wide, HAS_INITIAL, SEGMENT,
                        CHANNELS, STATES, BN, R,
                    )  # fmt: skip
                    if PACKED:
                        before = tiles.shift(before, tl.load(poison))
                    for step in range(origin, first):
                        at = batch * steps + step
                        size = tiles.load_tile(delta, at, 1, channel, ours, CHANNELS, 1)
                        ahead, ahead_groups = tiles.step_sizes(size, bias, 1, wide, SOFTPLUS, HAS_BIAS, 1, 1)
                        input = tiles.load_rows(x, at, 1, channel, ours, CHANNELS, 1)[0].to(wide)
                        Bs = tiles.load_projection(B, constant_B, at, 1, group, wide, GB, STATES, BN, R, 1)
                        before = tiles.advance(before, decay, ahead[0], ahead[0] * input, Bs[0], True)
                h, kept = (before,), ()
                for i in tl.static_range(AT_ONCE):
                    u, now, powers = dt[i] * x_rows[i].to(wide), (), ()
                    for r in tl.static_range(R):
                        a = tiles.growth(dt[i] * decay[r], CAREFUL)
                        powers = powers + (a,)
                        if KNOWN and i == AT_ONCE - 1:
                            now = now + (behind[r],)
                        else:
                            now = now + (a * h[i][r] + u * Bt[i][r],)
                    h, kept = h + (now,), kept + (powers,)
                dy_tile = tiles.load_tile(dy, row, left, channel, ours, CHANNELS, AT_ONCE)
                dp_groups = groups(dy_tile, TOGETHER)
                if HAS_Z:
                    gates, slopes = tiles.load_gate(z, row, left, channel, ours, wide, CHANNELS, AT_ONCE, TOGETHER)
                    of_ungated, dp_groups = tiles.gated(dp_groups, slopes), tiles.gated(dp_groups, gates)
                    dps = spread(dp_groups, LANES)
                else:
                    dps = rows(dy_tile)
                Ct = tiles.load_projection(C, constant_C, row, left, group, wide, GC, STATES, BN, R, AT_ONCE)
                if (
                    KNOWN and HAS_Z and SOFTPLUS
                ):  # Registers are few then: what was read is read again, of which the compiler knows nothing.
                    again = row + (tl.program_id(0) >> 31)
                    Bt = tiles.load_projection(B, constant_B, again, left, group, wide, GB, STATES, BN, R, AT_ONCE)
                    deltas = tiles.load_tile(delta, again, left, channel, ours, CHANNELS, AT_ONCE)
                delta_groups = groups(deltas, TOGETHER)
                of_parts, of_us, of_decays, ungated, dxs, ddeltas, dzs = (), (), (), (), (), (), ()
                nothing = tl.cast(k, wide) * 0.0  # which the compiler doesn't know: else it kept all powers, in memory
                for i in tl.static_range(AT_ONCE - 1, -1, -1):
                    xs, dp = x_rows[i].to(wide), dps[i].to(wide)
                    u = dt[i] * xs
                    carried, sums_A, sums_B, sums_C, each = (), (), (), (), ()
                    of_u = tl.zeros((LANES, BD), wide)
                    of_decay = tl.zeros((LANES, BD), wide)
                    for r in tl.static_range(R):
                        if i >= AT_ONCE - KEPT:
                            a = kept[i][r]
                        else:
                            a = tiles.growth(dt[i] * decay[r] + nothing, CAREFUL)
                        g = dp * Ct[i][r] + carry[r]
                        carried = carried + (a * g,)
                        if CAREFUL:
                            from_decay = g * (a * h[i][r])  # a g can be beyond all numbers, and h zero
                        else:
                            from_decay = carried[r] * h[i][r]
                        of_u, of_decay = tl.fma(g, Bt[i][r], of_u), tl.fma(decay[r], from_decay, of_decay)  # see `product`
                        sums_A = sums_A + (sum_A[r] + dt[i] * from_decay,)
                        if NEED_B:
                            of_B = tiles.term(g, u, APART or CAREFUL)
                            if GB == 0:
                                sums_B = sums_B + (sum_B[r] + of_B,)
                            else:
                                each = each + (of_B,)
                    for r in tl.static_range(R):
                        if NEED_C:
                            of_C = tiles.term(dp, h[i + 1][r], APART or CAREFUL)
                            if GC == 0:
                                sums_C = sums_C + (sum_C[r] + of_C,)
                            else:
                                each = each + (of_C,)
                    if len(each) > 0:
                        of_parts = (tiles.sum_channels(each),) + of_parts
                        if len(of_parts) == 4 or i == 0:
                            entry = tiles.apart(tl.arange(0, len(each)))[None, :, None] + (0 if NEED_B and GB > 0 else R)
                            of = state[:, :, None] + entry % R  # below R of B, from there on of C
                            later = tl.arange(0, len(of_parts))[None, None, :]
                            if PACKED or CAREFUL:  # where a tile can begin anywhere
                                step = first + i + later
                                here_in = (
                                    blocks_sums + tiles.at_tile(block, batch, batches, step, steps, TILE, STATES, BD) + step % TILE * STATES
                                )
                            else:
                                here_in = blocks_sums + place + i * STATES + later * STATES
                            inside = of < tl.where(i + later < left, STATES, 0)
                            tl.store(here_in + (of + entry // R * (TILE * STATES)), stack(of_parts), mask=inside)
                            of_parts = ()
                    carry, sum_A = carried, sums_A
                    if NEED_B and GB == 0:
                        sum_B = sums_B
                    if NEED_C and GC == 0:
                        sum_C = sums_C
                    of_us, of_decays = collect(of_us, of_u, i, TOGETHER, True), collect(of_decays, of_decay, i, TOGETHER, True)
                    if NEED_Z:
                        ungated = collect(ungated, tiles.dot(h[i + 1], Ct[i]), i, TOGETHER, True)
                    if i % TOGETHER == 0:
                        xs_j, dp_j = x_groups[i // TOGETHER].to(wide), dp_groups[i // TOGETHER].to(wide)
                        of_u = tiles.sum_lanes(of_us, TOGETHER)
                        grad_x, grad_delta = dt_groups[i // TOGETHER] * of_u, xs_j * of_u + tiles.sum_lanes(of_decays, TOGETHER) * LN2
                        if HAS_D:
                            grad_x += skip[None, :] * dp_j
                        if SOFTPLUS:
                            grad_delta *= sigmoid(delta_groups[i // TOGETHER].to(wide) + bias[None, :])
                        if NEED_BIAS:
                            group_bias += tl.where(tl.arange(0, TOGETHER)[:, None] + i < left, grad_delta, 0.0)
                        if NEED_D:
                            group_D += dp_j * xs_j
                        of_us, of_decays, dxs, ddeltas = (), (), (grad_x,) + dxs, (grad_delta,) + ddeltas
                        if NEED_Z:
                            out = tiles.sum_lanes(ungated, TOGETHER)
                            if HAS_D:
                                out += skip[None, :] * xs_j
                            ungated, dzs = (), (out * of_ungated[i // TOGETHER],) + dzs
                        if len(dxs) == 4 or i == 0:
                            if NEED_X:
                                tiles.store_sums(dx + row * CHANNELS, channel, ours, i, left, dxs, CHANNELS, LANES)
                            if NEED_DELTA:
                                tiles.store_sums(ddelta + row * CHANNELS, channel, ours, i, left, ddeltas, CHANNELS, LANES)
                            if NEED_Z:
                                tiles.store_sums(dz + row * CHANNELS, channel, ours, i, left, dzs, CHANNELS, LANES)
                            dxs, ddeltas, dzs = (), (), ()
                if KNOWN:
                    behind = before
            sum_D, sum_bias = tl.sum(group_D, axis=0, keep_dims=True), tl.sum(group_bias, axis=0, keep_dims=True)
            wrong = tiles.undefined(carry) | tiles.undefined(sum_A)
    if NEED_A:
        tiles.store_state(dA, chunk, channel, ours, sum_A, CHANNELS, STATES, BN, R)
    if NEED_B and GB == 0:
        tiles.store_state(dB, chunk, channel, ours, sum_B, CHANNELS, STATES, BN, R)
    if NEED_C and GC == 0:
        tiles.store_state(dC, chunk, channel, ours, sum_C, CHANNELS, STATES, BN, R)
    if NEED_D:
        tiles.store_first(dD + chunk * CHANNELS, channel, ours, sum_D)
    if NEED_BIAS:
        tiles.store_first(dbias + chunk * CHANNELS, channel, ours, sum_bias)
    if NEED_INITIAL:
        if opens:
            tiles.store_state(dinitial_state, sequence, channel, ours, carry, CHANNELS, STATES, BN, R)


@triton.jit(do_not_specialize=["steps", "batches"])
def sum_blocks(
    blocks_sums,
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
    acc = tl.zeros((BLOCK,), blocks_sums.dtype.element_ty)
    for k in range(count):
        block = group * count + k
        acc += tl.load(blocks_sums + tiles.at_tile(block, batch, batches, step, steps, TILE, STATES, BD) + at, mask=here, other=0.0)
    tl.store(total + i, acc.to(total.dtype.element_ty), mask=here)
