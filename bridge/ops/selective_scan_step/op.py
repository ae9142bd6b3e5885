"""selective_scan_step: one time step of selective_scan, for decoding.

    dt    = delta + delta_bias;  dt = log1p(exp(dt)) if delta_softplus
    state = exp(dt A) state + dt B x
    y     = <state, C> + D x;    y = y * silu(z)

b is the batch, d channels, n states; with groups, channel c uses group c // (d/g) of B or C, which must divide d. B or C
of shape d n is the same for the whole batch (where b = d, a matrix is read as b n). It equals selective_scan on one step;
the new state has the dtype of the old one.
"""

from collections.abc import Mapping

import numpy as np

from bridge.op import Call, Op
from bridge.ops.selective_scan.flops import flops
from bridge.ops.selective_scan.op import Passes, refuse
from bridge.ops.selective_scan_step.cases import CASES
from bridge.ops.selective_scan_step.kernels import step
from bridge.ops.selective_scan_step.reference import selective_scan_step as reference
from bridge.ops.selective_scan_step.reference import selective_scan_step_ as reference_in_place
from bridge.options import Flag
from bridge.plan import Plan
from bridge.signature import Signature

INPUTS = """x: b d, delta: b d, A: d n, B: b n or b g n or d n, C: b n or b g n or d n, D?: d, z?: b d, delta_bias?: d"""
RENAMED = {"initial_state": "state", "dfinal_state": "dnew_state"}


def forward(call: Call, save: bool) -> Plan:
    passes = Passes(call, RENAMED)
    launch = passes.launch(
        step, call.sizes["b"], "state x delta A B C D z delta_bias state_indices", (call.array("state").shape[0],), call.outputs,
        ("GB", "GC", "SOFTPLUS", "HAS_D", "HAS_Z", "HAS_BIAS"), DOUBLE=passes.wide == "float64", INDEXED=call.has("state_indices"),
    )  # fmt: skip
    return Plan((launch,), tuple(call.outputs))


def backward(call: Call, needs: tuple[str, ...]) -> Plan:
    return Plan(tuple(Passes(call, RENAMED).reverse(needs)), tuple(f"d{name}" for name in needs))


def refuse_pool(call: Call) -> str | None:
    slots, b = call.sizes["slots"], call.sizes["b"]
    if slots != b and not call.has("state_indices"):
        return f"state must have shape (b d n) with b = {b} (set by x) where no state_indices are given, got {call.array('state').shape}"
    return refuse(call)


def refuse_indices(call: Call, values: np.ndarray) -> str | None:
    slots = call.sizes["slots"]
    used = values[values >= 0]
    if (used >= slots).any() or len(np.unique(used)) < len(used):
        return f"must be below slots = {slots} (set by state), and distinct where not negative, got {np.array2string(values, threshold=20)}"
    return None


selective_scan_step = Op(
    name="selective_scan_step",
    signature=Signature.parse(f"state: b d n, {INPUTS} -> y: b d like x, new_state: b d n like state"),
    options={"delta_softplus": Flag()},
    refuse=refuse,
    reference=reference,
    forward=forward,
    backward=backward,
    batch="b",
    channels=("d", "g"),
    flops=flops,
    cases=CASES,
    doc=__doc__ or "",
)

# The same on a pool of states, which it updates in place: not differentiable, and for frameworks whose arrays can change.
selective_scan_step_ = Op(
    name="selective_scan_step_",
    signature=Signature.parse(
        f"state: slots d n, {INPUTS}, *, state_indices?: b (int32 int64) -> y: b d like x, new_state: slots d n like state"
    ),
    options={"delta_softplus": Flag()},
    refuse=refuse_pool,
    values={"state_indices": refuse_indices},
    reference=reference_in_place,
    forward=forward,
    doc=(__doc__ or "").replace("selective_scan_step:", "selective_scan_step_:")
    + """
The states are a pool of slots, and are updated in place. Entry i of the batch has its state at state_indices[i] (without
them, at i); indices that aren't negative are distinct. A negative one means that y is zero and no state is touched. An index
beyond the pool that can't be read without waiting for a GPU gives NaN. There is no gradient.
""",
)
UPDATES: Mapping[str, str] = {"new_state": "state"}  # output -> the input that it is written over
