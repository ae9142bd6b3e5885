"""selective_scan with every pair of its options, sizes and dtypes: each output and gradient against the loop in float64."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from allpairspy import AllPairs
from common import FRONTENDS, KERNELS, assert_within, by_name, compare

from bridge import ops
from bridge.case import Case
from bridge.ops.selective_scan import op as declaration
from bridge.ops.selective_scan.cases import OPTIONAL, sample
from bridge.parity import BOUNDS

SCAN = ops["selective_scan"]
FORMS = ("b t n", "b t g n", "d n")
FACTORS = {
    "n": [1, 3, 8, 16, 17, 64, 256, 300],
    "t": [0, 1, 2, 63, 64, 65, 1000],
    "dtype": list(BOUNDS),
    "s": [None, 1, 4],
    "B": FORMS,
    "C": FORMS,
    "g": [1, 2, 3],
    **{flag: [True, False] for flag in (*OPTIONAL, "delta_softplus")},
}
ROWS = [dict(zip(FACTORS, row, strict=True)) for row in AllPairs(list(FACTORS.values()))]


def test_every_pair_is_there():
    for (one, ones), (other, others) in product(FACTORS.items(), repeat=2):
        if one < other:
            found = {(row[one], row[other]) for row in ROWS}
            assert found == set(product(ones, others)), (one, other)


def case_of(row, gpu):
    n, t = row["n"], row["t"]
    if not gpu:  # the interpreter takes a millisecond a step
        t = min(t, 65 if n < 64 else 9)
    sizes = dict(b=1 if row["s"] else 2, t=t, d=36 if gpu else 6, n=n, g=row["g"]) | ({"s": row["s"]} if row["s"] else {})
    without = tuple(name for name in OPTIONAL if not row[name])
    return Case("pair", sizes, partial(sample, B=row["B"], C=row["C"]), {"delta_softplus": row["delta_softplus"]}, without)


# On a CPU JAX takes seconds to compile a loop of new shapes, and then runs the same kernels: there, some of the rows.
JOBS = [
    pytest.param(frontend, row, id=f"{frontend.name}-{i}")
    for frontend in FRONTENDS
    for i, row in enumerate(ROWS)
    if frontend.gpu or frontend.name == "torch" or i % 8 == 3
]


@pytest.mark.parametrize(("frontend", "row"), JOBS)
def test_pair(frontend, row):
    found = compare(frontend, SCAN, case_of(row, frontend.gpu), row["dtype"], KERNELS, seed=3)
    # What is summed over batch, time or channels can cancel to far less than its terms.
    sums = {name: found.pop(name) for name in list(found) if name in ("dA", "dD", "ddelta_bias", "dB", "dC")}
    assert_within(found, BOUNDS[row["dtype"]])
    assert_within(sums, BOUNDS[row["dtype"]] * (10 if row["t"] < 63 or not frontend.gpu else 1))


@pytest.mark.parametrize(("n", "t"), [(16, 70), (64, 9)])
def test_lanes(n, t, monkeypatch):
    """As a GPU runs it: each channel's states in several lanes, which share out the work on a step. The interpreter has one."""
    monkeypatch.setattr(declaration, "INTERPRETING", False)
    monkeypatch.setattr(declaration, "SHORTEST", 64)
    case = Case("lanes", dict(b=1, t=t, d=19, n=n, g=1), sample, {"delta_softplus": True})
    assert_within(compare(FRONTENDS[-1], SCAN, case, "float32", KERNELS), BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("B", "C"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")])
def test_mixed_dtypes(frontend, x, B, C):
    """Weights in float32, x, B and C each in its own: every array is read in its own dtype, and so is its gradient written."""
    if not frontend.gpu and frontend.name == "jax" and (x, B) != ("bfloat16", "float32"):
        pytest.skip("the same kernels as in torch")
    case = next(c for c in SCAN.cases if c.name == "everything")
    dtypes = {"x": x, "delta": x, "z": x, "B": B, "C": C}
    inputs = {name: frontend.array(value, dtypes.get(name, "float32")) for name, value in case.inputs().items()}
    found = compare(frontend, SCAN, case, "float32", KERNELS, inputs=inputs)
    narrow = {"y", "dx", "ddelta", "dz"} if x != "float32" else set()
    narrow |= {f"d{name}" for name, dtype in (("B", B), ("C", C)) if dtype != "float32"}
    assert_within({name: found[name] for name in narrow}, 1e-2)
    assert_within({name: error for name, error in found.items() if name not in narrow}, BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_frameworks_change_no_dtype(frontend):
    """Neither autocast nor JAX's policies reach into the op: the same bits, in the same dtypes."""
    case = next(c for c in SCAN.cases if c.name == "base")
    inputs = {name: frontend.array(v, "float32" if v.ndim < 3 else "bfloat16") for name, v in case.inputs().items()}
    plain = frontend.function(SCAN)(**inputs, backend=KERNELS)
    if frontend.name == "torch":
        import torch

        with torch.autocast("cuda" if frontend.gpu else "cpu", dtype=torch.bfloat16):
            found = [frontend.function(SCAN)(**inputs, backend=KERNELS)]
    else:
        import jax

        with jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("bfloat16"):
            found = [frontend.function(SCAN)(**inputs, backend=KERNELS), frontend.function(SCAN)(**inputs, backend="reference")]
    for other in found:
        assert other.dtype == plain.dtype
    np.testing.assert_array_equal(frontend.bits(found[0]), frontend.bits(plain))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_extremes(frontend, backend):
    """Finite for finite inputs whose exact result is: delta from -100 to 100 before softplus, |A| delta up to 1e4."""
    rng = np.random.default_rng(0)
    t, d, n = 24, 5, 3
    delta = np.linspace(-100, 100, t * d).reshape(1, t, d)
    inputs = {"x": rng.standard_normal((1, t, d)), "delta": delta, "A": -np.exp(rng.uniform(-5, np.log(100), (d, n)))}
    inputs |= {"B": rng.standard_normal((1, t, n)), "C": rng.standard_normal((1, t, n))}
    case = Case("extremes", dict(b=1, t=t, d=d, n=n), lambda rng, case: inputs, {"delta_softplus": True})
    assert_within(compare(frontend, SCAN, case, "float32", backend), BOUNDS["float32"])
    # Growth beyond all numbers, of a state that is zero: the first step from a zero state, and steps whose input is zero.
    x = np.zeros((1, t, d))
    x[:, -1] = 1.0
    growing = inputs | {"A": -inputs["A"] - 50, "x": x, "delta": np.full((1, t, d), 20.0)}
    growing["A"] = np.abs(growing["A"])
    case = Case("growing", dict(b=1, t=t, d=d, n=n), lambda rng, case: growing, {})
    arrays = {name: frontend.array(value, "float32") for name, value in growing.items()}
    y = frontend.numpy(frontend.function(SCAN)(**arrays, backend=backend))
    expected = np.zeros((1, t, d))
    expected[:, -1] = 20.0 * (inputs["B"] * inputs["C"]).sum(-1)[:, -1:]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_gradients_of_a_first_step_that_grows(frontend, backend):
    """A |delta| = 1e4 of either sign, from a zero state: what comes out doesn't depend on A, and dA is zero."""
    rng = np.random.default_rng(1)
    values = {"x": rng.standard_normal((1, 1, 4)), "delta": np.full((1, 1, 4), 100.0), "A": np.tile([100.0, -100.0, 1.0], (4, 1))}
    values |= {"B": rng.standard_normal((1, 1, 3)), "C": 10 + rng.standard_normal((1, 1, 3))}
    case = Case("one step", dict(b=1, t=1, d=4, n=3), lambda rng, case: values, {})
    inputs = {name: frontend.array(value, "float32") for name, value in values.items()}
    dy = [frontend.array(10 * rng.standard_normal((1, 1, 4)), "float32"), frontend.array(np.zeros((1, 4, 3)), "float32")]
    _, found = frontend.run(SCAN, inputs, case.options, dy, backend)
    B, C, x, g = values["B"], values["C"], values["x"], frontend.numpy(dy[0])
    expected = {"A": np.zeros((4, 3)), "x": 100 * g * (B * C).sum(-1), "B": 100 * C * (g * x).sum(-1), "C": 100 * B * (g * x).sum(-1)}
    for name, value in {**expected, "delta": g * x * (B * C).sum(-1)}.items():
        np.testing.assert_allclose(frontend.numpy(found[name]), value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_gates_of_any_size(frontend, backend):
    """Of z beyond where exp(-z) is a number, too."""
    rng = np.random.default_rng(2)
    b, t, d, n = 1, 3, 6, 2
    values = {"x": rng.standard_normal((b, t, d)), "delta": rng.random((b, t, d)), "A": -rng.random((d, n))}
    values |= {name: rng.standard_normal((b, t, n)) for name in "BC"}
    values |= {"z": np.broadcast_to([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0], (b, t, d)).copy()}
    case = Case("gates", dict(b=b, t=t, d=d, n=n), lambda rng, case: values, {})
    assert_within(compare(frontend, SCAN, case, "float32", backend), BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_growth_over_a_chunk_beyond_all_numbers(frontend, backend):
    """A tiny state that grows to an ordinary one: what hundreds of steps multiply it by is no number of float32."""
    t, d, n = 300, 1, 1
    zero, one = np.zeros((1, t, d)), np.ones((1, t, d))
    step = np.full((1, t, d), 0.36)
    values = {"x": zero, "delta": step, "A": np.ones((d, n)), "B": one, "C": one, "initial_state": np.full((1, d, n), 1e-37)}
    y = frontend.numpy(frontend.function(SCAN)(**{k: frontend.array(v, "float32") for k, v in values.items()}, backend=backend))
    expected = np.float64(np.float32(1e-37)) * np.exp(np.float64(np.float32(0.36)) * np.arange(1, t + 1))
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=1e-3)  # an exponent of 100 has lost some digits


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_nan_stays_where_it_is(frontend, backend):
    """A NaN reaches what depends on it, and nothing else: its channel, from its step on."""
    case = next(c for c in SCAN.cases if c.name == "base")
    for name in ("x", "delta", "A"):
        values = case.inputs()
        at = (1, 7, 3) if name != "A" else (3, 2)
        values[name][at] = np.nan
        y = frontend.numpy(frontend.function(SCAN)(**{k: frontend.array(v, "float32") for k, v in values.items()}, backend=backend))
        expected = np.zeros(y.shape, bool)
        expected[(1, slice(7, None), 3) if name != "A" else (slice(None), slice(None), 3)] = True
        np.testing.assert_array_equal(np.isnan(y), expected)
