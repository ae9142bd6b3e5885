"""The names of the mamba-ssm package: its grid of sizes and options, within its tolerances, against this package's loops."""

import importlib

import numpy as np
import pytest
from allpairspy import AllPairs
from common import FRONTENDS, NAMES, by_name

GPU = FRONTENDS[0].gpu
LENGTHS = [8, 16, 32, 64, 128, 256, 372, 512, 784, 1024, 1134, 2048, 4096]
FLAGS = ["D", "z", "delta_bias", "delta_softplus", "varying B", "varying C"]
# rtol, atol of the output; others are multiples of it.
TOLERANCES = {"float32": (6e-4, 2e-3), "float16": (3e-3, 5e-3), "bfloat16": (3e-2, 5e-2)}
FULL = [(dtype, t, groups, *[True] * 6) for dtype in TOLERANCES for t in LENGTHS for groups in (1, 2)]
# On a GPU every triple of values; in the interpreter every pair, up to a length that it can do.
MIXED = [tuple(row) for row in AllPairs([list(TOLERANCES), LENGTHS, [1, 2], *[[True, False]] * 6], n=3 if GPU else 2)]
GRID = list(dict.fromkeys(FULL + MIXED if GPU else [(row[0], min(row[1], 24), *row[2:]) for row in MIXED]))


# The second frontend runs the same kernels under the same names, and compiles each anew: there, some of the rows.
JOBS = [pytest.param(f, row, id=f"{f.name}-{row}") for k, f in enumerate(FRONTENDS) for row in GRID[:: 1 if not k else 6]]


@pytest.mark.parametrize(("frontend", "row"), JOBS)
def test_selective_scan(frontend, row):
    dtype, t, groups, *flags = row
    on = dict(zip(FLAGS, flags, strict=True))
    b, d, n, rng = 2, 4, 8, np.random.default_rng(list(map(int, (t, groups, *flags))))

    def projection(varying):
        # One group without and several with an axis of their own, as that package takes them.
        return rng.standard_normal(((b, n, t) if groups == 1 else (b, groups, n, t)) if varying else (d, n)), varying

    B, varying_B = projection(on["varying B"])
    C, varying_C = projection(on["varying C"])
    values = {
        "u": (rng.standard_normal((b, d, t)), dtype),
        "delta": (0.5 * rng.random((b, d, t)), dtype),
        "A": (-0.5 * rng.random((d, n)), "float32"),
        "B": (B, dtype if varying_B else "float32"),
        "C": (C, dtype if varying_C else "float32"),
    }
    if on["D"]:
        values["D"] = rng.standard_normal(d), "float32"
    if on["z"]:
        values["z"] = rng.standard_normal((b, d, t)), dtype
    if on["delta_bias"]:
        values["delta_bias"] = 0.5 * rng.random(d), "float32"
    given = {name: frontend.array(*value) for name, value in values.items()}
    exact = {name: frontend.array(frontend.numpy(x), "float64") for name, x in given.items()}
    cotangents = [frontend.array(rng.standard_normal((b, d, t)), dtype), frontend.array(rng.standard_normal((b, d, n)), "float32")]
    package = importlib.import_module(f"{frontend.name}_ops.mamba_ssm")
    options = {"delta_softplus": on["delta_softplus"], "return_last_state": True}
    found = pulled(frontend, package.selective_scan_fn, given, options, cotangents)
    truth = pulled(frontend, loop(frontend), exact, options, [frontend.array(frontend.numpy(c), "float64") for c in cotangents])
    rtol, atol = TOLERANCES[dtype]
    scales = {"u": (2, 2), "delta": (5, 10)}
    for name, array in found.items():
        r, a = (rtol, atol)
        if name in scales:
            r, a = rtol * scales[name][0], atol * scales[name][1]
        elif name == "A" or (name in "BC" and values[name][1] == "float32" and dtype != "float32"):
            r, a = 1e-3, 1e-2
        elif name in ("D", "z", "delta_bias"):
            r, a = max(1e-3, rtol if name == "z" else 0), max(2e-3, atol if name == "z" else 0)
        np.testing.assert_allclose(frontend.numpy(array), frontend.numpy(truth[name]), rtol=r, atol=a, err_msg=name)


def loop(frontend):
    """The loop, time last: with axes moved here, and not by the code under test."""
    reference = importlib.import_module(f"{frontend.name}_ops.reference").selective_scan
    last = (lambda x: x.transpose(1, -1)) if frontend.name == "torch" else (lambda x: x.swapaxes(1, -1))

    def first(x):
        if x.ndim == 4:  # b g n t
            return x.permute(0, 3, 1, 2) if frontend.name == "torch" else x.transpose(0, 3, 1, 2)
        return last(x) if x.ndim == 3 else x

    def call(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        z = None if z is None else first(z)
        y, state = reference(
            first(u), first(delta), A, first(B), first(C), D, z, delta_bias, delta_softplus=delta_softplus, return_final_state=True
        )
        return last(y), state

    return call


def pulled(frontend, function, given, options, cotangents):
    """Outputs, and the gradients of <outputs, cotangents>."""
    if frontend.name == "torch":
        import torch

        leaves = {name: x.requires_grad_() for name, x in given.items()}
        outputs = function(**leaves, **options)
        found = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), cotangents), strict=True))
        return dict(zip(("out", "last_state"), outputs, strict=True)) | found
    import jax

    outputs, pull = jax.vjp(lambda given: function(**given, **options), given)
    return dict(zip(("out", "last_state"), outputs, strict=True)) | pull(tuple(cotangents))[0]


UPDATES = [
    tuple(row) for row in AllPairs([list(TOLERANCES), [True, False], [16, 32, 64], [2048, 2064, 4096], [1, 2, 4], [0, 1, 2], [True, False]])
]


@pytest.mark.skipif(FRONTENDS[0].name != "torch", reason="states change in place in torch only")
@pytest.mark.parametrize(("dtype", "has_z", "n", "d", "groups", "heads", "indexed"), UPDATES)
def test_selective_state_update(dtype, has_z, n, d, groups, heads, indexed):
    """heads: none; or one axis for them, with parameters that all of a head share (tied), or not."""
    import torch

    from torch_ops import mamba_ssm

    frontend, b = FRONTENDS[0], 3
    d = d if GPU else d // 16
    rng = np.random.default_rng((n, d, groups, heads))
    shape = (d,) if not heads else (4, d // 4)
    groups = groups if heads else 1

    def array(*sizes, dtype=dtype, low=None):
        return frontend.array(rng.standard_normal(sizes) if low is None else low + rng.random(sizes), dtype)

    slots = 9 if indexed else b
    state, x, dt = array(slots, *shape, n), array(b, *shape), array(b, *shape)
    A, dt_bias, D = array(*shape, n, dtype="float32", low=-2), array(*shape, dtype="float32", low=-4), array(*shape, dtype="float32")
    if heads == 2:
        A, dt_bias, D = A[:, :1, :1].expand(*shape, n), dt_bias[:, :1].expand(shape), D[:, :1].expand(shape)
        dt = dt[:, :, :1].expand(b, *shape)
    B, C = (array(b, groups, n) if heads else array(b, n) for _ in "BC")
    z = array(b, *shape) if has_z else None
    indices = torch.tensor([7, -1, 2], dtype=torch.int32, device=state.device) if indexed else None
    rows = [7, 0, 2] if indexed else list(range(b))

    def wide(v):
        return None if v is None else v.double()

    def per_head(v):  # b g n -> b h 1 n
        return v.double().repeat_interleave(shape[0] // groups, 1)[:, :, None] if heads else v.double()[:, None]

    h, step = wide(state)[rows], torch.log1p(torch.exp(wide(dt) + wide(dt_bias)))
    h = h * torch.exp(step[..., None] * wide(A)) + (step * wide(x))[..., None] * per_head(B)
    expected = (h * per_head(C)).sum(-1) + wide(D) * wide(x)
    if has_z:
        expected = expected * torch.nn.functional.silu(wide(z))
    before = state.clone()
    out = mamba_ssm.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus=True, state_batch_indices=indices)
    rtol, atol = {"float32": (3e-4, 1e-3), "float16": (5e-3, 1e-2), "bfloat16": (1e-2, 5e-2)}[dtype]
    live = [0, 2] if indexed else rows
    assert out.dtype == x.dtype
    torch.testing.assert_close(out[live].double(), expected[live], rtol=rtol, atol=atol)
    torch.testing.assert_close(state[[rows[i] for i in live]].double(), h[live], rtol=rtol, atol=atol)
    if indexed:
        assert not out[1].any()
        rest = [0, 1, 3, 4, 5, 6, 8]
        assert torch.equal(state[rest], before[rest])


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_errors_speak_of_its_own_names(frontend):
    scan = importlib.import_module(f"{frontend.name}_ops.mamba_ssm").selective_scan_fn
    u, delta, A, B = (frontend.array(np.ones(shape), "float32") for shape in ((2, 4, 7), (2, 4, 6), (4, 3), (2, 3, 7)))
    with pytest.raises(ValueError, match=r"selective_scan_fn: delta must have shape \(b d t\) with .*t = 7 \(set by u\), got \(2, 4, 6\)"):
        scan(u, delta, A, B, B)
    with pytest.raises(ValueError, match=r"selective_scan_fn: C must have shape \(b g n t\) with g a divisor of d = 4"):
        scan(u, u, A, B, frontend.array(np.ones((2, 3, 3, 7)), "float32"))
    with pytest.raises(TypeError, match=r"selective_scan_fn: u must be a .*, got NoneType"):
        scan(None, delta, A, B, B)
    with pytest.raises(TypeError, match="selective_scan_fn: delta_softplus must be True or False, got 1"):
        scan(u, u, A, B, B, delta_softplus=1)


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_numpy_arrays_are_taken_as_jax_takes_them():
    """Those of float64 in float32, unless JAX was told otherwise."""
    import jax

    from jax_ops import mamba_ssm

    u, A, B = np.ones((2, 4, 7)), -np.ones((4, 3)), np.ones((2, 3, 7))
    with jax.enable_x64(False):
        assert mamba_ssm.selective_scan_fn(u, jax.numpy.ones(u.shape), A, B, B).dtype == "float32"


@pytest.mark.skipif(FRONTENDS[0].name != "torch", reason="states change in place in torch only")
def test_heads_under_compile():
    """Of states that lie head after head, and of others."""
    import torch

    from torch_ops import mamba_ssm

    b, h, d, n = 2, 3, 4, 5
    x, dt = torch.randn(2, b, h, d, device="cuda" if GPU else "cpu")
    A, (B, C) = -torch.rand(h, d, n, device=x.device), torch.randn(2, b, 1, n, device=x.device)
    update = torch.compile(mamba_ssm.selective_state_update, fullgraph=True, backend="aot_eager")
    for state in (torch.randn(b, h, d, n, device=x.device), torch.randn(b, d, h, n, device=x.device).transpose(1, 2)):
        other = state.clone()
        torch.testing.assert_close(update(state, x, dt, A, B, C), mamba_ssm.selective_state_update(other, x, dt, A, B, C))
        torch.testing.assert_close(state, other)
    with pytest.raises(TypeError, match=r"state must be a torch\.Tensor"):
        mamba_ssm.selective_state_update(None, x, dt, A, B, C)


@pytest.mark.skipif(FRONTENDS[0].name != "torch", reason="arrays of other frameworks have no strides")
def test_time_last_without_a_copy():
    """y comes as it was written; inputs that lie time-second are read as they lie."""
    import torch

    from torch_ops import mamba_ssm

    u, delta = torch.randn(2, 2, 9, 5, device="cuda" if GPU else "cpu").transpose(-1, -2).unbind(0)
    A, B, C = -torch.rand(5, 3, device=u.device), *torch.randn(2, 2, 3, 9, device=u.device)
    y = mamba_ssm.selective_scan_fn(u, delta, A, B, C)
    assert y.shape == (2, 5, 9)
    assert y.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(y, mamba_ssm.selective_scan_fn(u.contiguous(), delta.contiguous(), A, B, C), rtol=0, atol=0)
    torch.testing.assert_close(y, mamba_ssm.selective_scan_ref(u, delta, A, B, C))
