"""sinkhorn: makes positive matrices doubly stochastic, many small ones at a time. mhc_bwd: its gradient from its result.

    order "col_row"    R = exp(logits); iters times: R = R / (column sums + eps), then R = R / (row sums + eps)
    order "row_col"    R = softmax of each row + eps, R = R / (column sums + eps);
                       iters - 1 times: R = R / (row sums + eps), then R = R / (column sums + eps)

Column sums run over dimension -2, row sums over -1. With iters = 0 nothing is divided: R = exp(logits), or the softmax
plus eps. Finite logits of any size give finite results. Logits of -inf are entries of 0 with a gradient of 0, and 0/0 counts
as 0. NaN stays in its matrix. docs/sinkhorn.md has other recipes side by side, and what the two gradients differ by.

gradient "unrolled" is the derivative of the loop that ran. gradient "implicit" is that of the fixed point that it
approaches: with G the gradient of R, r and c its row and column sums, it solves

    [diag(r)  R     ] [u]   [(R * G) 1  ]
    [R^T      diag(c)] [v] = [(R * G)^T 1]        dlogits = R * (G - u 1^T - 1 v^T)

mhc_bwd(out, dout) is this dlogits for R = out and G = dout, to working precision, or after `cg_iters` steps of conjugate
gradients. It is linear in dout at every scale.

(Sinkhorn and Knopp, 1967; Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.op import Call, Op
from bridge.ops.sinkhorn import backward as backwards
from bridge.ops.sinkhorn import forward as forwards
from bridge.ops.sinkhorn import reference
from bridge.ops.sinkhorn.cases import CASES, MHC_BWD_CASES
from bridge.ops.sinkhorn.flops import mhc_bwd_flops, sinkhorn_flops
from bridge.options import Choice, Integer, Real
from bridge.plan import Launch, Plan, cdiv, power_of_two
from bridge.signature import ELLIPSIS, Array, Signature

LIMITS = {"n": range(1, 65)}
IN_LANE = 8  # the largest matrices that lie in the registers of one lane
ELEMENTS = 8  # of a larger matrix in a lane, at least
CANCELS = 3  # up to here gradients often are small differences of a few numbers, and float64 is what keeps them right


@dataclass(frozen=True)
class Layout:
    """How a call is cut into programs. It depends on sizes alone, so that results repeat bit for bit."""

    count: int
    n: int
    double: bool

    @classmethod
    def of(cls, call: Call, careful: bool = False) -> "Layout":
        n = call.sizes["n"]
        return cls(math.prod(call.sizes.leading), n, "float64" in call.dtypes.values() or (careful and n <= CANCELS))

    @property
    def side(self) -> int:
        """The smallest power of two that is at least n."""
        return power_of_two(self.n)

    @property
    def matrices(self) -> int:
        """One a lane, and more of the smallest; else as many as a warp holds, and at least one."""
        return 32 * max(16 // self.side**2, 1) if self.side <= IN_LANE else max(32 * 2 * ELEMENTS // self.side**2, 1)

    @property
    def num_warps(self) -> int:
        """One where it can be: warps that share a matrix add up through shared memory."""
        return 1 if self.side <= IN_LANE else max(self.side**2 // (64 * ELEMENTS), 1)

    @property
    def segment(self) -> int:
        """Iterations whose u and v fit the registers."""
        longest = {1: 16, 2: 16, 4: 10, 8: 4}.get(self.side, 8)
        return max(longest // 2, 1) if self.double else longest

    def launch(self, kernel, inputs: tuple[str, ...], scalar: int, outputs: dict[str, Array], **constants) -> Launch:
        constants = dict(SIZE=self.n, S=self.matrices, N=self.side, WIDE=self.double, **constants)
        return Launch(kernel, cdiv(self.count, self.matrices), inputs, (self.count, scalar), outputs, constants, num_warps=self.num_warps)


def loop(call: Call) -> dict[str, Any]:
    """The constants that describe the loop. The number of iterations is a scalar, and shows in them by its class only."""
    iters, eps, row_col = call.options["iters"], call.options["eps"], call.options["order"] == "row_col"
    bits = max((call.sizes["n"] - 1).bit_length(), 1)  # of n
    # u and v grow by a factor n in an iteration, at the most: 60 bits are far from overflow. With eps they can grow by 1/eps.
    longest = 1 if eps and not row_col else 60 // bits
    settle = longest if iters > longest or longest == 1 else 0
    return {"ROW_COL": row_col, "EPS": eps, "ITERATES": iters > 0, "SETTLE": settle}


def segments(iters: int, longest: int) -> dict[str, Any]:
    """As few segments as there can be, of nearly the same length."""
    length = cdiv(iters, cdiv(iters, longest)) if iters else 1
    return {"H": length, "EVEN": iters % length == 0}


def saves(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("R",) if options["gradient"] == "implicit" else ()


def forward(call: Call, save: bool) -> Plan:
    launch = Layout.of(call).launch(forwards.forward, ("logits",), call.options["iters"], call.outputs, **loop(call))
    return Plan((launch,), ("R",))


def backward(call: Call, needs: tuple[str, ...]) -> Plan:
    layout, iters, outputs = Layout.of(call, careful=True), call.options["iters"], {"dlogits": call.outputs["R"]}
    if call.options["gradient"] == "unrolled":
        constants = loop(call) | segments(iters, layout.segment)
        launch = layout.launch(backwards.unrolled, ("logits", "dR"), iters, outputs, **constants)
    else:
        exact = call.dtypes["logits"] in ("float32", "float64")  # a 16-bit R was rounded, and is better made again
        launch = layout.launch(backwards.implicit, ("logits", "R", "dR"), iters, outputs, **loop(call), SAVED=exact)
    return Plan((launch,), ("dlogits",))


def mhc_bwd_forward(call: Call, save: bool) -> Plan:
    steps = call.options["cg_iters"]
    layout = Layout.of(call, careful=True)
    launch = layout.launch(backwards.mhc_bwd, ("out", "dout"), steps or 0, call.outputs, DIRECT=steps is None)
    return Plan((launch,), ("dM",))


sinkhorn = Op(
    name="sinkhorn",
    signature=Signature.parse("logits: ... n n -> R: ... n n like logits"),
    options={
        "iters": Integer(20),
        "eps": Real(0.0),
        "order": Choice("col_row", ("col_row", "row_col")),
        "gradient": Choice("unrolled", ("unrolled", "implicit")),
    },
    limits=LIMITS,
    reference=reference.sinkhorn,
    reference_backward=reference.sinkhorn_backward,
    forward=forward,
    saves=saves,
    backward=backward,
    batch=ELLIPSIS,
    flops=sinkhorn_flops,
    cases=CASES,
    doc=__doc__ or "",
)

mhc_bwd = Op(
    name="mhc_bwd",
    signature=Signature.parse("out: ... n n, dout: ... n n -> dM: ... n n like out"),
    options={"cg_iters": Integer(None)},
    limits=LIMITS,
    reference=reference.mhc_bwd,
    forward=mhc_bwd_forward,
    batch=ELLIPSIS,
    flops=mhc_bwd_flops,
    cases=MHC_BWD_CASES,
    doc=__doc__ or "",
)
