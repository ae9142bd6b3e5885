"""An op: one declaration, from which each frontend makes a differentiable function."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from bridge import tuning
from bridge.backends import BACKENDS
from bridge.case import Case
from bridge.dtypes import FLOATS
from bridge.options import Flag, Option
from bridge.plan import Plan
from bridge.signature import Argument, Array, Given, Shape, Signature, Sizes
from bridge.tuning import Tunable
from bridge.vmap import Position, position

# What references may call on the array namespace, besides what the frontends add to it: torch and jax.numpy agree on these.
FUNCTIONS = [
    "abs", "all", "broadcast_to", "clip", "exp", "finfo", "log", "logaddexp", "ones_like", "reshape", "searchsorted",
    "sqrt", "sum", "swapaxes", "where", "zeros_like",
]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What a plan is computed from: the arrays of one call, its options, and the kind of GPU (see bridge.tuning; none on a
    CPU). It hashes, so that plans are kept."""

    signature: Signature
    arrays: tuple[Array | None, ...]
    settings: tuple[tuple[str, Any], ...]
    card: str = ""

    @cached_property
    def hashed(self) -> int:
        return hash((self.signature, self.arrays, self.settings, self.card))

    def __hash__(self) -> int:
        return self.hashed  # which goes through everything: calls are kept, and each looks for its plans

    @cached_property
    def given(self) -> dict[str, Array | None]:
        return dict(zip((i.name for i in self.signature.inputs), self.arrays, strict=True))

    @cached_property
    def sizes(self) -> Sizes:
        return self.signature.sizes("", {name: array.shape for name, array in self.given.items() if array is not None})

    @cached_property
    def dtypes(self) -> dict[str, str]:
        return {name: array.dtype for name, array in self.given.items() if array is not None}

    @cached_property
    def floating(self) -> tuple[str, ...]:
        """The inputs that are there and can have a gradient."""
        return tuple(i.name for i in self.signature.inputs if i.floating and i.name in self.dtypes)

    @cached_property
    def options(self) -> dict[str, Any]:
        return dict(self.settings)

    @cached_property
    def outputs(self) -> dict[str, Array]:
        """Every output, optional ones too: a forward pass computes them all."""
        sizes = self.sizes
        return {o.name: Array(sizes.shape(sizes.forms[o.name]), o.dtype(self.dtypes)) for o in self.signature.outputs}

    def has(self, name: str) -> bool:
        return name in self.dtypes

    def array(self, name: str) -> Array:
        """An input that is there."""
        array = self.given[name]
        assert array is not None, name
        return array


@dataclass(frozen=True, eq=False)
class Op:
    """A named differentiable function of arrays.

    forward(call, save) gives the plan of the forward pass: it returns the outputs in the signature's order, then, where
    `save` asks for it, what is saved for the backward pass. saves(options) names what that is: outputs and further
    arrays; saved(call) gives the further ones, in order, each with the batch first. backward(call, needs) gives the
    plan of the gradients named in `needs` (inputs, in the signature's order); it may use the inputs, what was saved,
    and the gradient of output y under the name dy; it returns the gradient of input x under the name dx. Without a
    `backward`, gradients go through the reference.

    reference(xp, scan, *inputs, **options) is the loop that defines the op; it returns a tuple of the outputs. `xp` has
    exp, max, sum, where, ... as in the array API standard, besides zeros(shape, like), arange(count, like), stop_gradient(x),
    put(x, i, rows), which is x with other rows at the indices i, and repeat(count, step, x), which is x after `count` times
    x = step(x). scan(step, carry, xs) runs step(carry, now) -> (carry, out) over the second axis of each of `xs`, and stacks
    the outs along their second axis.

    reference_backward(xp, scan, inputs, cotangents, **options) is for an op whose gradient is not the derivative of its
    loop: it returns the gradients of the inputs, or None where the derivative of the loop is meant after all.

    `limits` holds the sizes that a dimension can have, where not all are allowed. refuse(call) says what else is wrong with
    the shapes of a call, and values[x](call, array) with the values of an integer input x, which is asked where they can be
    read without waiting for a GPU; both give None where nothing is.

    `tunables` declares, for each pass ("forward", "backward"), the numbers that its plans can be made with; tuned(call, pass)
    gives them. They differ between kinds of GPU and between `size_classes`, of which size_class(call) is one. What is saved
    must not depend on them: the two passes can have different ones, and fake tensors know no card.

    exponentials(call, pass) counts the exponentials that the plan of a pass computes, for an op whose speed they limit. `models`
    are sizes that users run, and `sweeps` series of cases in which one size grows: both are for bench, on a GPU.

    `batch` names the dimension over which nothing but inputs without it is shared: vmap folds the mapped axis into it.
    Where the input named `packing` is given, several sequences share one batch, and there is nothing to fold into.

    `channels` names the dimension each of whose entries is computed by itself, too, and then a dimension of groups of them,
    where there are such. Batch and channels can be split over devices (bridge/sharding.py); to that end `saved_dims[x]` says
    which of them the axes of a further array x are, "b _ d" for one with the batch first and channels last.

    flops(call) counts the floating-point operations of the forward and of the backward pass by their definition: additions,
    multiplications, divisions, exponentials and logarithms, one each, and nothing that is only computed again.
    """

    name: str
    signature: Signature
    reference: Callable[..., tuple]
    forward: Callable[[Call, bool], Plan]
    saves: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    saved: Callable[[Call], Mapping[str, Array]] = lambda call: {}
    backward: Callable[[Call, tuple[str, ...]], Plan] | None = None
    reference_backward: Callable[..., tuple | None] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    limits: Mapping[str, range] = field(default_factory=dict)
    refuse: Callable[[Call], str | None] = lambda call: None
    values: Mapping[str, Callable[[Call, np.ndarray], str | None]] = field(default_factory=dict)
    batch: str | None = None
    packing: str | None = None
    tunables: Mapping[str, Mapping[str, Tunable]] = field(default_factory=dict)
    size_classes: tuple[str, ...] = ("any",)
    size_class: Callable[[Call], str] = lambda call: "any"
    exponentials: Callable[[Call, str], int] | None = None
    channels: tuple[str, ...] = ()
    saved_dims: Mapping[str, str] = field(default_factory=dict)
    flops: Callable[[Call], tuple[int, int]] | None = None
    cases: tuple[Case, ...] = ()
    models: tuple[Case, ...] = ()
    sweeps: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)
    doc: str = ""

    # The options, then a flag for each optional output; the names of the outputs.
    settings: Mapping[str, Option] = field(init=False)
    output_names: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        flags = {f"return_{o.name}": Flag() for o in self.signature.outputs if o.optional}
        object.__setattr__(self, "settings", {**self.options, **flags})
        object.__setattr__(self, "output_names", tuple(o.name for o in self.signature.outputs))

    def function(self, module: str, call: Callable[[tuple, tuple, str | None], Any]) -> Callable[..., Any]:
        """A Python function of `module` with this op's name, arguments and docstring, which hands them on to `call`.

        Its source is written out, as dataclasses does for __init__: a wrapper with *args would cost every call the
        work of binding them, and torch.compile could not look into it.
        """
        inputs, behind = ([i.name + "=None" * i.optional for i in self.signature.inputs if i.keyword is k] for k in (False, True))
        values = ", ".join(i.name for i in self.signature.inputs)
        options = "".join(f"{name}={option.default!r}, " for name, option in self.settings.items()) + "".join(f"{b}, " for b in behind)
        chosen = "".join(f"{name}, " for name in self.settings)
        source = f"def {self.name}({', '.join(inputs)}, *, {options}backend=None):\n    return call(({values},), ({chosen}), backend)\n"
        scope: dict[str, Any] = {"call": call}
        exec(source, scope)
        function = scope[self.name]
        function.__module__, function.__doc__ = module, self.describe()
        return function

    def describe(self) -> str:
        """The docstring of the op's functions: what it computes, then its arguments and results in the signature's letters."""
        lines = [self.doc.strip(), "", "Inputs, in one of " + ", ".join(FLOATS) + " (float64 not mixed with others):", ""]
        for i in self.signature.inputs:
            dtypes = "" if i.floating else f", in {' or '.join(i.dtypes)}"
            lines.append(f"    {i.name}: {_forms(i)}{dtypes}" + ", optional" * i.optional + ", by keyword" * i.keyword)
        lines += ["", "Options, by keyword:", ""]
        lines += [f"    {name} = {option.default!r}{option.allowed}" for name, option in self.settings.items()]
        lines += [f"    backend = None, or one of {', '.join(map(repr, BACKENDS))}", "", "Returns:", ""]
        for o in self.signature.outputs:
            dtype = f"float32 (float64 where {o.source} is)" if o.wide else f"the dtype of {o.source}"
            lines.append(f"    {o.name}: {_forms(o)}, in {dtype}" + (f"; with return_{o.name}=True" if o.optional else ""))
        limits = "".join(f" {d} can be {r[0]} to {r[-1]}." for d, r in self.limits.items())
        lines += ["", "Raises TypeError for a wrong kind or dtype, ValueError for a wrong shape, size, value or device." + limits]
        return "\n".join(lines) + "\n"

    def loop(self, module: str, run: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """The reference as a function of `module` with this op's arguments and results; `run(op, arrays, options)` runs it."""
        return self.function(module, lambda arrays, values, _: self.returned(run(self, arrays, values[: len(self.options)]), values))

    def check_options(self, values: Sequence[Any], backend: str | None) -> tuple:
        """The options as plain values. Raises TypeError or ValueError for a bad one, and for an unknown backend."""
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"{self.name}: backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        return tuple(
            option.check(f"{self.name}: {name}", value) for (name, option), value in zip(self.settings.items(), values, strict=True)
        )

    def call(self, arrays: Sequence[Given | None], options: Sequence[Any], card: str = "") -> Call:
        """A call, checked. `options` are the values of `self.options`, in order. Raises what is wrong with shapes and dtypes."""
        sizes = self.signature.check(self.name, dict(zip((i.name for i in self.signature.inputs), arrays, strict=True)), self.limits)
        plain = tuple(a and Array(a.shape, a.dtype) for a in arrays)
        call = Call(self.signature, plain, tuple(zip(self.options, options, strict=True)), card)
        vars(call)["sizes"] = sizes  # the cached property: every call comes through here, and need not find them again
        wrong = self.refuse(call)
        if wrong:
            raise ValueError(f"{self.name}: {wrong}")
        return call

    def known_call(self, arrays: tuple[Given | None, ...], options: tuple, card: str = "") -> Call:
        """The same, kept for the next call of this kind: for sizes that are plain numbers. A check takes as long as a launch."""
        return _known_call(self, arrays, options, card)

    def check_values(self, call: Call, arrays: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError for what is wrong with the values of integer inputs, by name."""
        for name, array in arrays.items():
            wrong = self.values[name](call, array)
            if wrong:
                raise ValueError(f"{self.name}: {name} {wrong}")

    def batches(self, shapes: Mapping[str, Shape], times: int) -> tuple[list[Position], list[Position]]:
        """Where the batch stands in each input and in each output, for inputs of these shapes; nowhere, if a batch `times` as
        large would be read in another way."""
        sizes = self.signature.sizes(self.name, shapes, self.limits)
        batch = None if self.packing in shapes else self.batch
        if batch is not None and batch in sizes:
            more = sizes.with_size(batch, sizes[batch] * times)
            larger = {name: more.shape(form) for name, form in sizes.forms.items() if name in shapes}
            if self.signature.sizes(self.name, larger, self.limits).forms != sizes.forms:
                batch = None
        inputs, outputs = self.signature.inputs, self.signature.outputs
        return [position(batch, sizes.forms.get(i.name, ())) for i in inputs], [position(batch, sizes.forms[o.name]) for o in outputs]

    def returned(self, outputs: Sequence[Any], settings: Sequence[Any]) -> Any:
        """What a call hands to its caller: the outputs that it asked for, bare where it is one."""
        chosen = dict(zip(self.settings, settings, strict=True))
        wanted = [value for name, value in zip(self.output_names, outputs, strict=False) if chosen.get(f"return_{name}", True)]
        return wanted[0] if len(wanted) == 1 else tuple(wanted)

    def results(self, call: Call, save: bool) -> dict[str, Array]:
        """What the forward pass returns: the outputs, then the further arrays that it saves."""
        return {**call.outputs, **(self.saved(call) if save else {})}

    def kept(self, results: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """What the backward pass wants of the forward one's results."""
        wanted, further = self._saves(options)
        names = [*self.output_names, *further]
        return [results[names.index(name)] for name in wanted]

    def further(self, options: Sequence[Any]) -> int:
        """How many arrays the forward pass saves that are no outputs."""
        return len(self._saves(options)[1])

    def _saves(self, options: Sequence[Any]) -> tuple[tuple[str, ...], list[str]]:
        wanted = self.saves(dict(zip(self.options, options, strict=True)))
        return wanted, [name for name in wanted if name not in self.output_names]

    def tuned(self, call: Call, which: str) -> dict[str, int]:
        """The values of what can be tuned in a pass, for the sizes and the card of a call."""
        return tuning.values(self, call.card, which, self.size_class(call))

    def forward_plan(self, call: Call, save: bool) -> Plan:
        return _forward_plan(self, call, save)

    def backward_plan(self, call: Call, needs: tuple[str, ...]) -> Plan:
        return _backward_plan(self, call, needs)


@lru_cache(maxsize=1024)
def _known_call(op: Op, arrays: tuple[Given | None, ...], options: tuple, card: str) -> Call:
    return op.call(arrays, options, card)


@lru_cache(maxsize=1024)
def _forward_plan(op: Op, call: Call, save: bool) -> Plan:
    return op.forward(call, save)


@lru_cache(maxsize=1024)
def _backward_plan(op: Op, call: Call, needs: tuple[str, ...]) -> Plan:
    assert op.backward is not None
    return op.backward(call, needs)


def _forms(argument: Argument) -> str:
    """The dimensions of an argument in words."""
    forms = [" ".join(form) for form in argument.forms]
    either = re.search(r"(\w+)\|(\w+)", forms[0])
    if either:
        forms = [forms[0].replace(either[0], either[2]), f"{forms[0].replace(either[0], either[1])} where there is an {either[1]}"]
    return ", or ".join(forms)
