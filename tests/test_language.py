"""The helpers that kernels share, each by itself."""

import numpy as np
import pytest
import triton
import triton.language as tl
from common import carry_out

from bridge import Array, Launch, Plan
from bridge.language import collect, everywhere, groups, rows, sigmoid, softplus, spread, stack, sum_each, sum_leading, widen
from bridge.transpose import transposition


@triton.jit
def rows_kernel(x, out, T: tl.constexpr, W: tl.constexpr):
    i, j = tl.arange(0, T)[:, None], tl.arange(0, W)
    vectors = rows(tl.load(x + i * W + j[None, :]))
    for t in tl.static_range(T):
        tl.store(out + t * W + j[None, :], vectors[t] + t * 1000)


@triton.jit
def exchange_kernel(x, each, sums, every, shared, up, down, T: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr):
    """x: T W. each: groups of LANES rows, stacked; sums: of row t the sum of its entries t, LANES + t, ..., over all t at once; up and
    down: row k is k + 1 times the sum over a group, of which lanes collect one each."""
    i, j, t = tl.arange(0, T)[:, None], tl.arange(0, W)[None, :], tl.arange(0, T // LANES)
    tile = tl.load(x + i * W + j)
    lane = tl.arange(0, LANES)[:, None]
    of_group = groups(tile, LANES)
    tl.store(each + ((lane * W + j)[:, :, None] * (T // LANES) + t[None, None, :]), stack(of_group))
    first = everywhere(of_group[0])
    scaled = ()
    for k in tl.static_range(LANES):
        tl.store(every + (k * LANES + lane) * W + j, first[k])
        scaled = scaled + (of_group[0] * (k + 1),)
    tl.store(sums + lane * LANES + tl.arange(0, LANES)[None, :], sum_each(stack(scaled)))
    rising, falling = (), ()
    for k in tl.static_range(LANES):
        rising = collect(rising, scaled[k], k, LANES)
        falling = collect(falling, scaled[LANES - 1 - k], LANES - 1 - k, LANES, True)
    tl.store(up + lane * W + j, rising[0])
    tl.store(down + lane * W + j, falling[0])
    all_rows = spread(of_group, LANES)
    for k in tl.static_range(T):
        tl.store(shared + (k * LANES + lane) * W + j, all_rows[k] + lane * 0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("T", "W", "LANES"), [(4, 8, 1), (4, 8, 2), (8, 8, 4), (16, 16, 8), (16, 16, 2)])
def test_exchanges(T, W, LANES, dtype):
    """Rows by groups, a row in all lanes of a group, and a sum for each lane: what lanes exchange arrives where it should."""
    x = np.random.default_rng(0).standard_normal((T, W)).astype(dtype)
    shapes = {"each": (LANES, W, T // LANES), "sums": (LANES, LANES), "every": (LANES, LANES, W), "shared": (T, LANES, W)}
    shapes |= {"up": (LANES, W), "down": (LANES, W)}
    outputs = {name: Array(shape, dtype) for name, shape in shapes.items()}
    launch = Launch(exchange_kernel, 1, ("x",), (), outputs, {"T": T, "W": W, "LANES": LANES}, wide=dtype, num_warps=1)
    each, sums, every, shared, up, down = carry_out(Plan((launch,), tuple(outputs)), {"x": x})
    np.testing.assert_array_equal(each, np.moveaxis(x.reshape(T // LANES, LANES, W), 0, 2))
    np.testing.assert_array_equal(every, np.repeat(x[:LANES, None], LANES, axis=1))
    np.testing.assert_array_equal(shared, np.repeat(x[:, None], LANES, axis=1))
    for collected in (up, down):
        np.testing.assert_allclose(collected, x[:LANES].sum(0) * np.arange(1, LANES + 1)[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, x[:LANES].sum(1)[:, None] * np.arange(1, LANES + 1), rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 0), (1000, 1), (1025, 1024), (1024, 1025)], ids=str)
def test_widen(sizes):
    rng, grid = np.random.default_rng(0), sum(-(-size // 1024) for size in sizes)
    x = {name: rng.standard_normal(max(size, 1)).astype(np.float16) for name, size in zip("ab", sizes, strict=True)}
    outputs = {f"{name}_wide": Array(array.shape, "float32") for name, array in x.items()}
    launch = Launch(widen, grid, ("a", "b"), sizes, outputs, {"BLOCK": 1024})
    made = carry_out(Plan((launch,), tuple(outputs)), x)
    for array, wide, size in zip(x.values(), made, sizes, strict=True):
        np.testing.assert_array_equal(wide[:size], array[:size].astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 65, 70), (2, 64, 128), (1, 8, 72), (1, 1, 130)], ids=str)
def test_transpose(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(carry_out(transposition(*shape, "float32"), {"source": x})[0], np.swapaxes(x, 1, 2))


@triton.jit
def pointwise_kernel(x, size, soft, sig, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < size, other=0.0)
    tl.store(soft + i, softplus(value), mask=i < size)
    tl.store(sig + i, sigmoid(value), mask=i < size)


@pytest.mark.parametrize("width", [1, 2, 8, 32])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
def test_rows(count, width):
    x = np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)
    launch = Launch(rows_kernel, 1, ("x",), (), {"out": Array((count, width), "float32")}, {"T": count, "W": width}, num_warps=1)
    (out,) = carry_out(Plan((launch,), ("out",)), {"x": x})
    np.testing.assert_array_equal(out.astype(np.float32), x + np.arange(count, dtype=np.float32)[:, None] * 1000)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-14)])
def test_softplus_and_sigmoid(dtype, bound):
    """To full relative precision, where log(1 + exp(x)) would give 0 and 1 / (1 + exp(-x)) would overflow."""
    x = np.concatenate([np.linspace(-20, 20, 999), [-100, -87, -30, 0, 30, 88, 89, 100, 1e4]]).astype(dtype)
    soft, sig = Array(x.shape, dtype), Array(x.shape, dtype)
    launch = Launch(pointwise_kernel, -(-x.size // 256), ("x",), (x.size,), {"soft": soft, "sig": sig}, {"BLOCK": 256}, wide=dtype)
    found_soft, found_sig = carry_out(Plan((launch,), ("soft", "sig")), {"x": x})
    exact = x.astype(np.float64)
    truth_soft, truth_sig = np.logaddexp(0, exact), np.exp(-np.logaddexp(0, -exact))
    # exp(x) itself loses |x| ulp to the rounding of x log2(e).
    allowed = bound * np.maximum(1, np.abs(np.minimum(exact, 0)) / 8)
    normal = truth_sig > 1e-37
    assert np.all((np.abs(found_soft - truth_soft) <= allowed * truth_soft)[normal])
    assert np.all((np.abs(found_sig - truth_sig) <= allowed * truth_sig)[normal])


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [1, 5, 256, 300])
def test_sum_leading(count, size):
    source = np.random.default_rng(0).standard_normal((count, size)).astype(np.float32)
    grid = -(-size // 256)
    launch = Launch(sum_leading, grid, ("source",), (count, size), {"total": Array((size,), "float32")}, {"BLOCK": 256})
    (total,) = carry_out(Plan((launch,), ("total",)), {"source": source})
    expected = np.zeros(size, np.float32)
    for row in source:
        expected += row  # in the same order: equal to the last bit
    np.testing.assert_array_equal(total.astype(np.float32), expected)
