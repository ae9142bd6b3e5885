"""The references against loops written another way, in numpy: the truth that all else is checked against."""

import importlib
from itertools import pairwise

import numpy as np
import pytest
from common import FRONTENDS, arrays, by_name

from bridge import ops

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def at(M, i, s, c, channels):
    """B or C at batch i, step s, channel c: a vector over the states."""
    if M.ndim == 2:
        return M[c]
    return M[i, s] if M.ndim == 3 else M[i, s, c // (channels // M.shape[2])]


def selective_scan(x, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, cu_seqlens=None, *, delta_softplus=False):
    if cu_seqlens is not None:
        parts = []
        for i, (low, high) in enumerate(pairwise(cu_seqlens)):
            cut = (M if M is None or M.ndim == 2 else M[:, low:high] for M in (B, C, z))
            Bs, Cs, zs = cut
            state = None if initial_state is None else initial_state[i : i + 1]
            rest = dict(D=D, z=zs, delta_bias=delta_bias, initial_state=state, delta_softplus=delta_softplus)
            parts.append(selective_scan(x[:, low:high], delta[:, low:high], A, Bs, Cs, **rest))
        ys, states = zip(*parts, strict=True)
        return np.concatenate(ys, 1), np.concatenate(states)
    b, t, d = x.shape
    h = np.zeros((b, d, A.shape[1])) if initial_state is None else initial_state.copy()
    y = np.zeros_like(x)
    for i in range(b):
        for s in range(t):
            for c in range(d):
                dt = delta[i, s, c] + (0 if delta_bias is None else delta_bias[c])
                if delta_softplus:
                    dt = np.log1p(np.exp(dt))
                h[i, c] = np.exp(dt * A[c]) * h[i, c] + dt * at(B, i, s, c, d) * x[i, s, c]
                y[i, s, c] = h[i, c] @ at(C, i, s, c, d)
                if D is not None:
                    y[i, s, c] += D[c] * x[i, s, c]
                if z is not None:
                    y[i, s, c] *= z[i, s, c] / (1 + np.exp(-z[i, s, c]))
    return y, h


def selective_scan_step(state, x, delta, A, B, C, D=None, z=None, delta_bias=None, *, delta_softplus=False):
    B, C = (M[:, None] if M.shape[0] == len(x) else M for M in (B, C))
    z = None if z is None else z[:, None]
    y, h = selective_scan(x[:, None], delta[:, None], A, B, C, D, z, delta_bias, state, delta_softplus=delta_softplus)
    return y[:, 0], h


def sinkhorn(logits, *, iters=20, eps=0.0, order="col_row", gradient="unrolled"):
    if order == "col_row":
        R = np.exp(logits)
        for _ in range(iters):
            R = R / (R.sum(-2, keepdims=True) + eps)
            R = R / (R.sum(-1, keepdims=True) + eps)
        return (R,)
    R = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) + eps
    for i in range(iters):
        if i:
            R = R / (R.sum(-1, keepdims=True) + eps)
        R = R / (R.sum(-2, keepdims=True) + eps)
    return (R,)


def mhc_bwd(out, dout, *, cg_iters=None):
    n = out.shape[-1]
    results = []
    for R, G in zip(out.reshape(-1, n, n), dout.reshape(-1, n, n), strict=True):
        E = R * G
        system = np.block([[np.diag(R.sum(1)), R], [R.T, np.diag(R.sum(0))]])
        right = np.concatenate([E.sum(1), E.sum(0)])
        if cg_iters is None:
            solution = np.linalg.lstsq(system, right, rcond=1e-13)[0]
        else:
            solution, residual = np.zeros(2 * n), right.copy()
            direction = residual.copy()
            for _ in range(cg_iters):
                alpha = residual @ residual / (direction @ system @ direction)
                solution += alpha * direction
                new = residual - alpha * system @ direction
                direction = new + new @ new / (residual @ residual) * direction
                residual = new
        results.append(E - R * (solution[:n, None] + solution[None, n:]))
    return (np.reshape(results, out.shape),)


PLAIN = {"selective_scan": selective_scan, "selective_scan_step": selective_scan_step, "sinkhorn": sinkhorn, "mhc_bwd": mhc_bwd}
JOBS = [(op, case) for op in ops.values() for case in op.cases]


def test_every_op_has_a_plain_loop():
    assert set(PLAIN) == set(ops)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize(("op", "case"), JOBS, ids=by_name)
def test_reference(op, case, frontend):
    flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
    found = frontend.reference(op)(**arrays(frontend, case, "float64"), **case.options, **flags)
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, PLAIN[op.name](**case.inputs(), **case.options), strict=True):
        np.testing.assert_allclose(frontend.numpy(one), other, **EXACT)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_references_have_the_names_of_the_ops(frontend):
    package = importlib.import_module(f"{frontend.name}_ops")
    for name in ops:
        assert getattr(package.reference, name).__name__ == name
        assert getattr(package, name).__name__ == name
        assert getattr(package, name).__doc__


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("op", list(ops.values()), ids=by_name)
def test_the_docstring_names_everything(op, frontend):
    text = frontend.function(op).__doc__
    for argument in (*op.signature.inputs, *op.signature.outputs):
        assert f"{argument.name}: {' '.join(argument.forms[0]).replace('s|b', 'b')}" in text
    for name, option in op.settings.items():
        assert f"{name} = {option.default!r}" in text
