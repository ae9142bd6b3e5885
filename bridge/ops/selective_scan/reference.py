"""The loop that defines selective_scan."""


def selective_scan(xp, scan, x, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, *, delta_softplus=False):
    dt = delta if delta_bias is None else delta + delta_bias
    if delta_softplus:
        dt = xp.logaddexp(dt, xp.zeros_like(dt))

    def step(h, now):
        x, dt, B, C = now  # b d, b d, b n, b n
        h = xp.exp(dt[:, :, None] * A) * h + (dt * x)[:, :, None] * B[:, None, :]
        return h, xp.sum(h * C[:, None, :], -1)

    h = initial_state
    if h is None:
        h = xp.zeros((x.shape[0], *A.shape), like=x)
    h, y = scan(step, h, (x, dt, B, C))
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * z / (1 + xp.exp(-z))
    return y, h
