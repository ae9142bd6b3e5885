"""Chunks of time strung together: what the passes do between a sweep that finds what each chunk adds and one that needs where
each begins."""

import triton
import triton.language as tl

from bridge.language import LOG2E
from bridge.ops.selective_scan import tiles


@triton.jit(do_not_specialize=["chunks"])
def string(
    A, initial, adds, elapsed, offsets,
    chunks,
    starts,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of a sequence but the first (chunks n d), from what each adds to it (`adds`, chunks n d) and its sum
    of dt (`elapsed`, chunks d). BACK: the same from the last chunk to the first, of the carry behind each but the last.

    Each number of a state goes its own way, and nothing is waited for but memory: so a program has few of them, and reads what
    AT_ONCE chunks add before it takes them one after another.
    """
    SIZE: tl.constexpr = CHANNELS * STATES
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    wide: tl.constexpr = starts.dtype.element_ty
    sequence = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ours, channel = i < SIZE, i % CHANNELS
    turned = channel.to(tl.int64) * STATES + i // CHANNELS  # the place in an array d n
    decay = tl.load(A + turned, mask=ours, other=0.0).to(wide) * LOG2E
    h = tl.zeros((BLOCK,), wide)
    if HAS_INITIAL:
        h = tl.load(initial + sequence.to(tl.int64) * SIZE + turned, mask=ours, other=0.0).to(wide)
    first, last = tiles.chunks_of(offsets, sequence, chunks, PACKED)
    for k in tl.range(0, last - 1 - first, AT_ONCE, num_stages=3):
        times, added = (), ()
        for j in tl.static_range(AT_ONCE):
            there = tiles.where_true(i, ours, k + j < last - 1 - first, SIZE)
            index = tl.cast(last - 1 - k - j if BACK else first + k + j, tl.int64)
            times = times + (tl.load(elapsed + index * CHANNELS + channel, mask=there, other=0.0),)
            added = added + (tl.load(adds + index * SIZE + i, mask=there, other=0.0),)
        for j in tl.static_range(AT_ONCE):
            there = tiles.where_true(i, ours, k + j < last - 1 - first, SIZE)
            index = tl.cast(last - 2 - k - j if BACK else first + k + j + 1, tl.int64)
            half = tiles.growth(0.5 * times[j] * decay, True)  # twice: what many steps do to a small state can be more than any number says
            h = half * (half * h) + added[j]
            tl.store(starts + index * SIZE + i, h, mask=there)
