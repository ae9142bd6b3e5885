"""What is particular to sinkhorn: the implicit gradient, the sums, and the names from elsewhere."""

import importlib

import numpy as np
import pytest
from common import BACKENDS, FRONTENDS, KERNELS, by_name
from test_references import mhc_bwd as exact_implicit
from test_references import sinkhorn as plain_sinkhorn

from bridge import ops

SINKHORN, MHC_BWD = ops["sinkhorn"], ops["mhc_bwd"]


def drawn(n, deviation, count=40, seed=0):
    rng = np.random.default_rng((n, seed))
    return deviation * rng.standard_normal((count, n, n)), rng.standard_normal((count, n, n))


def relative(found, truth):
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("n", [3, 4, 16])
def test_implicit_gradient(n, frontend, backend):
    """Within 2e-6 of the exact solution, in float64, of its own system: that of the R that the forward pass returned."""
    logits, dR = drawn(n, 1.0, count=40 if n < 16 else 5)
    x, g = frontend.array(logits, "float32"), frontend.array(dR, "float32")
    (R,), gradients = frontend.run(SINKHORN, {"logits": x}, {"gradient": "implicit"}, [g], backend)
    (truth,) = exact_implicit(frontend.numpy(R), frontend.numpy(g))
    found = frontend.numpy(gradients["logits"])
    assert relative(found, truth) <= 2e-6
    assert np.abs(found.sum(-1)).max() <= 1e-5
    assert np.abs(found.sum(-2)).max() <= 1e-5
    direct = frontend.numpy(frontend.function(MHC_BWD)(R, g, backend=backend))
    np.testing.assert_array_equal(direct, found) if backend == KERNELS else np.testing.assert_allclose(direct, found, atol=1e-5)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("cg_iters", [None, 8])
def test_linear_in_dout(frontend, cg_iters):
    """A power of two as a factor gives the same bits, however small: a mean loss has gradients of 1e-6 and less."""
    logits, dR = drawn(4, 1.0)
    (R,) = plain_sinkhorn(logits)
    function = frontend.function(MHC_BWD)

    def scaled(factor):
        made = function(frontend.array(R, "float32"), frontend.array(dR * factor, "float32"), cg_iters=cg_iters, backend=KERNELS)
        return frontend.numpy(made) / factor

    for factor in (2.0**-40, 2.0**-20, 2.0**40):
        np.testing.assert_array_equal(scaled(factor), scaled(1.0))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_names_from_elsewhere(frontend):
    """sinkhorn_forward(M) and mhc_bwd(R, dR) as other kernels have them: M uniform in [0, 4], 20 iterations, dR normal."""
    package = importlib.import_module(f"{frontend.name}_ops")
    rng = np.random.default_rng(0)
    M, dR = rng.uniform(0, 4, (64, 4, 4)), rng.standard_normal((64, 4, 4))
    R, P = package.sinkhorn_forward(frontend.array(M, "float32"), iters=20)
    (truth,) = plain_sinkhorn(M)
    assert relative(frontend.numpy(R), truth) <= 1e-6
    assert relative(frontend.numpy(P), np.exp(M)) <= 1e-6
    dM = frontend.numpy(package.mhc_bwd(R, frontend.array(dR, "float32")))
    (exact,) = exact_implicit(frontend.numpy(R), dR)
    assert np.abs(dM - exact).max() <= 1e-4


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_doubly_stochastic(frontend):
    logits, _ = drawn(5, 1.0)
    R = frontend.numpy(frontend.function(SINKHORN)(frontend.array(logits, "float32"), iters=60, backend=KERNELS))
    assert np.abs(R.sum(-1) - 1).max() <= 1e-6
    assert np.abs(R.sum(-2) - 1).max() <= 1e-6


@pytest.mark.parametrize("n", [1, 2, 7, 17, 32, 48, 64])
def test_every_size_has_a_kernel(n):
    frontend = FRONTENDS[0]
    logits, dR = drawn(n, 1.0, count=3)
    for gradient in ("unrolled", "implicit"):
        options = {"gradient": gradient}
        x, g = frontend.array(logits, "float32"), frontend.array(dR, "float32")
        (R,), found = frontend.run(SINKHORN, {"logits": x}, options, [g], KERNELS)
        exact = frontend.array(frontend.numpy(x), "float64"), frontend.array(frontend.numpy(g), "float64")
        (truth,), gradients = frontend.run_reference(SINKHORN, {"logits": exact[0]}, options, [exact[1]])
        assert relative(frontend.numpy(R), frontend.numpy(truth)) <= 1e-6
        wanted, size = frontend.numpy(gradients["logits"]), np.linalg.norm(frontend.numpy(R) * dR)
        assert np.linalg.norm(frontend.numpy(found["logits"]) - wanted) <= 2e-6 * max(np.linalg.norm(wanted), 0.1 * size)
