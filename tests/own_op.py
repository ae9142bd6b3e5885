"""An op that doesn't ship: each channel of x times its weight. What holds for it holds for the ops of those who use the bridge."""

import math

import triton
import triton.language as tl

from bridge import Launch, Op, Plan, Signature
from bridge.case import Case
from bridge.dtypes import wide
from bridge.language import sum_leading
from bridge.plan import cdiv
from bridge.signature import Array

BLOCK = 64


@triton.jit(do_not_specialize=["size"])
def times(x, w, size, y, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """y[i, c] = x[i, c] w[c], for x and y of `size` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(w + i % CHANNELS, mask=i < size, other=0.0)
    tl.store(y + i, (tl.load(x + i, mask=i < size, other=0.0) * factor).to(y.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["size"])
def products(x, y, size, z, BLOCK: tl.constexpr):
    """z = x y, all of `size` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + i, mask=i < size, other=0.0).to(z.dtype.element_ty) * tl.load(y + i, mask=i < size, other=0.0)
    tl.store(z + i, product, mask=i < size)


def scale(call, x, y):
    size, channels = math.prod(call.array("x").shape), call.sizes["d"]
    return Launch(times, cdiv(size, BLOCK), (x, "w"), (size,), {y: call.array("x")}, {"CHANNELS": channels, "BLOCK": BLOCK})


def forward(call, save):
    return Plan((scale(call, "x", "y"),), ("y",))


def backward(call, needs):
    shape, channels = call.array("x").shape, call.sizes["d"]
    size = math.prod(shape)
    parts = {"parts": Array(shape, wide(call.dtypes["x"]))}
    constants = {"BLOCK": BLOCK}
    launches = {
        "x": [scale(call, "dy", "dx")],
        "w": [
            Launch(products, cdiv(size, BLOCK), ("x", "dy"), (size,), parts, constants),
            Launch(sum_leading, cdiv(channels, BLOCK), ("parts",), (size // channels, channels), {"dw": call.array("w")}, constants),
        ],
    }
    return Plan(tuple(launch for name in needs for launch in launches[name]), tuple(f"d{name}" for name in needs))


def sample(rng, case):
    b, t, d = (case.sizes[dim] for dim in "btd")
    return {"x": rng.standard_normal((b, t, d)), "w": rng.standard_normal(d)}


weighted = Op(
    name="weighted",
    signature=Signature.parse("x: b t d, w: d -> y: b t d like x"),
    reference=lambda xp, scan, x, w: (x * w,),
    forward=forward,
    backward=backward,
    batch="b",
    channels=("d",),
    flops=lambda call: (math.prod(call.array("x").shape), 3 * math.prod(call.array("x").shape)),  # dw is a product and a sum
    cases=(Case("base", dict(b=2, t=4, d=3), sample),),
)
