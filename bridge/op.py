"""An op: one declaration, from which each frontend makes a differentiable function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from bridge.backends import BACKENDS
from bridge.case import Case
from bridge.options import Flag, Option
from bridge.plan import Plan
from bridge.signature import Array, Given, Output, Signature, Sizes


@dataclass(frozen=True)
class Call:
    """What a plan is computed from: the arrays of one call and its options. It hashes, so that plans are kept."""

    signature: Signature
    arrays: tuple[Array | None, ...]
    settings: tuple[tuple[str, Any], ...]

    @cached_property
    def given(self) -> dict[str, Array | None]:
        return dict(zip((i.name for i in self.signature.inputs), self.arrays, strict=True))

    @cached_property
    def sizes(self) -> Sizes:
        return self.signature.check("", {k: a and Given(a.shape, a.dtype, "") for k, a in self.given.items()})

    @cached_property
    def dtypes(self) -> dict[str, str]:
        return {name: array.dtype for name, array in self.given.items() if array is not None}

    @cached_property
    def options(self) -> dict[str, Any]:
        return dict(self.settings)

    @cached_property
    def outputs(self) -> dict[str, Array]:
        """Every output, optional ones too: a forward pass computes them all."""
        return {o.name: Array(self.sizes.shape(o.dims), o.dtype(self.dtypes)) for o in self.signature.outputs}

    def has(self, name: str) -> bool:
        return name in self.dtypes


@dataclass(frozen=True, eq=False)
class Op:
    """A named differentiable function of arrays.

    forward(call, save) gives the plan of the forward pass: it returns the outputs in the signature's order and, where
    `save` asks for it, saves arrays for the backward one. backward(call, needs) gives the plan of the gradients named in `needs` (inputs, in
    the signature's order); it may use the inputs, the saved arrays, and the gradient of output y under the name dy; it
    returns the gradient of input x under the name dx. Without a `backward`, gradients go through the reference.

    reference(xp, scan, *inputs, **options) is the loop that defines the op; it returns a tuple of the outputs. `xp` has
    exp, sum, where, ... as in the array API standard; `scan(step, carry, xs)` runs step(carry, now) -> (carry, out)
    over the second axis of each of `xs` and stacks the outs along their second axis.

    reference_backward(xp, scan, inputs, cotangents, **options) is for an op whose gradient is not the derivative of its
    loop: it returns the gradients, or None where the derivative of the loop is meant after all.
    """

    name: str
    signature: Signature
    reference: Callable[..., tuple]
    forward: Callable[[Call, bool], Plan]
    backward: Callable[[Call, tuple[str, ...]], Plan] | None = None
    reference_backward: Callable[..., tuple | None] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    limits: Mapping[str, range] = field(default_factory=dict)
    batch: str | None = None
    cases: tuple[Case, ...] = ()
    doc: str = ""

    @cached_property
    def settings(self) -> dict[str, Option]:
        """The options, and a flag for each optional output."""
        flags = {f"return_{o.name}": Flag() for o in self.signature.outputs if o.optional}
        return {**self.options, **flags}

    @cached_property
    def python_signature(self) -> inspect.Signature:
        """Inputs in order, then options by keyword, then `backend`."""
        parameter, empty = inspect.Parameter, inspect.Parameter.empty
        inputs = [parameter(i.name, parameter.POSITIONAL_OR_KEYWORD, default=None if i.optional else empty) for i in self.signature.inputs]
        options = [parameter(name, parameter.KEYWORD_ONLY, default=o.default) for name, o in self.settings.items()]
        return inspect.Signature([*inputs, *options, parameter("backend", parameter.KEYWORD_ONLY, default=None)])

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], str | None]:
        """The inputs, the options and the backend of a Python call. Raises TypeError or ValueError for bad options."""
        try:
            bound = self.python_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        inputs = [values[i.name] for i in self.signature.inputs]
        options = {name: option.check(f"{self.name}: {name}", values[name]) for name, option in self.settings.items()}
        backend = values["backend"]
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"{self.name}: backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        return inputs, options, backend

    def check(self, arrays: Sequence[Given | None]) -> None:
        """Raise what is wrong with the arrays of a call."""
        self.signature.check(self.name, dict(zip((i.name for i in self.signature.inputs), arrays, strict=True)), self.limits)

    def call(self, arrays: Sequence[Array | None], options: Mapping[str, Any]) -> Call:
        plain = tuple(a and Array(tuple(a.shape), a.dtype) for a in arrays)
        return Call(self.signature, plain, tuple((name, options[name]) for name in self.options))

    def returned(self, options: Mapping[str, Any]) -> list[Output]:
        """The outputs that a call with these options returns."""
        return [o for o in self.signature.outputs if options.get(f"return_{o.name}", True)]

    def forward_plan(self, call: Call, save: bool) -> Plan:
        return _forward_plan(self, call, save)

    def backward_plan(self, call: Call, needs: tuple[str, ...]) -> Plan:
        return _backward_plan(self, call, needs)


@lru_cache(maxsize=1024)
def _forward_plan(op: Op, call: Call, save: bool) -> Plan:
    return op.forward(call, save)


@lru_cache(maxsize=1024)
def _backward_plan(op: Op, call: Call, needs: tuple[str, ...]) -> Plan:
    assert op.backward is not None
    return op.backward(call, needs)
