"""Signatures in named dimensions: what an op takes and returns, in one line of text.

    x: b t d, A: d n, initial_state?: b d n -> y: b t d like x, final_state?: b d n wide x

Before the arrow stand the inputs, behind it the outputs. A name marked `?` is optional: an optional input may be
None, an optional output is returned where the call says `return_<name>=True`. `...` stands for any number of leading
dimensions. An output has the dtype of the input that it is `like`, or the dtype that arithmetic on it is done in
(`wide`: float32, and float64 for float64).

A signature drives the checks of arguments and their messages, the shapes and dtypes of outputs, the rule for vmap and
the random inputs of tests: nothing else in the project knows the shape of an argument.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.dtypes import FLOATS, wide

ELLIPSIS = "..."


@dataclass(frozen=True)
class Array:
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Given(Array):
    """An array that a caller gave: where it lies, besides its shape and dtype. No device where that isn't known yet."""

    device: str = ""


@dataclass(frozen=True)
class Input:
    name: str
    dims: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class Output(Input):
    source: str  # the input that decides on the dtype
    wide: bool

    def dtype(self, dtypes: Mapping[str, str]) -> str:
        dtype = dtypes[self.source]
        return wide(dtype) if self.wide else dtype


class Sizes(dict[str, int]):
    """Dimension name -> size. The dimensions behind an ellipsis are kept as `leading`."""

    leading: tuple[int, ...] = ()

    def shape(self, dims: Sequence[str]) -> tuple[int, ...]:
        return tuple(size for dim in dims for size in (self.leading if dim == ELLIPSIS else (self[dim],)))


@dataclass(frozen=True)
class Signature:
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """Read a signature. Raises ValueError where the text is not one."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"a signature needs '->' between inputs and outputs: {text!r}")
        inputs = tuple(Input(*_argument(part)) for part in left.split(","))
        outputs = []
        for part in right.split(","):
            found = re.fullmatch(r"(.+)\s(like|wide)\s+(\w+)\s*", part, re.DOTALL)
            if not found:
                raise ValueError(f"an output needs 'like' or 'wide' and the input that sets its dtype: {part.strip()!r}")
            argument, kind, source = found.groups()
            if source not in {i.name for i in inputs}:
                raise ValueError(f"{part.strip()!r} names {source!r}, which is no input")
            outputs.append(Output(*_argument(argument), source, kind == "wide"))
        names = [a.name for a in (*inputs, *outputs)]
        if len(set(names)) < len(names):
            raise ValueError(f"a name stands twice in {text!r}")
        return cls(inputs, tuple(outputs))

    def check(self, function: str, given: Mapping[str, Given | None], limits: Mapping[str, range] | None = None) -> Sizes:
        """The size of every dimension.

        Raises TypeError for a missing argument, a wrong dtype or mixed float64, ValueError for a wrong shape or size or
        for arguments on several devices. Messages say what was expected, in this signature's letters.
        """
        present = []
        for argument in self.inputs:
            array = given.get(argument.name)
            if array is not None:
                present.append((argument, array))
            elif not argument.optional:
                raise TypeError(f"{function}: {argument.name} must be an array of shape {spell(argument.dims)}, got None")
        for argument, array in present:
            if array.dtype not in FLOATS:
                raise TypeError(f"{function}: {argument.name} must have one of the dtypes {', '.join(FLOATS)}, got {array.dtype}")
        _agree(function, present, "float64 can't be mixed with other dtypes", lambda a: a.dtype == "float64", lambda a: a.dtype, TypeError)
        placed = [(argument, array) for argument, array in present if array.device]
        _agree(function, placed, "all arrays must be on one device", lambda a: a.device, lambda a: f"on {a.device}", ValueError)
        return self.sizes(function, given, limits)

    def sizes(self, function: str, given: Mapping[str, Array | None], limits: Mapping[str, range] | None = None) -> Sizes:
        """The size of every dimension, from shapes alone. Raises ValueError where they don't fit."""
        sizes, setter, limits = Sizes(), dict[str, str](), limits or {}
        for argument in self.inputs:
            array = given.get(argument.name)
            if array is None:
                continue
            shape, dims = list(array.shape), list(argument.dims)
            want = f"{function}: {argument.name} must have shape {spell(dims)}"
            if dims[:1] == [ELLIPSIS]:
                trailing = len(dims) - 1
                if len(shape) < trailing:
                    raise ValueError(f"{want}, at least {trailing} dimensions, got {array.shape}")
                leading = tuple(shape[: len(shape) - trailing])
                if setter.setdefault(ELLIPSIS, argument.name) == argument.name:
                    sizes.leading = leading
                elif leading != sizes.leading:
                    raise ValueError(f"{want} with ... = {sizes.leading} (set by {setter[ELLIPSIS]}), got {array.shape}")
                shape, dims = shape[len(leading) :], dims[1:]
            if len(shape) != len(dims):
                raise ValueError(f"{want}, {len(dims)} dimensions, got {array.shape}")
            for dim, size in zip(dims, shape, strict=True):
                if dim not in sizes:
                    sizes[dim], setter[dim] = size, argument.name
                    if dim in limits and size not in limits[dim]:
                        low, high = limits[dim][0], limits[dim][-1]
                        raise ValueError(f"{want} with {low} <= {dim} <= {high}, got {array.shape}")
                elif size != sizes[dim]:
                    known = ", ".join(f"{k} = {sizes[k]} (set by {setter[k]})" for k in dict.fromkeys(dims) if k in sizes)
                    raise ValueError(f"{want} with {known}, got {array.shape}")
        return sizes


def spell(dims: Sequence[str]) -> str:
    return f"({' '.join(dims)})"


def _argument(text: str) -> tuple[str, tuple[str, ...], bool]:
    found = re.fullmatch(r"\s*(\w+)(\??)\s*:((?:\s*(?:\w+|\.\.\.))+)\s*", text)
    if not found:
        raise ValueError(f"not an argument in named dimensions: {text.strip()!r}")
    name, optional, dims = found.groups()
    dims = tuple(dims.split())
    if ELLIPSIS in dims[1:]:
        raise ValueError(f"'...' can only stand first: {text.strip()!r}")
    return name, dims, bool(optional)


def _agree(function, present, rule, key, describe, error) -> None:
    """All present arguments must have the same key; the message shows the first and the first that differs."""
    for argument, array in present[1:]:
        first, first_array = present[0]
        if key(array) != key(first_array):
            raise error(f"{function}: {rule}: {first.name} is {describe(first_array)}, {argument.name} is {describe(array)}")
