"""A scan whose time is cut into parts, one a device: how the states of the parts follow from one another.

    h after a part  =  exp(A elapsed) h before it  +  end

`end` is the state that the part ends with when it starts from zero, and `elapsed` the sum of its step sizes: n + 1 numbers a
channel are all that devices tell each other. Each then scans its part again, from the state before it. Everything here is
differentiable, and so is the exchange; a frontend adds only that.
"""

from dataclasses import replace

from bridge.ops.selective_scan.op import selective_scan
from bridge.ops.selective_scan.reference import decay, step_sizes

OVER_TIME = replace(selective_scan, name="selective_scan_over_time")  # whose checks speak of it by this name


def elapsed(xp, delta, delta_bias=None, *, delta_softplus=False):
    """The sum of the step sizes of each channel, b d. delta: b t d, delta_bias: d."""
    return xp.sum(step_sizes(xp, delta, delta_bias, delta_softplus), 1)


def before(xp, A, initial_state, ends, times):
    """The state before each part, a list of b d n. A: d n, initial_state: b d n; for each part but the last its `end`, b d n,
    and `elapsed`, b d."""
    states = [initial_state]
    for end, time in zip(ends, times, strict=True):
        half = decay(xp, time / 2, A)  # twice: what many steps do to a small state can be more than any number says
        states.append(half * (half * states[-1]) + end)
    return states
