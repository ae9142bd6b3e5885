"""selective_scan: Mamba's S6, a selective diagonal state-space scan.

    dt_t = delta_t + delta_bias;  dt_t = log1p(exp(dt_t)) if delta_softplus
    h_t  = exp(dt_t A) h_{t-1} + dt_t B_t x_t
    y_t  = <h_t, C_t> + D x_t;    y_t = y_t * silu(z_t)

(Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.2: A is discretised
exactly, B by Euler's rule.)
"""

import math
from dataclasses import dataclass

from bridge.language import sum_leading
from bridge.op import Call, Op
from bridge.ops.selective_scan import kernels
from bridge.ops.selective_scan.cases import CASES
from bridge.ops.selective_scan.reference import selective_scan as reference
from bridge.options import Flag
from bridge.plan import Launch, Plan, cdiv, power_of_two
from bridge.signature import Array, Signature

SIGNATURE = """
    x: b t d, delta: b t d, A: d n, B: b t n, C: b t n, D?: d, z?: b t d, delta_bias?: d, initial_state?: b d n
    -> y: b t d like x, final_state?: b d n wide x
"""

TILE = 8  # steps that are read, and taken backwards, together: their states fit the registers
PROGRAMS = 2048  # about as many as a large GPU holds at once; time is cut until there are so many
SHORTEST = 256  # steps in a chunk of time


@dataclass(frozen=True)
class Layout:
    """How a call is cut into programs. It depends on sizes alone, so that results repeat bit for bit."""

    b: int
    t: int
    d: int
    n: int

    @property
    def states(self) -> int:
        return power_of_two(self.n)

    @property
    def channels(self) -> int:
        """Channels of a program: 8 states a lane where it can be, and whole 32-byte sectors of a row."""
        return min(max(256 // self.states, 16), 64)

    @property
    def num_warps(self) -> int:
        return min(max(self.states * self.channels // 256, 1), 32)

    @property
    def blocks(self) -> int:
        return cdiv(self.d, self.channels)

    @property
    def segment(self) -> int:
        """Steps between saved states: at least 64, and at most one byte of state for each element of x."""
        return max(64, 4 * self.states)

    @property
    def span(self) -> int:
        """Steps in a chunk, a multiple of the segment."""
        wanted = max(1, min(cdiv(PROGRAMS, max(1, self.b * self.blocks)), self.t // SHORTEST))
        return max(1, cdiv(cdiv(self.t, wanted), self.segment)) * self.segment

    @property
    def chunks(self) -> int:
        return max(1, cdiv(self.t, self.span))

    @property
    def constants(self) -> dict:
        return dict(CHANNELS=self.d, STATES=self.n, BD=self.channels, BN=self.states)

    def grid(self, chunks: int) -> int:
        return self.blocks * chunks * self.b


class Passes:
    """What the two plans share: the layout of a call, and how a launch is written."""

    def __init__(self, call: Call):
        self.call = call
        self.layout = Layout(*(call.sizes[dim] for dim in "btdn"))
        self.wide = call.outputs["final_state"].dtype
        self.flags = {
            "SOFTPLUS": call.options["delta_softplus"],
            "HAS_D": call.has("D"),
            "HAS_Z": call.has("z"),
            "HAS_BIAS": call.has("delta_bias"),
            "HAS_INITIAL": call.has("initial_state"),
        }

    def array(self, *shape: int) -> Array:
        return Array(shape, self.wide)

    def launch(self, kernel, chunks, inputs, scalars, outputs, flags=(), **constants) -> Launch:
        flags = {name: self.flags[name] for name in flags}
        return Launch(
            kernel, self.layout.grid(chunks), tuple(inputs), scalars, outputs, {**self.layout.constants, **constants, **flags},
            wide=self.wide, num_warps=self.layout.num_warps,
        )  # fmt: skip

    def sum(self, source: str, count: int, name: str, result: Array) -> Launch:
        size, block = math.prod(result.shape), 256
        return Launch(sum_leading, cdiv(size, block), (source,), (count, size), {name: result}, {"BLOCK": block}, wide=self.wide)


def saved(call: Call) -> dict[str, Array]:
    """The state before every segment of time."""
    k = Passes(call).layout
    return {"states": Passes(call).array(k.b, cdiv(k.t, k.segment), k.n, k.d)}


def forward(call: Call, save: bool) -> Plan:
    passes, k = Passes(call), Passes(call).layout
    b, d, n, t = k.b, k.d, k.n, k.t
    launches = []
    if k.chunks > 1:
        launches += [
            passes.launch(
                kernels.chunk_ends, k.chunks - 1, ("x", "delta", "A", "B", "delta_bias"), (t, k.chunks, k.span),
                {"ends": passes.array(b, k.chunks - 1, n, d), "elapsed": passes.array(b, k.chunks - 1, d)},
                ("SOFTPLUS", "HAS_BIAS"), TILE=TILE,
            ),
            passes.launch(
                kernels.chunk_starts, 1, ("A", "initial_state", "ends", "elapsed"), (k.chunks,),
                {"starts": passes.array(b, k.chunks - 1, n, d)}, ("HAS_INITIAL",),
            ),
        ]  # fmt: skip
    states = saved(call) if save else {"states": passes.array(1)}
    launches.append(
        passes.launch(
            kernels.scan, k.chunks, ("x", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "starts"), (t, k.chunks, k.span),
            {**call.outputs, **states},
            ("SOFTPLUS", "HAS_D", "HAS_Z", "HAS_BIAS", "HAS_INITIAL"), TILE=TILE, SEGMENT=k.segment if save else 0,
        )
    )  # fmt: skip
    return Plan(tuple(launches), tuple(selective_scan.results(call, save)))


def backward(call: Call, needs: tuple[str, ...]) -> Plan:
    passes, k = Passes(call), Passes(call).layout
    b, t, d, n = k.b, k.t, k.d, k.n
    spans = (t, k.chunks, k.span) if k.chunks > 1 else (t, cdiv(t, k.segment), k.segment)
    carry = k.chunks > 1
    launches = [
        passes.launch(
            kernels.recompute, spans[1], ("x", "delta", "A", "B", "C", "z", "delta_bias", "states", "dy"), spans,
            {
                "fine": passes.array(b, cdiv(t, TILE), n, d),
                "heads": passes.array(b, k.chunks, n, d) if carry else passes.array(1),
                "elapsed": passes.array(b, k.chunks, d) if carry else passes.array(1),
            },
            ("SOFTPLUS", "HAS_Z", "HAS_BIAS"), TILE=TILE, SEGMENT=k.segment, CARRY=carry,
        )
    ]  # fmt: skip
    if carry:
        launches.append(
            passes.launch(
                kernels.chunk_carries, 1, ("A", "heads", "elapsed", "dfinal_state"), (k.chunks,),
                {"carries": passes.array(b, k.chunks - 1, n, d)},
            )
        )  # fmt: skip
    gradients = {f"d{name}": Array(array.shape, array.dtype) for name, array in call.given.items() if array and name in needs}
    # Gradients that are summed over programs leave the sweep as partial sums: name -> (how many, what one looks like).
    partial = {
        "dA": (b * k.chunks, (d, n)), "dD": (b * k.chunks, (d,)), "ddelta_bias": (b * k.chunks, (d,)),
        "dB": (k.blocks, (b, t, n)), "dC": (k.blocks, (b, t, n)),
    }  # fmt: skip
    parts = {name: passes.array(count, *shape) for name, (count, shape) in partial.items() if name in gradients}

    def written(name: str) -> Array:
        return parts.get(name) or gradients.get(name) or passes.array(1)

    names = ("dx", "ddelta", "dz", "dinitial_state", "dA", "dB", "dC", "dD", "ddelta_bias")
    needed = {"NEED_X": "dx", "NEED_DELTA": "ddelta", "NEED_A": "dA", "NEED_B": "dB", "NEED_C": "dC", "NEED_D": "dD", "NEED_Z": "dz"}
    needed |= {"NEED_BIAS": "ddelta_bias", "NEED_INITIAL": "dinitial_state"}
    launches.append(
        passes.launch(
            kernels.reverse, k.chunks,
            ("x", "delta", "A", "B", "C", "D", "z", "delta_bias", "fine", "carries", "dy", "dfinal_state"), (t, k.chunks, k.span, b),
            {(name + "_parts" if name in parts else name): written(name) for name in names},
            ("SOFTPLUS", "HAS_D", "HAS_Z", "HAS_BIAS"), TILE=TILE, **{flag: name in gradients for flag, name in needed.items()},
        )
    )  # fmt: skip
    launches += [passes.sum(f"{name}_parts", partial[name][0], name, gradients[name]) for name in parts]
    return Plan(tuple(launches), tuple(gradients))


selective_scan = Op(
    name="selective_scan",
    signature=Signature.parse(SIGNATURE),
    options={"delta_softplus": Flag()},
    reference=reference,
    forward=forward,
    saves=lambda options: ("states",),
    saved=saved,
    backward=backward,
    batch="b",
    cases=CASES,
    doc=__doc__ or "",
)
