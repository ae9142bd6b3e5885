"""What selective_scan and its step are counted as: the arithmetic of their definition, and of its derivative."""

import math

from bridge.op import Call

# Of a state at a step: dt A, its exponential, decay h, dt x B, their sum, h C, and the sum over states. Backwards: two each for
# what y and the next step give to dh, dC, dA, dB, ddt and d(dt x), and two products that these share.
STATE = (7, 14)
# Of a channel at a step: dt x and what an argument adds.
CHANNEL = (1, 3)
WITH = {"delta_bias": (1, 1), "D": (2, 4), "z": (4, 11)}
SOFTPLUS = (3, 4)


def flops(call: Call) -> tuple[int, int]:
    steps = math.prod(call.array("x").shape)
    parts = [CHANNEL, *(cost for name, cost in WITH.items() if call.has(name)), *([SOFTPLUS] if call.options["delta_softplus"] else [])]
    forward, backward = (steps * (call.sizes["n"] * state + sum(each)) for state, *each in zip(STATE, *parts, strict=True))
    return forward, backward
