"""examples/causal_conv1d.py, an op that doesn't ship, held to what ops that do are held to."""

import json
import math

import numpy as np
import pytest
from common import BACKENDS, DTYPES, FRONTENDS, assert_within, by_name, compare, python, resized
from test_compiling import COMPILER

from bridge import parity
from examples.causal_conv1d import BLOCK, STEPS, causal_conv1d

CASES = causal_conv1d.cases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_parity(case, dtype):
    findings = list(parity.check(causal_conv1d, case, dtype, FRONTENDS, seed=1))
    assert findings
    assert not [f for f in findings if not f.passed]


@pytest.mark.parametrize(("t", "d"), [(1, 1), (STEPS, BLOCK), (STEPS + 1, BLOCK + 1), (3 * STEPS - 1, 2)])
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_sizes_around_a_program(frontend, t, d):
    for k in (1, 16):
        assert_within(compare(frontend, causal_conv1d, resized(CASES[0], t=t, d=d, k=k), "float32", BACKENDS[0]), parity.BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_it_is_the_convolution_of_the_framework(frontend):
    inputs = {name: frontend.array(value, "float64") for name, value in CASES[0].inputs().items()}
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    found = frontend.function(causal_conv1d)(x, weight, bias)
    d, k = weight.shape
    if frontend.name == "torch":
        from torch.nn.functional import conv1d

        expected = conv1d(x.mT, weight[:, None], bias, padding=k - 1, groups=d)[..., : x.shape[1]].mT
    else:
        from jax.lax import conv_general_dilated

        layout = ("NWC", "OIW", "NWC")
        expected = bias + conv_general_dilated(x, weight[:, None], (1,), [(k - 1, 0)], dimension_numbers=layout, feature_group_count=d)
    np.testing.assert_allclose(frontend.numpy(found), frontend.numpy(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_errors_speak_of_its_signature(frontend):
    x, weight = (frontend.array(np.ones(shape), "float32") for shape in ((2, 3, 4), (5, 2)))
    with pytest.raises(ValueError, match=r"causal_conv1d.*weight.*d"):
        frontend.function(causal_conv1d)(x, weight)


def test_it_compiles_for_gpus():
    done = python("tests/compiling.py", "80,90,100", "bfloat16,float64", causal_conv1d.name, CASES[0].name, env=COMPILER)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {c["kernel"].split(".")[1] for c in compiled} == {"convolve", "correlate", "sum_leading"}


def test_flops_count_products_and_sums():
    call = parity.call_of(causal_conv1d, CASES[0], CASES[0].inputs(), "float32")
    products = math.prod(CASES[0].sizes[dim] for dim in "btdk")
    assert causal_conv1d.flops(call) == (2 * products, 4 * products)


def test_as_a_program():
    done = python("examples/causal_conv1d.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ok") == len(done.stdout.splitlines()) > 0
