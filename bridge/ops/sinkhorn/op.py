"""sinkhorn: makes positive matrices doubly stochastic, many small ones at a time. mhc_bwd: its gradient from its result.

    order "col_row"    R = exp(logits); iters times: R = R / (column sums + eps), then R = R / (row sums + eps)
    order "row_col"    R = softmax of each row + eps, R = R / (column sums + eps);
                       iters - 1 times: R = R / (row sums + eps), then R = R / (column sums + eps)

Column sums run over dimension -2, row sums over -1. With iters = 0 nothing is divided: R = exp(logits), or the softmax
plus eps. With at least one iteration finite logits of any size give finite results. Logits of -inf are entries of 0 with a
gradient of 0, and 0/0 counts as 0. NaN stays in its matrix. docs/sinkhorn.md has other recipes side by side, and what the two
gradients differ by.

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
from bridge.ops.sinkhorn import implicit as implicits
from bridge.ops.sinkhorn import reference
from bridge.ops.sinkhorn.cases import CASES, MHC_BWD_CASES, MHC_BWD_MODELS, MODELS, SWEEPS
from bridge.ops.sinkhorn.flops import mhc_bwd_flops, sinkhorn_flops
from bridge.options import Choice, Integer, Real
from bridge.plan import Launch, Plan, cdiv, power_of_two
from bridge.signature import ELLIPSIS, Array, Signature
from bridge.tuning import Tunable

LIMITS = {"n": range(1, 65)}
BLOCK = 8  # rows and columns of a matrix in the registers of one lane, at most
KEPT = 4  # vectors over rows in registers for later, at most
CANCELS = 3  # up to here gradients often are small differences of a few numbers, and float64 is what keeps them right


# warps: of a program, where a matrix lies in one lane. (Where lanes share one, warps would, and add up through shared memory.)
WARPS = {"warps": Tunable(1, (1, 2, 4))}
SIZE_CLASSES = tuple(f"{side} x {side}" for side in (1, 2, 4, 8, 16, 32, 64))


@dataclass(frozen=True)
class Layout:
    """How a call is cut into programs. It depends on sizes and the kind of GPU alone, so that results repeat bit for bit."""

    count: int
    n: int
    double: bool
    warps: int

    @classmethod
    def of(cls, call: Call, tuned: Mapping[str, int], careful: bool = False) -> "Layout":
        n = call.sizes["n"]
        return cls(math.prod(call.sizes.leading), n, "float64" in call.dtypes.values() or (careful and n <= CANCELS), **tuned)

    @property
    def side(self) -> int:
        """The smallest power of two that is at least n."""
        return power_of_two(self.n)

    def block(self, solves: bool) -> tuple[int, int]:
        """Rows and columns of a matrix in a lane. To solve takes four tiles: half of an 8 x 8 matrix is what fits four times, and
        from there on whole rows, as many as make a warp's lanes do for one 64 x 64 matrix or for four 16 x 16."""
        if not solves or self.side < BLOCK:
            return min(self.side, BLOCK), min(self.side, BLOCK)
        return max(32 // self.side, self.side // 32), self.side

    @property
    def segment(self) -> int:
        """Iterations whose u and v fit the registers."""
        longest = {1: 16, 2: 16, 4: 10, 64: 2}.get(self.side, 4)
        return max(longest // 2, 1) if self.double else longest

    def launch(self, kernel, inputs: tuple[str, ...], scalar: int, outputs: dict[str, Array], solves=False, **constants) -> Launch:
        """One matrix a lane, and more of the smallest; or one warp's lanes, and more than a warp only for the largest loops: warps
        that share a matrix add up through shared memory."""
        I, J = self.block(solves)
        lanes = self.side**2 // (I * J)
        warps = self.warps if lanes == 1 else max(lanes // 32, 1)
        matrices = max(32 * warps // lanes, 1) * max(16 // self.side**2, 1)
        constants = dict(SIZE=self.n, S=matrices, N=self.side, I=I, J=J, WIDE=self.double, **constants)
        grid = cdiv(self.count, matrices)
        return Launch(kernel, grid, inputs, (self.count, scalar), outputs, constants, num_warps=warps)


def loop(call: Call) -> dict[str, Any]:
    """The constants that describe the loop. The number of iterations is a scalar, and shows in them by its class only."""
    iters, eps, row_col = call.options["iters"], call.options["eps"], call.options["order"] == "row_col"
    # u and v grow by a factor n in an iteration, at the most, or shrink by n + eps. The largest numbers have 127 bits; of small
    # matrices, the product of two must be one (`reciprocals`), and sums be far from FAINT. Where eps is carried in them they
    # begin within 20 bits of 1.
    bits = 41 if call.sizes["n"] <= 4 else 81 if eps and not row_col else 101
    longest = max(int(bits / max(math.log2(call.sizes["n"] + eps), 1)), 1)
    return {"ROW_COL": row_col, "EPS": eps, "ITERATES": iters > 0, "SETTLE": longest if iters > longest else 0}


def segments(steps: int, longest: int, keeps: bool) -> dict[str, Any]:
    """As few segments as there can be, of nearly the same length: H, and for the first of all what is left. If the loop is no
    longer than the registers allow, they keep the u at the start of each but the last and the REST."""
    length = cdiv(steps, cdiv(steps, longest)) if steps > 0 else 0
    kept = steps // length - 1 if length else 0
    return {"H": length, "REST": steps % length if length else 0, "KEPT": kept if keeps and kept <= KEPT else 0}


def size_class(call: Call) -> str:
    side = power_of_two(call.sizes["n"])
    return f"{side} x {side}"


def saves(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("R",) if options["gradient"] == "implicit" else ()


def forward(call: Call, save: bool) -> Plan:
    launch = Layout.of(call, sinkhorn.tuned(call, "forward")).launch(
        forwards.forward, ("logits",), call.options["iters"], call.outputs, **loop(call)
    )
    return Plan((launch,), ("R",))


def backward(call: Call, needs: tuple[str, ...]) -> Plan:
    layout = Layout.of(call, sinkhorn.tuned(call, "backward"), careful=True)
    iters, outputs, constants = call.options["iters"], {"dlogits": call.outputs["R"]}, loop(call)
    if call.options["gradient"] == "unrolled":
        keeps = constants["EPS"] == 0 and constants["SETTLE"] == 0
        constants |= segments(iters - constants["ROW_COL"], layout.segment, keeps)
        launch = layout.launch(backwards.unrolled, ("logits", "dR"), iters, outputs, **constants)
        return Plan((launch,), ("dlogits",))
    launches: tuple[Launch, ...] = ()
    R = "R"
    if call.dtypes["logits"] not in ("float32", "float64"):  # a 16-bit R was rounded, and is better made again
        R = "again"
        made = {R: Array(call.outputs["R"].shape, "float64" if layout.double else "float32")}
        launches += (layout.launch(forwards.forward, ("logits",), iters, made, **constants),)
    unmasks = constants["ROW_COL"] and call.options["eps"] > 0
    launches += (layout.launch(implicits.implicit, ("logits", R, "dR"), iters, outputs, solves=True, UNMASKS=unmasks),)
    return Plan(launches, ("dlogits",))


def mhc_bwd_forward(call: Call, save: bool) -> Plan:
    steps = call.options["cg_iters"]
    layout = Layout.of(call, mhc_bwd.tuned(call, "forward"), careful=True)
    inputs, direct = ("out", "dout"), steps is None
    launch = layout.launch(implicits.mhc_bwd, inputs, steps or 0, call.outputs, solves=direct, DIRECT=direct)
    return Plan((launch,), ("dM",))


sinkhorn = Op(
    name="sinkhorn",
    signature=Signature.parse("logits: ... n n -> R: ... n n like logits"),
    options={
        "iters": Integer(20),
        "eps": Real(0.0, maximum=1e30),
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
    tunables={"forward": WARPS, "backward": WARPS},
    size_classes=SIZE_CLASSES,
    size_class=size_class,
    flops=sinkhorn_flops,
    cases=CASES,
    models=MODELS,
    sweeps=SWEEPS,
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
    tunables={"forward": WARPS},
    size_classes=SIZE_CLASSES,
    size_class=size_class,
    flops=mhc_bwd_flops,
    cases=MHC_BWD_CASES,
    models=MHC_BWD_MODELS,
    doc=__doc__ or "",
)
