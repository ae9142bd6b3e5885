"""Any sizes: random ones, ragged ones, empty ones; and inputs that don't lie contiguous."""

import numpy as np
import pytest
from common import BACKENDS, FRONTENDS, KERNELS, OPS, arrays, assert_within, by_name, compare, resized
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import ops
from bridge.parity import BOUNDS

SCAN = next(c for c in ops["selective_scan"].cases if c.name == "everything")
TORCH = [f for f in FRONTENDS if f.name == "torch"]
# A new shape costs JAX a compilation, and torch next to nothing.
EXAMPLES = {"torch": 20, "jax": 4}


@st.composite
def scan_calls(draw):
    sizes = dict(b=draw(st.integers(0, 3)), t=draw(st.integers(0, 12)), d=draw(st.integers(0, 35)), n=draw(st.integers(0, 20)))
    without = draw(st.sets(st.sampled_from(["D", "z", "delta_bias", "initial_state"])))
    options = {"delta_softplus": draw(st.booleans())}
    case = resized(SCAN, **sizes)
    return type(case)("random", case.sizes, case.sample, options, tuple(sorted(without)))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_random_scans(frontend):
    @settings(max_examples=EXAMPLES[frontend.name])
    @given(case=scan_calls(), dtype=st.sampled_from(list(BOUNDS)), seed=st.integers(0, 1000))
    def check(case, dtype, seed):
        found = compare(frontend, ops["selective_scan"], case, dtype, KERNELS, seed)
        # Of one or a few channels, a sum over batch and time can cancel to far less than its terms; of few steps, others too.
        some = case.sizes["b"] * case.sizes["t"] * min(case.sizes["d"], case.sizes["n"]) < 32
        sums = {name: found.pop(name) for name in list(found) if some or name in ("dA", "dD", "ddelta_bias")}
        assert_within(found, BOUNDS[dtype] * 2)
        assert_within(sums, BOUNDS[dtype] * 20)

    check()


@st.composite
def sinkhorn_calls(draw):
    leading = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    options = dict(
        iters=draw(st.integers(0, 23)),
        eps=draw(st.sampled_from([0.0, 1e-6, 1e-2])),
        order=draw(st.sampled_from(["col_row", "row_col"])),
        gradient=draw(st.sampled_from(["unrolled", "implicit"])),
    )
    if options["gradient"] == "implicit":  # of a fixed point: the loop must have come near it
        options["iters"] = max(options["iters"], 20)
    case = resized(ops["sinkhorn"].cases[0], **{"...": leading, "n": draw(st.integers(2, 20))})
    return type(case)("random", case.sizes, case.sample, options, case.without)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_random_sinkhorns(frontend):
    @settings(max_examples=EXAMPLES[frontend.name])
    @given(case=sinkhorn_calls(), dtype=st.sampled_from(list(BOUNDS)), seed=st.integers(0, 1000))
    def check(case, dtype, seed):
        found = compare(frontend, ops["sinkhorn"], case, dtype, KERNELS, seed)
        # R dR less its projections: of one small matrix, that can cancel to far less than its terms.
        few = np.prod(case.sizes["..."]) * case.sizes["n"] ** 2 < 32
        assert_within({"R": found["R"]}, BOUNDS[dtype])
        assert_within({"dlogits": found["dlogits"]}, BOUNDS[dtype] * (100 if few else 4))

    check()


EMPTY_SCANS = [dict(b=0), dict(t=0), dict(d=0), dict(n=0), dict(t=0, n=0), dict(b=0, t=0, d=0, n=0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("sizes", EMPTY_SCANS, ids=str)
def test_empty_scans(frontend, backend, sizes):
    """Empty inputs give empty outputs, and zero gradients for what was summed over nothing."""
    case = resized(SCAN, b=2, t=3, d=4, n=5)
    case = resized(case, **sizes)
    assert_within(compare(frontend, ops["selective_scan"], case, "float32", backend), BOUNDS["float32"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)], ids=str)
def test_no_matrices(frontend, backend, leading):
    for op in (op for op in OPS if "n" in op.limits):
        case = resized(op.cases[0], **{"...": leading, "n": 4})
        assert_within(compare(frontend, op, case, "float32", backend), BOUNDS["float32"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_no_leading_dimensions(frontend, backend):
    for op in (op for op in OPS if "n" in op.limits):
        case = resized(op.cases[0], **{"...": (), "n": 3})
        assert_within(compare(frontend, op, case, "float32", backend), BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("n", [17, 33, 64, 100])
def test_many_states(frontend, n):
    """More states than one warp holds."""
    case = resized(ops["selective_scan"].cases[0], b=1, t=5, d=18, n=n)
    assert_within(compare(frontend, ops["selective_scan"], case, "float32", KERNELS), BOUNDS["float32"])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("name", ["base", "everything"])
def test_time_in_chunks(frontend, name, monkeypatch):
    """Cut into chunks, the scan gives what it gives in one piece."""
    from bridge.ops.selective_scan import op as declaration

    monkeypatch.setattr(declaration, "SHORTEST", 32)
    found = next(c for c in ops["selective_scan"].cases if c.name == name)
    case = resized(found, b=1, t=150, d=3, n=2)
    call_layout = declaration.Layout(1, 150, 3, 2)
    assert call_layout.chunks == 3
    assert_within(compare(frontend, ops["selective_scan"], case, "float32", KERNELS), BOUNDS["float32"])


@pytest.mark.skipif(not TORCH, reason="JAX arrays have no strides")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS, ids=by_name)
@settings(max_examples=4)
@given(data=st.data())
def test_strided_tensors(op, backend, data):
    """Transposed, sliced, expanded and misaligned inputs give what their contiguous copies give."""
    import torch

    case = op.cases[0]
    plain = arrays(TORCH[0], case, "float32")
    strided = {}
    for name, x in plain.items():
        kind = data.draw(st.sampled_from(["transposed", "sliced", "misaligned"]), label=name)
        if kind == "transposed":
            strided[name] = x.movedim(0, -1).contiguous().movedim(-1, 0)
        elif kind == "sliced":
            strided[name] = torch.stack([x, x + 1], -1)[..., 0]
        else:
            flat = torch.cat([x.new_zeros(1), x.flatten()])
            strided[name] = flat[1:].view(x.shape)
        assert torch.equal(strided[name], x)
    found = compare(TORCH[0], op, case, "float32", backend, inputs=strided)
    assert_within(found, BOUNDS["float32"])


def test_expanded_tensors():
    if not TORCH:
        pytest.skip("JAX arrays have no strides")
    import torch_ops

    case = resized(ops["selective_scan"].cases[0], b=3)
    x = arrays(TORCH[0], case, "float32")
    x = {name: v[:1].expand(v.shape) if v.shape[0] == 3 else v for name, v in x.items()}
    found = torch_ops.selective_scan(**x, backend=KERNELS)
    np.testing.assert_array_equal(found[0].cpu(), found[2].cpu())
