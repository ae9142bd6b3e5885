"""The step that defines selective_scan_step, and the same on a pool of states."""

from bridge.ops.selective_scan.reference import advance, finish, step_sizes


def selective_scan_step(xp, scan, state, x, delta, A, B, C, D=None, z=None, delta_bias=None, *, delta_softplus=False):
    dt = step_sizes(xp, delta, delta_bias, delta_softplus)
    b = x.shape[0]
    B, C = (M[None] if M.ndim == 2 and M.shape[0] != b else M for M in (B, C))  # of shape d n: constant
    h, y = advance(xp, state, x, dt, A, B, C)
    return finish(xp, x, y, D, z), h


def selective_scan_step_(xp, scan, state, x, delta, A, B, C, D=None, z=None, delta_bias=None, state_indices=None, *, delta_softplus=False):
    if state_indices is None:
        return selective_scan_step(xp, scan, state, x, delta, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus)
    live = state_indices >= 0
    states = state[xp.clip(state_indices, min=0)]
    y, h = selective_scan_step(xp, scan, states, x, delta, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus)
    return xp.where(live[:, None], y, 0.0), xp.put(state, state_indices[live], h[live])
