"""sinkhorn and mhc_bwd over matrices of every scale: the error of single matrices, not of a batch; masks; NaN; bits."""

import dataclasses

import numpy as np
import pytest
from common import BACKENDS, FRONTENDS, KERNELS, by_name, carry_out
from test_references import mhc_bwd as exact_implicit

from bridge import ops
from bridge.plan import power_of_two
from bridge.signature import Given

SINKHORN, MHC_BWD = ops["sinkhorn"], ops["mhc_bwd"]
FIRST = FRONTENDS[0]
COUNTS = {2: 512, 3: 512, 4: 512, 5: 256, 8: 256, 16: 32, 33: 4}  # matrices of each scale
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 100.0, 1e4)  # standard deviations of logits
LOOPS = [("col_row", 0.0), ("row_col", 0.0), ("row_col", 1e-6), ("col_row", 1e-6)]
GRID = [(n, *each) for n in COUNTS for each in (LOOPS if n in (3, 4) else LOOPS[::2])]
INF = np.inf


def draw(n, scales=SCALES, count=None, seed=0):
    """Logits, and gradients of R: count matrices of each scale, one after another."""
    count = count or COUNTS[n]
    rng = np.random.default_rng((n, seed))
    normal = rng.standard_normal((len(scales), count, n, n))
    logits = normal * np.reshape(scales, (-1, 1, 1, 1))
    return logits.reshape(-1, n, n).astype("float32"), rng.standard_normal((len(scales) * count, n, n)).astype("float32")


def run(op, arrays, backward=False, **options):
    """The kernels of a plan. In the interpreter, many programs take long and large ones don't: all matrices go in one."""
    call = op.call([Given(x.shape, x.dtype.name, "") for x in arrays.values()], [options.get(k, o.default) for k, o in op.options.items()])
    plan = op.forward_plan(call, False)
    inputs = dict(arrays)
    if backward:
        (cotangent,) = backward
        plan, inputs = op.backward_plan(call, tuple(arrays)), {**arrays, "dR": cotangent}
    if KERNELS == "interpret":
        size = power_of_two(len(next(iter(arrays.values()))))
        one = tuple(dataclasses.replace(x, grid=1, constants={**x.constants, "S": size}) for x in plan.launches)
        plan = dataclasses.replace(plan, launches=one)
    return carry_out(plan, inputs)[0].astype("float64")


def loop(logits, dR, **options):
    """R and dlogits by the framework's own derivative of the loop, in float64."""
    x, g = FIRST.array(logits, "float64"), FIRST.array(dR, "float64")
    (R,), gradients = FIRST.run_reference(SINKHORN, {"logits": x}, options, [g])
    return FIRST.numpy(R), FIRST.numpy(gradients["logits"])


def norms(x):
    return np.linalg.norm(np.reshape(x, (len(x), -1)), axis=1)


def percentile(errors, scales=SCALES):
    """Of each scale the 99th, which fewer than 100 matrices don't have: then it is the largest."""
    return dict(zip(scales, np.quantile(errors.reshape(len(scales), -1), 0.99, axis=1, method="higher"), strict=True))


@pytest.mark.parametrize(("n", "order", "eps"), GRID)
def test_unrolled_gradient(n, order, eps):
    logits, dR = draw(n)
    R, truth = loop(logits, dR, order=order, eps=eps)
    assert np.abs(run(SINKHORN, {"logits": logits}, order=order, eps=eps) - R).max() <= 1e-4
    found = run(SINKHORN, {"logits": logits}, [dR], order=order, eps=eps)
    assert np.isfinite(found).all()
    errors = norms(found - truth)
    worst = percentile(errors / np.maximum(norms(truth), 1e-300))
    assert all(worst[s] <= (3e-6 if s <= 8 else 1e-5) for s in SCALES if s <= 16), worst
    # Beyond, the gradient itself is next to nothing: beside the terms that cancel in it, the error is.
    assert all(error <= 2e-5 for error in percentile(errors / np.maximum(norms(R * dR), 1e-300)).values())


@pytest.mark.parametrize("n", COUNTS)
def test_implicit_gradient(n):
    logits, dR = draw(n, count=64 if n == 8 else 16 if n == 16 else 2 if n == 33 else None)
    R = run(SINKHORN, {"logits": logits}).astype("float32")
    exact = FIRST.reference(MHC_BWD)(FIRST.array(R, "float64"), FIRST.array(dR, "float64"))
    truth = FIRST.numpy(exact)
    found = run(MHC_BWD, {"out": R, "dout": dR})
    errors, size = norms(found - truth), norms(R * dR)
    worst = percentile(errors / np.maximum(norms(truth), 1e-300))
    assert all(worst[s] <= 2e-6 for s in SCALES if s <= 4), worst
    assert (errors <= 1e-6 * size).all()
    for axis in (1, 2):
        assert (np.abs(found.sum(axis)).max(1) <= 1e-6 * size).all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("n", [7, 9, 16, 17, 31, 64])
def test_implicit_gradient_of_other_sizes(n, dtype, bound):
    """Where rows of a matrix are in several lanes, and where the last have none."""
    logits, dR = draw(n, (0.5, 2.0, 4.0, 8.0), 2)
    R, dR = run(SINKHORN, {"logits": logits}).astype(dtype), dR.astype(dtype)
    (truth,) = exact_implicit(R.astype("float64"), dR.astype("float64"))
    found = run(MHC_BWD, {"out": R, "dout": dR})
    assert (norms(found - truth) <= bound * norms(truth)).all()


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize(("order", "eps"), LOOPS[2:])
def test_through_the_frontends(frontend, order, eps):
    """The same by the frontends' own functions."""
    scales = (1.0, 8.0, 1e4)
    logits, dR = draw(3, scales, 20)
    R, truth = loop(logits, dR, order=order, eps=eps)
    x, g = frontend.array(logits, "float32"), frontend.array(dR, "float32")
    (found,), gradients = frontend.run(SINKHORN, {"logits": x}, {"order": order, "eps": eps}, [g], KERNELS)
    assert np.abs(frontend.numpy(found) - R).max() <= 1e-4
    errors = norms(frontend.numpy(gradients["logits"]) - truth)
    assert max(errors[:40] / norms(truth)[:40]) <= 3e-6
    assert max(errors) <= 2e-5


@pytest.mark.parametrize(
    ("n", "iters", "which"), [(1, 7, 2), (4, 1, 3), (4, 2, 2), (4, 13, 3), (4, 70, 0), (8, 23, 2), (16, 31, 1), (64, 11, 0)]
)
def test_iterations(n, iters, which):
    """Few and many, prime numbers of them, and so many that u and v could overflow."""
    order, eps = LOOPS[which]
    logits, dR = draw(n, (1.0, 8.0), 4 if n < 64 else 1)
    R, truth = loop(logits, dR, order=order, eps=eps, iters=iters)
    assert np.abs(run(SINKHORN, {"logits": logits}, order=order, eps=eps, iters=iters) - R).max() <= 2e-6
    errors = norms(run(SINKHORN, {"logits": logits}, [dR], order=order, eps=eps, iters=iters) - truth)
    assert (errors <= 3e-6 * norms(truth) + 1e-7).all()


def test_what_eps_lets_grow():
    """In order "col_row", rows far below eps come up to it: logits of hundreds, of both signs."""
    logits, dR = draw(3, (70.0, 100.0, 200.0, 400.0), 512)
    R, truth = loop(logits, dR, eps=1e-6)
    assert np.abs(run(SINKHORN, {"logits": logits}, eps=1e-6) - R).max() <= 1e-5
    assert (norms(run(SINKHORN, {"logits": logits}, [dR], eps=1e-6) - truth) <= 1e-6 * norms(R * dR) + 1e-30).all()


def test_what_grows_without_support():
    """Two rows that have the same column and no other: one's u doubles in every iteration, beyond what float32 holds."""
    logits, dR = draw(4, (1.0,), 3)
    logits[:, :2, 1:] = -INF
    R, truth = loop(logits, dR, iters=140)
    assert np.abs(run(SINKHORN, {"logits": logits}, iters=140) - R).max() <= 2e-6
    assert (norms(run(SINKHORN, {"logits": logits}, [dR], iters=140) - truth) <= 3e-6 * norms(R * dR)).all()


def test_as_elsewhere():
    """The test of the kernel that mhc_bwd is named after: against its conjugate gradients, which take sums of 1 for granted."""
    rng = np.random.default_rng(0)
    for tokens in (256, 4096, 65536):
        M, dR = rng.uniform(0, 4, (tokens, 4, 4)).astype("float32"), rng.standard_normal((tokens, 4, 4)).astype("float32")
        R = run(SINKHORN, {"logits": M})
        E = R * dR
        x, residual = np.zeros((tokens, 8)), np.concatenate([E.sum(2), E.sum(1)], 1)
        direction, norm = residual, (residual**2).sum(1, keepdims=True)
        for _ in range(8):
            u, v = direction[:, :4, None], direction[:, None, 4:]
            image = direction + np.concatenate([(R * v).sum(2), (R * u).sum(1)], 1)
            alpha = norm / ((direction * image).sum(1, keepdims=True) + 1e-10)
            x, residual = x + alpha * direction, residual - alpha * image
            before, norm = norm, (residual**2).sum(1, keepdims=True)
            direction = residual + norm / (before + 1e-10) * direction
        formula = R * (dR - x[:, :4, None] - x[:, None, 4:])
        np.testing.assert_allclose(run(MHC_BWD, {"out": R.astype("float32"), "dout": dR}), formula, rtol=1e-4, atol=1e-4)


def hard(n):
    """Matrices that the implicit gradient could stumble over: near permutations, in blocks, without total support, zero."""
    rng = np.random.default_rng(n)
    R = np.empty((6, n, n))
    R[0] = np.eye(n) + 1e-12 * rng.random((n, n))
    R[1] = np.eye(n)
    R[2] = rng.random((n, n)) * (np.arange(n) // 2 == np.arange(n)[:, None] // 2)
    R[3] = np.tril(rng.random((n, n)))
    R[4] = rng.random((n, n)) * (np.arange(n) != 1)[:, None]
    R[5] = 0
    return R.astype("float32"), rng.standard_normal((6, n, n)).astype("float32")


@pytest.mark.parametrize("n", [2, 3, 4, 8, 9, 16])
def test_implicit_gradient_of_what_is_singular(n):
    """The answer of least norm, and exactly homogeneous."""
    R, dR = hard(n)
    (truth,) = exact_implicit(R.astype("float64"), dR.astype("float64"))
    found = run(MHC_BWD, {"out": R, "dout": dR})
    assert (norms(found - truth) <= 1e-6 * norms(R * dR)).all()
    for factor in (2.0**-40, 2.0**40, 2.0**124):
        np.testing.assert_array_equal(run(MHC_BWD, {"out": R, "dout": dR * np.float32(factor)}), found * factor)
    # Of a dR without a single normal number digits are lost, and nothing else.
    faint = run(MHC_BWD, {"out": R, "dout": dR * np.float32(2.0**-130)})
    np.testing.assert_allclose(faint.astype("float64") * 2.0**130, truth, atol=1e-5 * np.abs(truth).max(), rtol=0)
    for backend in BACKENDS:
        made = FIRST.function(MHC_BWD)(FIRST.array(R, "float32"), FIRST.array(dR, "float32"), backend=backend)
        assert (norms(FIRST.numpy(made) - truth) <= 1e-6 * norms(R * dR)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_implicit_gradient_near_a_permutation_in_float64(backend):
    """It has a limit, which entries of R beside the permutation don't change, however small they are."""
    rng = np.random.default_rng(0)
    noise, dR = rng.random((4, 4)), rng.standard_normal((4, 4))
    np.fill_diagonal(noise, 0)

    def found(e):
        made = FIRST.function(MHC_BWD)(FIRST.array(np.eye(4) + e * noise, "float64"), FIRST.array(dR, "float64"), backend=backend)
        return FIRST.numpy(made) / e

    np.testing.assert_allclose(found(1e-150), found(1e-20), rtol=1e-9)


def masked(n):
    """An entry, a triangle, all but a diagonal, a row, a column, everything; and a gradient."""
    rng = np.random.default_rng(n)
    logits = rng.standard_normal((7, n, n))
    logits[1, 0, 1] = -INF
    logits[2][np.triu_indices(n, 1)] = -INF
    logits[3][~np.eye(n, dtype=bool)] = -INF
    logits[4, 1] = -INF
    logits[5, :, 0] = -INF
    logits[6] = -INF
    return logits, rng.standard_normal(logits.shape)


def plain(logits, order, eps, iters=20):
    """The loop on numbers, where 0/0 is 0."""

    def divide(x, axis):
        total = x.sum(axis, keepdims=True) + eps
        return np.divide(x, total, out=np.zeros_like(x), where=total > 0)

    R = np.exp(logits)
    if order == "row_col":
        total = R.sum(-1, keepdims=True)
        R = divide(np.divide(R, total, out=np.zeros_like(R), where=total > 0) + eps, -2)
        for _ in range(iters - 1):
            R = divide(divide(R, -1), -2)
    else:
        for _ in range(iters):
            R = divide(divide(R, -2), -1)
    return R


# JAX compiles each anew.
MASKED = [(f, n, *each) for f in FRONTENDS for n in (3, 4) for each in LOOPS if f.name == "torch" or n == 4]
MASKED.append((FIRST, 9, *LOOPS[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("frontend", "n", "order", "eps"), MASKED, ids=by_name)
def test_masks(frontend, n, order, eps, backend):
    """Logits of -inf are entries of 0, with a gradient of 0; what is masked altogether stays 0 in every division."""
    logits, dR = masked(n)
    x, g = frontend.array(logits, "float32"), frontend.array(dR, "float32")
    truth = loop(logits, dR, order=order, eps=eps)[1]
    for gradient in ("unrolled", "implicit"):
        (R,), gradients = frontend.run(SINKHORN, {"logits": x}, {"order": order, "eps": eps, "gradient": gradient}, [g], backend)
        found = frontend.numpy(gradients["logits"])
        np.testing.assert_allclose(frontend.numpy(R), plain(logits, order, eps), atol=1e-6)
        assert np.isfinite(found).all()
        assert not found[logits == -INF].any()
        if gradient == "unrolled":
            np.testing.assert_allclose(found, truth, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_nan_stays_in_its_matrix(gradient, frontend, backend):
    for n, (order, eps) in zip((4, 5, 16), LOOPS[1:], strict=True) if frontend.name == "torch" else [(4, LOOPS[2])]:
        logits, dR = draw(n, (1.0,), 5)
        logits[1, 1, 0] = np.nan
        logits[2, 0, 1] = INF
        dR[3, 1, 1] = np.nan
        x, g = frontend.array(logits, "float32"), frontend.array(dR, "float32")
        (R,), gradients = frontend.run(SINKHORN, {"logits": x}, {"order": order, "eps": eps, "gradient": gradient}, [g], backend)
        assert np.isnan(frontend.numpy(R)).all((1, 2)).tolist() == [False, True, True, False, False]
        assert np.isnan(frontend.numpy(gradients["logits"])).any((1, 2)).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_gradient_of_a_matrix_alone(n, gradient):
    """The same bits alone as among others."""
    logits, dR = draw(n, (4.0,), 34 if n < 16 else 3)  # more than a program's
    options = {"gradient": gradient, "order": "row_col", "eps": 1e-6}

    def bits(part):
        inputs = {"logits": FIRST.array(logits[part], "float32")}
        outputs, gradients = FIRST.run(SINKHORN, inputs, options, [FIRST.array(dR[part], "float32")], KERNELS)
        return FIRST.bits(outputs[0]), FIRST.bits(gradients["logits"])

    together = bits(slice(None))
    for i in (0, len(logits) - 1):
        for one, all_ in zip(bits(i), together, strict=True):
            np.testing.assert_array_equal(one, all_[i])
