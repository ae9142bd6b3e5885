"""The scan under the names and in the layouts of the mamba-ssm package: time last.

What differs from there: no size is too large, N included; gradients repeat bit for bit and flow through last_state too; A is
real; delta, B, C and z can have dtypes of their own; float64 works; and selective_state_update takes D or dt_bias alone.
"""

import torch

import torch_ops
from bridge import ops
from bridge.ops.selective_scan.mamba_ssm import TIME_LAST
from torch_ops import reference
from torch_ops.tensors import check


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """y, and with return_last_state the state behind the last step.

    u, delta, z, y: b d t. A: d n. B and C: b n t or b g n t, or d n where they are constant in time. D, delta_bias: d.
    last_state: b d n, float32 (float64 when u is). y has u's dtype; it is a view of an array b t d, which is how the kernels
    read and write: tensors that lie like that are read as they lie, others are copied once a pass.
    """
    return _scan(torch_ops.selective_scan, u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def selective_scan_ref(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """The same by the loop that defines the scan."""
    return _scan(reference.function(ops["selective_scan"]), u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def _scan(scan, u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state):
    if not torch.compiler.is_compiling():  # which has no use for errors in these names, and no plain sizes
        check(TIME_LAST, (u, delta, A, B, C, D, z, delta_bias), (delta_softplus, return_last_state))
    made = scan(
        _time_second(u), _time_second(delta), A, _time_second(B), _time_second(C), D, _time_second(z), delta_bias,
        delta_softplus=delta_softplus, return_final_state=return_last_state,
    )  # fmt: skip
    y, *state = made if return_last_state else (made,)
    return (y.movedim(1, -1), *state) if state else y.movedim(1, -1)


def _time_second(x):
    return x.movedim(-1, 1) if isinstance(x, torch.Tensor) and x.dim() > 2 else x


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    """One step for decoding: writes the new states over `state`, and returns y in x's dtype. It has no gradient.

    state: b d n, or a pool of them with state_batch_indices (int32 or int64, b; a negative one means: y is 0, no state is
    touched). x, dt, z, y: b d. A: d n. B and C: b n or b g n. D, dt_bias: d.
    With heads, state: b h d n, x, dt, z, y: b h d, A: h d n, D, dt_bias: h d, and groups are groups of heads.
    """
    return _update(torch_ops.selective_scan_step_, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


@torch.no_grad()
def _update(step_, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, indices):
    if not isinstance(state, torch.Tensor) or state.dim() == 3:
        return step_(state, x, dt, A, B, C, D, z, dt_bias, delta_softplus=dt_softplus, state_indices=indices)
    # A head is as good as a run of channels.
    flat = state.flatten(1, 2)
    x, dt, z, D, dt_bias = (v if v is None else v.flatten(-2) for v in (x, dt, z, D, dt_bias))
    y = step_(flat, x, dt, A.flatten(0, 1), B, C, D, z, dt_bias, delta_softplus=dt_softplus, state_indices=indices)
    if state.stride(1) != state.shape[2] * state.stride(2):  # flattening had to copy
        state.copy_(flat.unflatten(1, state.shape[1:3]))
    return y.unflatten(1, state.shape[1:3])
