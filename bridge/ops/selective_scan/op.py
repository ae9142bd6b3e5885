"""selective_scan: Mamba's S6, a selective diagonal state-space scan.

    dt_t = delta_t + delta_bias;  dt_t = log1p(exp(dt_t)) if delta_softplus
    h_t  = exp(dt_t A) h_{t-1} + dt_t B_t x_t
    y_t  = <h_t, C_t> + D x_t;    y_t = y_t * silu(z_t)

(Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.2: A is discretised
exactly, B by Euler's rule.)

b is the batch, t time, d channels, n states. With groups, channel c uses group c // (d/g) of B or C, which must divide d.
B or C of shape d n is constant in time. The state before the first step is initial_state, or zero.

cu_seqlens packs s sequences into one batch of size 1: sequence i takes the steps from cu_seqlens[i] to cu_seqlens[i+1],
so that it rises from 0 to t. No state crosses a boundary; a sequence can be empty. Where its values can't be read without
waiting (on a GPU, or while a function is traced) and don't rise from 0 to t, results are NaN.

Dtypes can be mixed: each array is read in its own, arithmetic is in float32, and each gradient has the dtype of its input.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bridge.dtypes import SIZES
from bridge.language import INTERPRETING, sum_leading, widen
from bridge.op import Call, Op
from bridge.ops.selective_scan import backward as backwards
from bridge.ops.selective_scan import forward as forwards
from bridge.ops.selective_scan.cases import CASES, MODELS, SWEEPS
from bridge.ops.selective_scan.chunks import string
from bridge.ops.selective_scan.flops import flops
from bridge.ops.selective_scan.reference import selective_scan as reference
from bridge.options import Flag
from bridge.plan import Launch, Plan, cdiv, power_of_two
from bridge.signature import Array, Dims, Signature
from bridge.tuning import Tunable

SIGNATURE = """
    x: b t d, delta: b t d, A: d n, B: b t n or b t g n or d n, C: b t n or b t g n or d n,
    D?: d, z?: b t d, delta_bias?: d, initial_state?: s|b d n, *, cu_seqlens?: s+1 (int32 int64)
    -> y: b t d like x, final_state?: s|b d n wide x
"""

TILE = 8  # steps that are read, and taken backwards, together: their states fit the registers
LANE = 8  # states of a channel in one lane's registers
SHORTEST = 256  # steps in a chunk of time
MANY = 64  # chunks of a sequence, from which on they needn't be as short as `longest`

# full: one-warp programs that fill the GPU; wanted: how many to aim at where time is cut; longest: steps in a chunk, then.
# ahead: bytes of a channel that are read together going forward. kept: of a tile's powers, those of the last steps, from finding
# its states to going back. Programs of the backward pass hold more registers.
TUNABLES = {
    "forward": {
        "full": Tunable(600, (600, 1200)),
        "wanted": Tunable(2048, (1024, 2048, 4096)),
        "longest": Tunable(512, (512, 1024)),
        "ahead": Tunable(32, (16, 32)),
    },
    "backward": {
        "full": Tunable(1000, (1000, 2000)),
        "wanted": Tunable(2048, (1024, 2048, 4096)),
        "longest": Tunable(512, (512, 1024)),
        "kept": Tunable(2, (0, 2)),
    },
}
# The most programs, uncut, that a call of these sizes has.
CLASSES = {"few programs": 256, "some programs": 2048, "many programs": math.inf}


@dataclass(frozen=True)
class Layout:
    """How a call is cut into programs. It depends on sizes and the kind of GPU alone, so that results repeat bit for bit."""

    b: int
    t: int
    d: int
    n: int
    groups: int = 1
    packed: int | None = None  # how many sequences share the batch
    full: int = TUNABLES["forward"]["full"].default  # programs that are enough
    wanted: int = TUNABLES["forward"]["wanted"].default  # programs to reach where they aren't
    longest: int = TUNABLES["forward"]["longest"].default  # steps in a chunk of time, then

    @property
    def states(self) -> int:
        return power_of_two(self.n)

    @property
    def channels(self) -> int:
        """Channels of a program: 8 states a lane where it can be, and whole 32-byte sectors of a row. Of very many states,
        as many channels as 8 warps have registers for."""
        return min(max(256 // self.states, 16), 64) if self.states <= 128 else max(2048 // self.states, 4)

    @property
    def lane(self) -> int:
        """States of a channel that a lane holds: one where several warps share a program. The interpreter, which takes as long for
        a number as for a tile, has one tile."""
        return 1 if INTERPRETING or self.num_warps > 1 else min(self.states, LANE)

    @property
    def reverse_lane(self) -> int:
        """The same of the backward sweep, which has more to keep of each."""
        return min(self.lane, LANE // 2)

    @property
    def num_warps(self) -> int:
        """One, since it needs no barriers, as long as a warp has registers for the states."""
        return 1 if self.states <= 64 else min(self.states * self.channels // 256, 32)

    @property
    def blocks(self) -> int:
        """Blocks of channels in a group."""
        return cdiv(self.d // self.groups, self.channels)

    @property
    def segment(self) -> int:
        """Steps between saved states: at least 64, and at most one byte of state for each element of x."""
        return max(64, 4 * self.states)

    @property
    def programs(self) -> int:
        """Programs of a call whose time isn't cut."""
        return max(1, self.b * self.groups * self.blocks)

    @property
    def span(self) -> int:
        """Steps in a chunk, a multiple of the segment. Time is cut only where there are too few programs without: chunks
        cost a pass of their own."""
        if self.programs >= self.full:
            return max(cdiv(self.t, self.segment), 1) * self.segment
        wanted = max(cdiv(self.wanted, self.programs), min(cdiv(self.t, self.longest), MANY))
        return cdiv(max(cdiv(self.t, wanted), SHORTEST), self.segment) * self.segment

    @property
    def sequences(self) -> int:
        return self.b if self.packed is None else self.packed

    @property
    def each(self) -> int:
        """Chunks of a sequence, at most."""
        return max(1, cdiv(self.t, self.span))

    @property
    def chunks(self) -> int:
        """All chunks. Of packed sequences each has one at least, and no more than one that isn't full."""
        return self.b * self.each if self.packed is None else self.packed + self.t // self.span

    @property
    def cut(self) -> tuple[int, int, int]:
        return self.t, self.each, self.span


class Passes:
    """What the plans share: the layout of a call, and how a launch is written.

    `renamed` says under which names this op has what the kernels call initial_state and final_state.
    """

    def __init__(self, call: Call, renamed: Mapping[str, str] | None = None, **target: int):
        self.call, self.renamed = call, dict(renamed or {})
        sizes, forms = call.sizes, call.sizes.forms
        self.groups = {name: self.groups_of(forms[name]) for name in "BC"}
        groups = max(1, *self.groups.values())
        packed = sizes["s"] if call.has("cu_seqlens") else None
        self.layout = Layout(sizes["b"], sizes.get("t", 1), sizes["d"], sizes["n"], groups, packed, **target)
        self.tile = TILE if "t" in sizes else 1
        self.wide = "float64" if call.dtypes["x"] == "float64" else "float32"
        self.flags = {
            "R": self.layout.lane,
            "SOFTPLUS": call.options["delta_softplus"],
            "PACKED": packed is not None,
            "GB": self.groups["B"],
            "GC": self.groups["C"],
            "HAS_D": call.has("D"),
            "HAS_Z": call.has("z"),
            "HAS_BIAS": call.has("delta_bias"),
            "HAS_INITIAL": call.has(self.name("initial_state")),
        }

    def groups_of(self, form: Dims) -> int:
        """How many groups of channels have a B or C of their own; 0 where it is constant in time."""
        return 0 if "b" not in form else self.call.sizes["g"] if "g" in form else 1

    def name(self, kernels_name: str) -> str:
        return self.renamed.get(kernels_name, kernels_name)

    def widened(self) -> list[Launch]:
        """B and C in the type of arithmetic: every block of channels reads them."""
        in_time = [name for name, groups in self.groups.items() if groups and not self.renamed.get(name)]
        names = [name for name in in_time if self.call.array(name).dtype != self.wide]
        if not names:
            return []
        outputs = {f"{name}_wide": self.array(*self.call.array(name).shape) for name in names}
        sizes = [math.prod(array.shape) for array in outputs.values()]
        if len(names) == 1:
            outputs, sizes = {**outputs, "nothing_wide": self.array(1)}, [*sizes, 0]
        self.renamed |= {name: f"{name}_wide" for name in names}
        block = 1024
        grid = sum(cdiv(size, block) for size in sizes)
        return [Launch(widen, grid, (names[0], names[-1]), tuple(sizes), outputs, {"BLOCK": block}, wide=self.wide)]

    def array(self, *shape: int) -> Array:
        return Array(shape, self.wide)

    def launch(self, kernel, count: int, inputs: str, scalars, outputs, flags=(), over=None, **constants) -> Launch:
        """A program for each block of channels and each of `count` chunks or sequences."""
        k, flags = self.layout, {name: self.flags[name] for name in flags}
        sizes = dict(CHANNELS=k.d, STATES=k.n, GROUPS=k.groups, BD=k.channels, BN=k.states)
        return Launch(
            kernel, k.groups * k.blocks * count, tuple(map(self.name, inputs.split())), scalars, outputs, {**sizes, **constants, **flags},
            wide=self.wide, num_warps=k.num_warps, over=over or {},
        )  # fmt: skip

    def cuts(self) -> list[Launch]:
        """The chunks of packed sequences."""
        k = self.layout
        if k.packed is None:
            return []
        outputs = {"cuts": Array((k.chunks, 5), "int32"), "offsets": Array((k.packed + 1,), "int32"), "poison": self.array(1)}
        scalars = (k.packed, k.t, k.chunks, k.span)
        return [Launch(forwards.cut_sequences, k.packed + 1, ("cu_seqlens",), scalars, outputs, {"BLOCK": 256}, wide=self.wide)]

    def strung(self, given: str, result: str, has_initial: bool, back: bool) -> Launch:
        """Chunks strung together, from the first state and what each adds."""
        k = self.layout
        block, at_once = (power_of_two(k.n * k.d), 4) if INTERPRETING else (32, 16)
        constants = dict(
            CHANNELS=k.d, STATES=k.n, BLOCK=block, AT_ONCE=at_once, HAS_INITIAL=has_initial, PACKED=k.packed is not None, BACK=back
        )
        return Launch(
            string, k.sequences * cdiv(k.n * k.d, block), ("A", *given.split(), "elapsed", "offsets"), (k.each,),
            {result: self.array(k.chunks, k.n, k.d)}, constants, wide=self.wide, num_warps=1,
        )  # fmt: skip

    def workspace(self) -> Array:
        """The state before every tile of time, then dB and dC of its steps. In tiles.py, at_tile says what lies where."""
        k = self.layout
        return self.array(k.groups * k.blocks, k.b, cdiv(k.t, self.tile), k.n * max(k.channels, 2 * self.tile))

    def reverse(self, needs: tuple[str, ...], kept: int | None = None) -> list[Launch]:
        """The backward sweep and the sums of what leaves it in parts. `kept` steps of each tile keep their powers; None where no
        state was recomputed: then there is one step, from the initial state."""
        recomputed = kept is not None
        # Tiles of packed sequences begin anywhere, and the sums of one could hit the states of another.
        over = {"blocks_sums": "fine"} if recomputed and self.layout.packed is None else None
        k, call = self.layout, self.call
        gradients = {f"d{name}": call.array(name) for name in needs}
        # Gradients that are summed over programs leave the sweep as partial sums: those over time one by one,
        in_time = [name for name in ("dA", "dD", "ddelta_bias", *(f"d{n}" for n, g in self.groups.items() if not g)) if name in gradients]
        # those over channels in the workspace.
        over_channels = [f"d{name}" for name, groups in self.groups.items() if groups and f"d{name}" in gradients]
        parts = {name: self.array(k.chunks, *gradients[name].shape) for name in in_time}
        initial = f"d{self.name('initial_state')}"
        names = ("dx", "ddelta", "dz", initial, "dA", "dB", "dC", "dD", "ddelta_bias")
        needed = {"NEED_X": "dx", "NEED_DELTA": "ddelta", "NEED_A": "dA", "NEED_B": "dB", "NEED_C": "dC", "NEED_D": "dD"}
        needed |= {"NEED_Z": "dz", "NEED_BIAS": "ddelta_bias", "NEED_INITIAL": initial}
        outputs: dict[str, Array] = {}
        for name in names:
            if name in parts:
                outputs[f"{name}_parts"] = parts[name]
            elif name in over_channels or name not in gradients:
                outputs[f"{name}_unused"] = self.array(1)
            else:
                outputs[name] = gradients[name]
        sweep = self.launch(
            backwards.reverse, k.chunks,
            "x delta A B C D z delta_bias initial_state states fine after carries cuts poison dy dfinal_state", (*k.cut, k.b),
            {**outputs, "blocks_sums": self.workspace() if over_channels else self.array(1)},
            ("SOFTPLUS", "GB", "GC", "HAS_D", "HAS_Z", "HAS_BIAS", "HAS_INITIAL", "PACKED"), TILE=self.tile, R=k.reverse_lane,
            KEPT=kept or 0, SEGMENT=k.segment, HAS_FINE=recomputed, SHARED=k.num_warps > 1,
            over=over if over_channels else None, **{flag: name in gradients for flag, name in needed.items()},
        )  # fmt: skip
        sums = [self.sum(f"{name}_parts", k.chunks, name, gradients[name]) for name in in_time]
        return [sweep, *sums, *(self.sum_blocks(name, gradients[name]) for name in over_channels)]

    def sum_blocks(self, name: str, result: Array) -> Launch:
        k, block = self.layout, 128
        constants = dict(
            CHANNELS=k.d, STATES=k.n, GROUPS=k.groups, BD=k.channels, TILE=self.tile, G=self.groups[name[1:]], SECOND=name == "dC"
        )
        return Launch(
            backwards.sum_blocks, cdiv(math.prod(result.shape), block), ("blocks_sums",), (k.t, k.b), {name: result},
            {**constants, "BLOCK": block}, wide=self.wide,
        )  # fmt: skip

    def sum(self, source: str, count: int, name: str, result: Array) -> Launch:
        size, block = math.prod(result.shape), 256
        return Launch(sum_leading, cdiv(size, block), (source,), (count, size), {name: result}, {"BLOCK": block}, wide=self.wide)


def saved(call: Call) -> dict[str, Array]:
    """The state before every segment of time."""
    passes = Passes(call)
    k = passes.layout
    return {"states": passes.array(k.b, cdiv(k.t, k.segment), k.n, k.d)}


def size_class(call: Call) -> str:
    programs = Passes(call).layout.programs
    return next(name for name, most in CLASSES.items() if programs <= most)


def exponentials(call: Call, which: str) -> int:
    """A decay for each state and step: one going forward, and another where chunks first find their ends. Backward: one to
    recompute the states, which needn't go over the last tile of a segment where time isn't cut, and in each tile one forward and
    one back, of which those that were kept and one that nobody needs are left out."""
    sizes, cut = call.sizes, Passes(call, None, **cutting(call, which)).layout.each > 1
    states = sizes["b"] * sizes["t"] * sizes["d"] * sizes["n"]
    if which == "forward":
        return states * (2 if cut else 1)
    kept = selective_scan.tuned(call, "backward")["kept"]
    return states * ((TILE if cut else TILE - 1) + 2 * TILE - max(kept, 1)) // TILE


def cutting(call: Call, which: str) -> dict[str, int]:
    """How a pass cuts time."""
    tuned = selective_scan.tuned(call, which)
    return {name: tuned[name] for name in ("full", "wanted", "longest")}


def forward(call: Call, save: bool) -> Plan:
    passes = Passes(call, None, **cutting(call, "forward"))
    ahead = selective_scan.tuned(call, "forward")["ahead"] // SIZES[call.dtypes["x"]]
    k = passes.layout
    launches = passes.cuts() + passes.widened()
    if k.each > 1:
        launches += [
            passes.launch(
                forwards.chunk_ends, k.chunks, "x delta A B delta_bias cuts", k.cut,
                {"ends": passes.array(k.chunks, k.n, k.d), "elapsed": passes.array(k.chunks, k.d)},
                ("GB", "SOFTPLUS", "HAS_BIAS", "PACKED", "R"), TILE=ahead,
            ),
            passes.strung("initial_state ends", "starts", passes.flags["HAS_INITIAL"], back=False),
        ]  # fmt: skip
    states = saved(call) if save else {"states": passes.array(1)}
    launches.append(
        passes.launch(
            forwards.scan, k.chunks, "x delta A B C D z delta_bias initial_state starts cuts poison", k.cut,
            {**call.outputs, **states},
            ("GB", "GC", "SOFTPLUS", "HAS_D", "HAS_Z", "HAS_BIAS", "HAS_INITIAL", "PACKED", "R"), TILE=ahead,
            SEGMENT=k.segment if save else 0,
        )
    )  # fmt: skip
    return Plan(tuple(launches), tuple(selective_scan.results(call, save)))


def backward(call: Call, needs: tuple[str, ...]) -> Plan:
    passes = Passes(call, None, **cutting(call, "backward"))
    k = passes.layout
    carry = k.each > 1
    # One chunk a sequence leaves most of a GPU idle, and from the states that were kept every segment can start at once.
    chunks, cut = k.chunks, k.cut
    if not carry and k.packed is None:
        each = cdiv(k.t, k.segment)
        chunks, cut = k.b * each, (k.t, each, k.segment)
    launches = passes.cuts() + passes.widened()
    launches.append(
        passes.launch(
            backwards.recompute, chunks, "x delta A B C z delta_bias initial_state states cuts poison dy", (*cut, k.b),
            {
                "fine": passes.workspace(),
                "after": passes.array(k.chunks, k.n, k.d),
                "heads": passes.array(k.chunks, k.n, k.d) if carry else passes.array(1),
                "elapsed": passes.array(k.chunks, k.d) if carry else passes.array(1),
            },
            ("GB", "GC", "SOFTPLUS", "HAS_Z", "HAS_BIAS", "HAS_INITIAL", "PACKED", "R"), TILE=TILE, SEGMENT=k.segment, CARRY=carry,
        )
    )  # fmt: skip
    if carry:
        launches.append(passes.strung("dfinal_state heads", "carries", True, back=True))
    launches += passes.reverse(needs, selective_scan.tuned(call, "backward")["kept"])
    return Plan(tuple(launches), tuple(f"d{name}" for name in needs))


def refuse(call: Call) -> str | None:
    """What is wrong with the shapes of a call, beyond what the signature says."""
    sizes = call.sizes
    if sizes.get("g") == 0 or sizes["d"] % sizes.get("g", 1):
        name = next(name for name in "BC" if "g" in sizes.forms[name])
        shape, form = call.array(name).shape, " ".join(sizes.forms[name])
        return f"{name} must have shape ({form}) with g a divisor of d = {sizes['d']}, got {shape}"
    if call.has("cu_seqlens") and sizes["b"] != 1:
        return f"x must have shape (b t d) with b = 1 where cu_seqlens packs sequences, got {call.array('x').shape}"
    return None


def refuse_cu_seqlens(call: Call, values: np.ndarray) -> str | None:
    if values[0] != 0 or values[-1] != call.sizes["t"] or (values[1:] < values[:-1]).any():
        return f"must rise from 0 to t = {call.sizes['t']} (set by x), never falling, got {np.array2string(values, threshold=20)}"
    return None


selective_scan = Op(
    name="selective_scan",
    signature=Signature.parse(SIGNATURE),
    options={"delta_softplus": Flag()},
    limits={"s": range(1, 1 << 31)},
    refuse=refuse,
    values={"cu_seqlens": refuse_cu_seqlens},
    reference=reference,
    forward=forward,
    saves=lambda options: ("states",),
    saved=saved,
    backward=backward,
    batch="b",
    packing="cu_seqlens",
    tunables=TUNABLES,
    size_classes=tuple(CLASSES),
    size_class=size_class,
    exponentials=exponentials,
    channels=("d", "g"),
    saved_dims={"states": "b _ _ d"},
    flops=flops,
    cases=CASES,
    models=MODELS,
    sweeps=SWEEPS,
    doc=__doc__ or "",
)
