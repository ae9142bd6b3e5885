"""The loop that defines selective_scan."""

import math


def selective_scan(
    xp, scan, x, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, cu_seqlens=None, *, delta_softplus=False
):
    dt = step_sizes(xp, delta, delta_bias, delta_softplus)
    over_time = (x, dt, *(M for M in (B, C) if M.ndim > 2))

    def step(h, now):
        x, dt, *varying = now
        return advance(xp, h, x, dt, A, *(varying.pop(0) if M.ndim > 2 else M[None] for M in (B, C)))

    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    h = xp.zeros((sequences, *A.shape), like=x) if initial_state is None else initial_state
    if cu_seqlens is None:
        h, y = scan(step, h, over_time)
    else:
        sequence, poison = sequences_of_steps(xp, cu_seqlens, x.shape[1])

        def step_of_one(states, now):  # each sequence has a state of its own
            *now, sequence = now
            h, y = step(states[sequence], now)
            return xp.put(states, sequence, h), y

        h, y = scan(step_of_one, h * poison, (*over_time, sequence[None]))
    return finish(xp, x, y, D, z), h


def step_sizes(xp, delta, delta_bias, delta_softplus):
    dt = delta if delta_bias is None else delta + delta_bias
    return xp.logaddexp(dt, xp.zeros_like(dt)) if delta_softplus else dt


def advance(xp, h, x, dt, A, B, C):
    """The next state, b d n, and y. x, dt: b d. B and C: b n or b g n; for what is constant in time, 1 d n."""
    h = decay(xp, dt, A) * h + (dt * x)[:, :, None] * per_channel(xp, B, x.shape[1])
    return h, xp.sum(h * per_channel(xp, C, x.shape[1]), -1)


def decay(xp, dt, A):
    """exp(dt A), b d n, for times dt: b d. Of a state that is zero even a growth beyond all numbers makes zero, and not NaN."""
    number = xp.finfo(dt.dtype)
    return xp.exp(xp.clip(dt[:, :, None] * A, max=math.log(number.max) * (1 - number.eps)))


def per_channel(xp, M, channels):
    """b n or b g n, each group repeated for each of its channels: b 1 n or b d n."""
    if M.ndim == 2:
        return M[:, None]
    b, g, n = M.shape
    return xp.reshape(xp.broadcast_to(M[:, :, None], (b, g, channels // g, n)), (b, channels, n))


def finish(xp, x, y, D, z):
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * z * xp.exp(-xp.logaddexp(-z, xp.zeros_like(z)))  # not 1 + exp(-z), whose gradient is NaN where it overflows
    return y


def sequences_of_steps(xp, cu_seqlens, steps):
    """The sequence of each step; and 1, or NaN where cu_seqlens doesn't rise from 0 to the number of steps."""
    last = cu_seqlens.shape[0] - 2
    sequence = xp.searchsorted(cu_seqlens[1:], xp.arange(steps, like=cu_seqlens), side="right")
    valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == steps) & xp.all(cu_seqlens[1:] >= cu_seqlens[:-1])
    return xp.clip(sequence, 0, last), xp.where(valid, 1.0, math.nan)
