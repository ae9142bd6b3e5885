"""One step of selective_scan, for decoding."""

import triton
import triton.language as tl

from bridge.language import sigmoid, softplus
from bridge.ops.selective_scan import tiles


@triton.jit(do_not_specialize=["slots"])
def step(
    state, x, delta, A, B, C, D, z, delta_bias, state_indices,
    slots,
    y, new_state,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, GC: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, DOUBLE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """y (b d) and new_state (b d n, and can be state itself).

    INDEXED: states lie in `slots` places, entry i of the batch has its at state_indices[i]. Where that is negative, y is
    zero, where there is no such place, NaN; no state is written then.
    """
    wide: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    block, group, channel, ours, batch = tiles.own(CHANNELS, GROUPS, BD)
    batch = batch.to(tl.int64)
    slot, stateful = batch, ours
    if INDEXED:
        slot = tl.load(state_indices + batch).to(tl.int64)
        stateful = tiles.where_true(channel, ours, (slot >= 0) & (slot < slots), CHANNELS)
    at = batch * CHANNELS + channel
    xs = tl.load(x + at, mask=ours, other=0.0).to(wide)
    bias = tiles.load_vector(delta_bias, channel, ours, wide, HAS_BIAS)
    dt = tl.load(delta + at, mask=ours, other=0.0).to(wide) + bias
    if SOFTPLUS:
        dt = softplus(dt)
    decay = tiles.load_decay(A, channel, ours, wide, STATES, BN, 1)[0]
    Bt = tiles.load_projection(
        B, tiles.load_matrix(B, channel, ours, wide, GB == 0, STATES, BN, 1), batch, 1, group, wide, GB, STATES, BN, 1, 1
    )
    Ct = tiles.load_projection(
        C, tiles.load_matrix(C, channel, ours, wide, GC == 0, STATES, BN, 1), batch, 1, group, wide, GC, STATES, BN, 1, 1
    )
    h = tiles.load_state(state, slot, channel, stateful, wide, True, CHANNELS, STATES, BN, 1)[0]
    h = tiles.growth(dt[None, :] * decay, True) * h + (dt * xs)[None, :] * Bt[0][0]
    out = tl.sum(tiles.dot((h,), Ct[0]), axis=0)
    if HAS_D:
        out += tiles.load_vector(D, channel, ours, wide, True) * xs
    if HAS_Z:
        zs = tl.load(z + at, mask=ours, other=0.0).to(wide)
        out *= zs * sigmoid(zs)
    if INDEXED:
        out = tl.where(slot < 0, 0.0, tl.where(slot < slots, out, float("nan")))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=ours)
    tiles.store_state(new_state, slot, channel, stateful, (h,), CHANNELS, STATES, BN, 1)
