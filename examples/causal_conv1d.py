"""An op of your own, from its definition to a differentiable function in PyTorch and in JAX: the causal depthwise convolution
of Mamba's blocks.

    y[b, t, d] = bias[d] + sum over j < k of weight[d, j] x[b, t - (k - 1) + j, d]        where x is 0 before its first step

    python examples/causal_conv1d.py    checks it against automatic differentiation of the loop, in each framework that is there

docs/own_op.md goes through this file from top to bottom.
"""

import math
import sys

import triton
import triton.language as tl

from bridge import Array, Launch, Op, Plan, Signature
from bridge.case import Case
from bridge.dtypes import wide
from bridge.language import sum_leading
from bridge.plan import cdiv

STEPS, BLOCK = 32, 64  # of a program: time steps and channels


# 1. The definition, as a loop. The carry is the last k inputs.


def reference(xp, scan, x, weight, bias):
    b, _, d = x.shape
    k = weight.shape[1]

    def step(last, now):
        window = (*last[1:], now[0])
        y = sum(weight[:, j] * window[j] for j in range(k))
        return window, y if bias is None else y + bias

    return (scan(step, (xp.zeros((b, d), x),) * k, (x,))[1],)


# 2. The kernels. A program has STEPS time steps of BLOCK channels of one sequence.


@triton.jit
def tile(time, CHANNELS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the program begins (its first row of steps, its sequence's first element), its steps and channels."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    pieces = tl.cdiv(time, STEPS)
    start = (row // pieces).to(tl.int64) * time * CHANNELS  # of more than 2^31 elements, too
    t = row % pieces * STEPS + tl.arange(0, STEPS)[:, None]
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, start, t, c


@triton.jit
def widen(x, DOUBLE: tl.constexpr):
    """x in the dtype of arithmetic."""
    return x.to(tl.float64 if DOUBLE else tl.float32)


@triton.jit
def steps_of(x, start, t, c, time, CHANNELS: tl.constexpr, DOUBLE: tl.constexpr):
    """x at the steps t, and 0 where there are none."""
    at = start + t.to(tl.int64) * CHANNELS + c
    return widen(tl.load(x + at, mask=(t >= 0) & (t < time) & (c < CHANNELS), other=0.0), DOUBLE)


@triton.jit(do_not_specialize=["time"])
def convolve(
    x, weight, bias, time, y, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, BACK: tl.constexpr,
    DOUBLE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t] = bias + sum of weight[k - 1 - lag] x[t - lag]. BACK: of x[t + lag], which is what y's gradient does to x's."""
    _, start, t, c = tile(time, CHANNELS, STEPS, BLOCK)
    acc = widen(tl.zeros((STEPS, BLOCK), tl.float32), DOUBLE)
    if BIAS:
        acc += widen(tl.load(bias + c, mask=c < CHANNELS, other=0.0), DOUBLE)
    for lag in tl.static_range(WIDTH):
        w = tl.load(weight + c * WIDTH + WIDTH - 1 - lag, mask=c < CHANNELS, other=0.0)
        acc += widen(w, DOUBLE) * steps_of(x, start, t + lag if BACK else t - lag, c, time, CHANNELS, DOUBLE)
    tl.store(y + start + t.to(tl.int64) * CHANNELS + c, acc.to(y.dtype.element_ty), mask=(t < time) & (c < CHANNELS))


@triton.jit(do_not_specialize=["time"])
def correlate(
    x, dy, time, dweight, dbias, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, DOUBLE: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What the program's steps add to the gradients of the weight, sum of dy[t] x[t - lag], and of the bias, sum of dy[t]."""
    row, start, t, c = tile(time, CHANNELS, STEPS, BLOCK)
    g = steps_of(dy, start, t, c, time, CHANNELS, DOUBLE)
    at = row.to(tl.int64) * CHANNELS + c
    tl.store(dbias + at, tl.sum(g, 0, keep_dims=True), mask=c < CHANNELS)
    for lag in tl.static_range(WIDTH):
        product = tl.sum(g * steps_of(x, start, t - lag, c, time, CHANNELS, DOUBLE), 0, keep_dims=True)
        tl.store(dweight + at * WIDTH + WIDTH - 1 - lag, product, mask=c < CHANNELS)


# 3. The launches, as data: they see shapes and dtypes, and no arrays.


def pieces(call):
    """Rows of programs: the steps of all sequences, STEPS at a time."""
    return call.sizes["b"] * cdiv(call.sizes["t"], STEPS)


def constants(call):
    double = "float64" in call.dtypes.values()
    return dict(CHANNELS=call.sizes["d"], WIDTH=call.sizes["k"], DOUBLE=double, STEPS=STEPS, BLOCK=BLOCK)


def convolution(call, inputs, y, **flags):
    grid = pieces(call) * cdiv(call.sizes["d"], BLOCK)
    return Launch(convolve, grid, inputs, (call.sizes["t"],), {y: call.array("x")}, {**constants(call), **flags})


def forward(call, save):
    return Plan((convolution(call, ("x", "weight", "bias"), "y", BIAS=call.has("bias"), BACK=False),), ("y",))


def backward(call, needs):
    launches = []
    if "x" in needs:
        launches.append(convolution(call, ("dy", "weight", "bias"), "dx", BIAS=False, BACK=True))
    if {"weight", "bias"} & set(needs):
        d, k, count = call.sizes["d"], call.sizes["k"], pieces(call)
        dtype = wide(call.dtypes["x"])
        parts = {"weights": Array((count, d, k), dtype), "biases": Array((count, d), dtype)}
        launches.append(Launch(correlate, count * cdiv(d, BLOCK), ("x", "dy"), (call.sizes["t"],), parts, constants(call)))
        for name, part, size in (("weight", "weights", d * k), ("bias", "biases", d)):
            if name in needs:
                total = {f"d{name}": call.array(name)}
                launches.append(Launch(sum_leading, cdiv(size, BLOCK), (part,), (count, size), total, {"BLOCK": BLOCK}))
    return Plan(tuple(launches), tuple(f"d{name}" for name in needs))


# 4. Sizes to try it with, and the op.


def sample(rng, case):
    b, t, d, k = (case.sizes[dim] for dim in "btdk")
    return {"x": rng.standard_normal((b, t, d)), "weight": rng.standard_normal((d, k)), "bias": rng.standard_normal(d)}


causal_conv1d = Op(
    name="causal_conv1d",
    signature=Signature.parse("x: b t d, weight: d k, bias?: d -> y: b t d like x"),
    reference=reference,
    forward=forward,
    backward=backward,
    limits={"k": range(1, 17)},
    batch="b",
    channels=("d",),
    flops=lambda call: tuple(passes * 2 * call.sizes["k"] * math.prod(call.array("x").shape) for passes in (1, 2)),
    cases=(
        Case("base", dict(b=2, t=35, d=5, k=4), sample),
        Case("no bias", dict(b=1, t=3, d=65, k=4), sample, without=("bias",)),
        Case("shorter than its width", dict(b=2, t=2, d=3, k=5), sample),
        Case("nothing", dict(b=2, t=0, d=3, k=2), sample),
    ),
    doc=__doc__ or "",
)


if __name__ == "__main__":
    from bridge import parity
    from bridge.frontend import installed, load

    frontends, passed = [load(name) for name in installed()], True
    for case in causal_conv1d.cases:
        for finding in parity.check(causal_conv1d, case, "float32", frontends):
            print("ok" if finding.passed else "WRONG", finding)
            passed = passed and finding.passed
    sys.exit(not passed)
