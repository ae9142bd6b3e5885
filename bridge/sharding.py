"""The rule for sharding: along which dimensions the arrays of a call can be split over devices, and what is summed then.

A dimension can be split where every device can compute its part of the outputs from its parts of the inputs alone: the batch
of an op, and the channels that it declares. An input that lacks a split dimension is needed whole by every device, and each
finds a part of its gradient: their sum is the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.op import Call, Op
from bridge.signature import ELLIPSIS, Array, Dims, Given, Shape

Axes = tuple[str | None, ...]  # for each axis of an array, the dimension that it is split along; None for one that stays whole


@dataclass(frozen=True)
class Rule:
    """How the arrays of one call can be split.

    `counts` has, for each dimension that can be split, the numbers that its parts must divide: `{"b": (8,), "d": (64, 4)}` for
    a batch of 8, and 64 channels in 4 groups, which are split together. Leading dimensions are called "...0", "...1", and so on.

    `inputs` (None for one that isn't there), `outputs` and `saved` stand in the order of the signature and of what the forward
    pass saves besides outputs. The gradient of an input is split as the input is, that of an output as the output.
    """

    counts: Mapping[str, tuple[int, ...]]
    inputs: tuple[Axes | None, ...]
    outputs: tuple[Axes, ...]
    saved: tuple[Axes, ...]

    def summed(self, i: int) -> tuple[str, ...]:
        """The dimensions over whose parts the gradient of input i is a sum: those that the input lacks."""
        axes = self.inputs[i] or ()
        return tuple(dim for dim in self.counts if dim not in axes)

    def divides(self, dim: str, parts: int) -> bool:
        """Whether a dimension can be split into so many equal parts."""
        return all(count % parts == 0 for count in self.counts[dim])


@dataclass(frozen=True)
class Pass:
    """How the arrays of a forward or backward pass are split, those that are there, in the order that the pass has them.

    `sums` are, for each result, the dimensions over whose parts it is a sum.
    """

    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sums: tuple[tuple[str, ...], ...]


def forward_pass(op: Op, call: Call, save: bool) -> Pass:
    """Inputs -> outputs, then what is saved besides them."""
    whole = rule(op, call)
    results = whole.outputs + (whole.saved if save else ())
    return Pass(tuple(axes for axes in whole.inputs if axes is not None), results, ((),) * len(results))


def backward_pass(op: Op, call: Call, needs: Sequence[bool]) -> Pass:
    """Inputs, what the forward pass kept, gradients of outputs -> gradients of the inputs that `needs` marks."""
    whole = rule(op, call)
    kept = op.kept((*whole.outputs, *whole.saved), list(call.options.values()))
    needed = [i for i, need in enumerate(needs) if need]
    return Pass(
        tuple(axes for axes in (*whole.inputs, *kept, *whole.outputs) if axes is not None),
        tuple(whole.inputs[i] or () for i in needed),
        tuple(map(whole.summed, needed)),
    )


def rule(op: Op, call: Call) -> Rule:
    """How the arrays of a call can be split."""
    further = op.saved(call)
    dims = {name: _spread(call, call.sizes.forms[name]) for name in (*call.dtypes, *op.output_names)}
    dims |= {name: _saved_dims(op, name, len(array.shape)) for name, array in further.items()}
    made = [dims[name] for name in (*op.output_names, *further)]
    # What lacks a dimension that is split would have to be added up in another way than gradients.
    groups = [
        group
        for group in _groups(op, call)
        if all(_times(group, d) == 1 for d in made) and all(_times(group, d) <= 1 for d in dims.values())
    ]
    first = {letter: group[0] for group in groups for letter in group}

    def axes(name: str) -> Axes:
        return tuple(map(first.get, dims[name]))

    return Rule(
        {group[0]: tuple(_size(call, letter) for letter in group) for group in groups},
        tuple(axes(i.name) if call.has(i.name) else None for i in op.signature.inputs),
        tuple(map(axes, op.output_names)),
        tuple(map(axes, further)),
    )


def part(op: Op, call: Call, parts: Mapping[str, int]) -> Call | None:
    """The call that each device carries out, where dimensions are split into so many parts; None where that isn't possible:
    where they don't divide, or where the parts of the arrays would be read in other forms, or make other results."""
    whole = rule(op, call)
    if not all(whole.divides(dim, n) for dim, n in parts.items()):
        return None

    def shape(array: Array, axes: Axes) -> Shape:
        return tuple(size // parts.get(dim or "", 1) for size, dim in zip(array.shape, axes, strict=True))

    arrays = [a if a is None else Given(shape(a, axes or ()), a.dtype) for a, axes in zip(call.arrays, whole.inputs, strict=True)]
    try:
        local = op.call(arrays, list(call.options.values()))
    except ValueError:
        return None
    results = zip(op.results(call, True).values(), op.results(local, True).values(), (*whole.outputs, *whole.saved), strict=True)
    same = local.sizes.forms == call.sizes.forms and all(shape(of_all, axes) == of_part.shape for of_all, of_part, axes in results)
    return local if same else None


def _groups(op: Op, call: Call) -> list[tuple[str, ...]]:
    """The dimensions that the op lets be split, those together that are split together."""
    groups: list[tuple[str, ...]] = []
    if op.batch == ELLIPSIS:
        groups += [(name,) for name in _leading(call)]
    elif op.batch is not None and op.batch in call.sizes and not call.has(op.packing or ""):
        groups.append((op.batch,))
    # One group is no bound: what it has is shared by all channels.
    channels = tuple(letter for letter in op.channels if letter in call.sizes and (letter == op.channels[0] or call.sizes[letter] != 1))
    return [*groups, channels] if channels else groups


def _leading(call: Call) -> list[str]:
    return [f"{ELLIPSIS}{i}" for i in range(len(call.sizes.leading))]


def _spread(call: Call, dims: Dims) -> Dims:
    """Dimensions, with a name for each leading one."""
    return tuple(name for dim in dims for name in (_leading(call) if dim == ELLIPSIS else [dim]))


def _saved_dims(op: Op, name: str, ndim: int) -> Dims:
    return tuple(op.saved_dims[name].split()) if name in op.saved_dims else (op.batch or "_", *["_"] * (ndim - 1))


def _times(group: tuple[str, ...], dims: Dims) -> int:
    return sum(dim in group for dim in dims)


def _size(call: Call, letter: str) -> int:
    return call.sizes[letter] if letter in call.sizes else call.sizes.leading[int(letter.removeprefix(ELLIPSIS))]
