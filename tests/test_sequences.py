"""Sequences that are packed, continued, or taken step by step give what they give whole and alone."""

from itertools import pairwise

import numpy as np
import pytest
from common import BACKENDS, FRONTENDS, KERNELS, arrays, by_name, resized

from bridge import ops
from bridge.ops.selective_scan import op as declaration

SCAN, STEP = ops["selective_scan"], ops["selective_scan_step"]
PACKED = next(c for c in SCAN.cases if c.name == "packed")
EVERYTHING = next(c for c in SCAN.cases if c.name == "everything")
CUTS = {
    "ragged": [0, 3, 3, 8, 75, 100],
    "empty ends": [0, 0, 9, 10, 10, 10],
    "one": [0, 17],
    "nothing": [0, 0, 0],
    "single steps": [0, 1, 2, 3],
}


@pytest.fixture(params=FRONTENDS, ids=by_name)
def frontend(request):
    return request.param


def gradients(frontend, function, values, weights):
    """The gradients of <outputs, weights> with respect to all floating-point values, and the outputs."""

    def outputs(values):
        made = function(values)
        return made if isinstance(made, (tuple, list)) else (made,)

    if frontend.name == "torch":
        import torch

        leaves = {k: v.detach().requires_grad_() if v.is_floating_point() else v for k, v in values.items()}
        made = outputs(leaves)
        loss = sum((o * w).sum() for o, w in zip(made, weights, strict=True))
        floats = [k for k, v in leaves.items() if v.is_floating_point()]
        found = torch.autograd.grad(loss, [leaves[k] for k in floats], allow_unused=True, materialize_grads=True)
        return [o.detach() for o in made], dict(zip(floats, found, strict=True))
    import jax
    import jax.numpy as jnp

    floats = {k: v for k, v in values.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def loss(floats, values):
        made = outputs({**values, **floats})
        return sum((o * w).sum() for o, w in zip(made, weights, strict=True)), made

    found, made = jax.jit(jax.grad(loss, has_aux=True))(floats, values)
    return made, found


def normal(frontend, *shape, seed=0):
    return frontend.array(np.random.default_rng((seed, *shape)).standard_normal(shape), "float32")


def assert_close(frontend, found, expected, atol=2e-6):
    assert found.keys() == expected.keys()
    for name in found:
        one, other = frontend.numpy(found[name]), frontend.numpy(expected[name])
        np.testing.assert_allclose(one, other, rtol=0, atol=atol * max(np.abs(other).max(initial=0), 1), err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_packed_is_separate(frontend, backend, cuts, monkeypatch):
    """A packed call equals a call for each sequence: outputs, states, and every gradient."""
    monkeypatch.setattr(declaration, "SHORTEST", 32)  # the long one is cut into chunks
    t, s = cuts[-1], len(cuts) - 1
    case = resized(PACKED, t=t, s=s)
    values = case.inputs() | {"cu_seqlens": np.array(cuts, np.int64)}
    if frontend.name == "jax":
        import jax.numpy as jnp

        values["cu_seqlens"] = values["cu_seqlens"].astype(jnp.asarray(cuts).dtype)
    given = {k: frontend.array(v, "float32" if v.dtype.kind == "f" else v.dtype.name) for k, v in values.items()}
    function = frontend.function(SCAN)
    weights = normal(frontend, 1, t, case.sizes["d"]), normal(frontend, s, case.sizes["d"], case.sizes["n"])

    def packed(values):
        return function(**values, **case.options, return_final_state=True, backend=backend)

    def separate(values):
        import importlib

        xp = importlib.import_module("torch" if frontend.name == "torch" else "jax.numpy")
        ys, states = [], []
        for i, (low, high) in enumerate(pairwise(cuts)):
            part = {k: v[:, low:high] if v.ndim > 2 and k != "initial_state" else v for k, v in values.items() if k != "cu_seqlens"}
            part["initial_state"] = values["initial_state"][i : i + 1]
            y, state = function(**part, **case.options, return_final_state=True, backend=backend)
            ys.append(y)
            states.append(state)
        return xp.concatenate(ys, 1), xp.concatenate(states, 0)

    (outputs, found), (expected_outputs, expected) = (gradients(frontend, f, given, weights) for f in (packed, separate))
    assert_close(frontend, dict(enumerate(outputs)), dict(enumerate(expected_outputs)))
    assert_close(frontend, found, expected, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[1, 4, 23], [0, 9, 5, 23], [0, 4, 22], [0, 4, 24], [0, -1, 23]], ids=str)
def test_cuts_that_make_no_sense(frontend, backend, cuts):
    """An error where they can be read, NaN where they can't be: never a number that looks right."""
    s = len(cuts) - 1
    case = resized(PACKED, s=s)
    given = arrays(frontend, case, "float32") | {"cu_seqlens": frontend.array(np.array(cuts), "int32")}
    function = frontend.function(SCAN)
    if not frontend.gpu:
        with pytest.raises(ValueError, match=r"selective_scan: cu_seqlens must rise from 0 to t = 23 \(set by x\), never falling, got"):
            function(**given, **case.options, backend=backend)
    if frontend.name == "torch" and not frontend.gpu:
        return  # always readable

    def call(values):
        return function(**values, **case.options, return_final_state=True, backend=backend)

    weights = normal(frontend, 1, 23, 10), normal(frontend, s, 10, 4)
    outputs, found = gradients(frontend, call, given, weights)
    for array in (*outputs, found["delta"], found["C"], found["initial_state"]):
        assert np.isnan(frontend.numpy(array)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [0, 1, 8, 13, 21])
def test_continued_is_whole(frontend, backend, cut):
    """scan(first part), then scan(the rest, initial_state): outputs, final state, and gradients through the state."""
    given = arrays(frontend, EVERYTHING, "float32")
    b, t, d, n = (EVERYTHING.sizes[dim] for dim in "btdn")
    function, options = frontend.function(SCAN), {**EVERYTHING.options, "return_final_state": True, "backend": backend}
    weights = normal(frontend, b, t, d), normal(frontend, b, d, n)

    def whole(values):
        return function(**values, **options)

    def continued(values):
        import importlib

        xp = importlib.import_module("torch" if frontend.name == "torch" else "jax.numpy")
        first, rest = (
            {k: v[:, part] if v.ndim == 3 and k != "initial_state" else v for k, v in values.items()}
            for part in (slice(cut), slice(cut, None))
        )
        y, state = function(**first, **options)
        more, state = function(**{**rest, "initial_state": state}, **options)
        return xp.concatenate([y, more], 1), state

    (outputs, found), (expected_outputs, expected) = (gradients(frontend, f, given, weights) for f in (continued, whole))
    assert_close(frontend, dict(enumerate(outputs)), dict(enumerate(expected_outputs)))
    assert_close(frontend, found, expected, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [c.name for c in STEP.cases])
def test_a_step_is_a_scan_of_one(frontend, backend, name):
    case = next(c for c in STEP.cases if c.name == name)
    given = arrays(frontend, case, "float32")
    weights = normal(frontend, *case.inputs()["x"].shape), normal(frontend, *case.inputs()["state"].shape)

    def step(values):
        return frontend.function(STEP)(**values, **case.options, backend=backend)

    def scan(values):
        values = dict(values)
        state, b = values.pop("state"), values["x"].shape[0]
        in_time = {k: v[:, None] if v.ndim > 1 and k != "A" and (k in "xz" or v.shape[0] == b) else v for k, v in values.items()}
        y, state = frontend.function(SCAN)(**in_time, **case.options, initial_state=state, return_final_state=True, backend=backend)
        return y[:, 0], state

    (outputs, found), (expected_outputs, expected) = (gradients(frontend, f, given, weights) for f in (step, scan))
    assert_close(frontend, dict(enumerate(outputs)), dict(enumerate(expected_outputs)))
    assert_close(frontend, found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_state_keeps_its_dtype(frontend, dtype):
    case = STEP.cases[0]
    given = arrays(frontend, case, "float32")
    given["state"] = frontend.array(case.inputs()["state"], dtype)
    y, state = frontend.function(STEP)(**given, **case.options, backend=KERNELS)
    assert (str(y.dtype).removeprefix("torch."), str(state.dtype).removeprefix("torch.")) == ("float32", dtype)


def test_a_step_maps_over_a_batch_as_large_as_d(frontend):
    """B of shape d n stays what it is when vmap folds its axis into a batch that comes to be as large as d."""
    case = resized(next(c for c in STEP.cases if c.name == "constant"), b=2, d=6)
    values = case.inputs()
    x = np.stack([values["x"] * scale for scale in (1.0, 0.5, 2.0)])
    given = arrays(frontend, case, "float32")

    def call(x):
        return frontend.function(STEP)(**{**given, "x": x}, **case.options, backend=KERNELS)[0]

    if frontend.name == "torch":
        from torch.func import vmap
    else:
        from jax import vmap
    found = frontend.numpy(vmap(call)(frontend.array(x, "float32")))
    expected = np.stack([frontend.numpy(call(frontend.array(one, "float32"))) for one in x])
    np.testing.assert_allclose(found, expected, atol=1e-6)


TORCH = [f for f in FRONTENDS if f.name == "torch"]


@pytest.mark.skipif(not TORCH, reason="states change in place in torch only")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_pool_of_states(backend, strided, dtype):
    """Only the slots that the batch names change, and negative indices give zeros."""
    import torch

    import torch_ops

    frontend, case = TORCH[0], next(c for c in STEP.cases if c.name == "groups")
    given = arrays(frontend, resized(case, b=4), "float32")
    given.pop("state")
    pool = frontend.array(np.random.default_rng(0).standard_normal((7, 18, 5)), "float32")
    if strided:
        pool = pool.movedim(0, -1).contiguous().movedim(-1, 0)
    before, address = pool.clone(), pool.data_ptr()
    indices = torch.tensor([5, -1, 0, 2], dtype=getattr(torch, dtype), device=pool.device)
    y = torch_ops.selective_scan_step_(pool, **given, **case.options, state_indices=indices, backend=backend)
    live = [0, 2, 3]
    part = {k: v[live] if v.dim() > 1 and k != "A" else v for k, v in given.items()}
    expected, states = torch_ops.selective_scan_step(before[[5, 0, 2]], **part, **case.options, backend=backend)
    assert pool.data_ptr() == address
    torch.testing.assert_close(y[live], expected)
    torch.testing.assert_close(pool[[5, 0, 2]], states)
    assert not y[1].any()
    assert torch.equal(pool[[1, 3, 4, 6]], before[[1, 3, 4, 6]])
    alone = before[:4].clone()
    torch.testing.assert_close(
        torch_ops.selective_scan_step_(alone, **given, **case.options, backend=backend)[0],
        torch_ops.selective_scan_step(before[:4], **given, **case.options, backend=backend)[0][0],
    )
    torch.testing.assert_close(alone, torch_ops.selective_scan_step(before[:4], **given, **case.options, backend=backend)[1])


@pytest.mark.skipif(not TORCH, reason="states change in place in torch only")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_under_compile(backend):
    import torch

    import torch_ops

    frontend, case = TORCH[0], STEP.cases[0]
    given = arrays(frontend, case, "float32")
    state = given.pop("state")

    def twice(state, x):
        first = torch_ops.selective_scan_step_(state, **{**given, "x": x}, **case.options, backend=backend)
        return first + torch_ops.selective_scan_step_(state, **{**given, "x": 2 * x}, **case.options, backend=backend)

    one, other = state.clone(), state.clone()
    torch.testing.assert_close(torch.compile(twice, fullgraph=True, backend="aot_eager")(one, given["x"]), twice(other, given["x"]))
    torch.testing.assert_close(one, other)
    packet = torch.ops.kernel_bridge.selective_scan_step_.default
    torch.library.opcheck(packet, (state, *(given.get(i.name) for i in STEP.signature.inputs[1:]), None, False, backend))


@pytest.mark.skipif(not TORCH, reason="states change in place in torch only")
def test_bad_pools():
    import torch

    import torch_ops

    frontend, case = TORCH[0], STEP.cases[0]
    given = arrays(frontend, case, "float32")
    d, n = case.sizes["d"], case.sizes["n"]
    pool, state = torch.zeros(9, d, n, device=given["x"].device), given.pop("state")

    def indices(*values):
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    step_ = torch_ops.selective_scan_step_
    with pytest.raises(
        ValueError, match=r"selective_scan_step_: state must have shape \(b d n\) with b = 3 \(set by x\) where no state_indices"
    ):
        step_(pool, **given)
    with pytest.raises(TypeError, match="state_indices must have one of the dtypes int32, int64, got float32"):
        step_(pool, **given, state_indices=indices(0, 1, 2).float())
    with pytest.raises(ValueError, match=r"state_indices must have shape \(b\) with b = 3 \(set by x\), got \(2,\)"):
        step_(pool, **given, state_indices=indices(0, 1))
    with pytest.raises(ValueError, match=r"selective_scan_step_: has no gradient; call it under torch.no_grad\(\)"):
        step_(state.requires_grad_(), **given)
    if frontend.gpu:
        y = step_(pool, **given, state_indices=indices(0, 9, 2))
        assert y[1].isnan().all()
        assert not y[[0, 2]].isnan().any()
        return
    for bad in ((0, 9, 2), (4, 4, 1)):
        with pytest.raises(ValueError, match=r"state_indices must be below slots = 9 \(set by state\), and distinct where not negative"):
            step_(pool, **given, state_indices=indices(*bad))
    assert not pool.any()
