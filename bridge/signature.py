"""Signatures in named dimensions: what an op takes and returns, in one piece of text.

    x: b t d, A: d n, B: b t n or d n, state?: s|b d n, *, cuts?: s+1 (int32 int64) -> y: b t d like x, last?: s|b d n wide x

Before the arrow stand the inputs, behind it the outputs; inputs behind `*` are passed by keyword. A name marked `?` is
optional: an optional input may be None, an optional output is returned where the call says `return_<name>=True`. An
input is floating-point unless its dtypes stand in parentheses. An output has the dtype of the input that it is `like`,
or the dtype that arithmetic on it is done in (`wide`: float32, and float64 for float64).

`...` stands for any number of leading dimensions, `s+1` for one more than s, `s|b` for s in a call with an argument that
has an s, and else for b. Of several forms joined by `or`, a call means the one that has its number of dimensions; of
several that do, the first that fits the sizes that other arguments set.

A signature drives the checks of arguments and their messages, the shapes and dtypes of outputs, the rule for vmap and
the random inputs of tests: nothing else in the project knows the shape of an argument.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.dtypes import FLOATS, wide

ELLIPSIS = "..."

Dims = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Array:
    """The shape and dtype of an array."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Given(Array):
    """An array that a caller gave: where it lies, besides its shape and dtype. No device where that isn't known yet."""

    device: str = ""


@dataclass(frozen=True)
class Argument:
    name: str
    forms: tuple[Dims, ...]
    optional: bool


@dataclass(frozen=True)
class Input(Argument):
    dtypes: tuple[str, ...] = FLOATS
    keyword: bool = False

    @property
    def floating(self) -> bool:
        return self.dtypes == FLOATS


@dataclass(frozen=True)
class Output(Argument):
    source: str  # the input that decides on the dtype
    wide: bool

    def dtype(self, dtypes: Mapping[str, str]) -> str:
        dtype = dtypes[self.source]
        return wide(dtype) if self.wide else dtype


class Sizes(dict[str, int]):
    """Letter -> size. The dimensions behind an ellipsis are kept as `leading`, the forms that arguments and outputs have
    in this call as `forms`."""

    leading: Shape = ()
    forms: dict[str, Dims]

    def with_size(self, letter: str, size: int) -> "Sizes":
        """The same but for one size."""
        changed = Sizes({**self, letter: size})
        changed.leading, changed.forms = self.leading, self.forms
        return changed

    def shape(self, dims: Dims) -> Shape:
        """The shape of an array of these dimensions."""
        return tuple(size for dim in dims for size in (self.leading if dim == ELLIPSIS else (self[_letter(dim)] + _more(dim),)))


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
        inputs, keyword = [], False
        for part in left.split(","):
            if part.strip() == "*":
                keyword = True
                continue
            found = re.fullmatch(r"([^()]+?)(?:\(([\w\s]+)\))?\s*", part, re.DOTALL)
            if not found:
                raise ValueError(f"not an argument in named dimensions: {part.strip()!r}")
            inputs.append(Input(*_argument(found[1]), tuple(found[2].split()) if found[2] else FLOATS, keyword))
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
        return cls(tuple(inputs), tuple(outputs))

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
                raise TypeError(f"{function}: {argument.name} must be an array of shape {spell(argument.forms)}, got None")
        for argument, array in present:
            if array.dtype not in argument.dtypes:
                raise TypeError(f"{function}: {argument.name} must have one of the dtypes {', '.join(argument.dtypes)}, got {array.dtype}")
        floating = [(argument, array) for argument, array in present if argument.floating]
        _agree(function, floating, "float64 can't be mixed with other dtypes", lambda a: a.dtype == "float64", lambda a: a.dtype, TypeError)
        placed = [(argument, array) for argument, array in present if array.device]
        _agree(function, placed, "all arrays must be on one device", lambda a: a.device, lambda a: f"on {a.device}", ValueError)
        return self.sizes(function, {argument.name: array.shape for argument, array in present}, limits)

    def sizes(self, function: str, shapes: Mapping[str, Shape], limits: Mapping[str, range] | None = None) -> Sizes:
        """The size of every dimension, from the shapes of the inputs that are there. Raises ValueError where they don't fit."""
        sizes, setter, limits = Sizes(), dict[str, str](), limits or {}
        letters = {_letter(dim) for i in self.inputs if i.name in shapes for form in i.forms for dim in form if "|" not in dim}
        sizes.forms = {}
        unsettled = []
        for argument in (i for i in self.inputs if i.name in shapes):
            shape = shapes[argument.name]
            forms = [_resolve(form, letters) for form in argument.forms]
            fitting = [form for form in forms if len(form) == len(shape) or form[:1] == (ELLIPSIS,)]
            if not fitting:
                count = f"{len(forms[0])} dimensions, " if len(forms) == 1 else ""
                raise ValueError(f"{function}: {argument.name} must have shape {spell(forms)}, {count}got {shape}")
            if len(fitting) > 1:
                unsettled.append((argument.name, fitting))
            else:
                _match(function, argument.name, fitting[0], shape, sizes, setter, limits)
        for name, forms in unsettled:
            # The first that agrees, and no look at the others: a size that isn't known yet would be held to what it is compared with.
            fits = (f for f in forms if all(sizes.get(_letter(d), n) == n for d, n in zip(f, shapes[name], strict=True)))
            agreeing = next(fits, None)
            if agreeing is None:
                known = _known([dim for form in forms for dim in form], sizes, setter)
                raise ValueError(f"{function}: {name} must have shape {spell(forms)} with {known}, got {shapes[name]}")
            _match(function, name, agreeing, shapes[name], sizes, setter, limits)
        for output in self.outputs:
            sizes.forms[output.name] = _resolve(output.forms[0], letters)
        return sizes


def spell(forms: Sequence[Dims]) -> str:
    *others, last = (f"({' '.join(form)})" for form in forms)
    return f"{', '.join(others)} or {last}" if others else last


def _match(function, name: str, dims: Dims, shape: Shape, sizes: Sizes, setter: dict[str, str], limits: Mapping[str, range]) -> None:
    """Check a shape against the sizes known so far, and learn from it."""
    sizes.forms[name] = dims
    want = f"{function}: {name} must have shape {spell([dims])}"
    got, rest = shape, dims
    if dims[:1] == (ELLIPSIS,):
        trailing = len(dims) - 1
        if len(shape) < trailing:
            raise ValueError(f"{want}, at least {trailing} dimensions, got {got}")
        leading, shape, rest = shape[: len(shape) - trailing], shape[len(shape) - trailing :], dims[1:]
        if setter.setdefault(ELLIPSIS, name) == name:
            sizes.leading = leading
        elif leading != sizes.leading:
            raise ValueError(f"{want} with ... = {sizes.leading} (set by {setter[ELLIPSIS]}), got {got}")
    for dim, size in zip(rest, shape, strict=True):
        letter, size = _letter(dim), size - _more(dim)
        if letter not in sizes:
            allowed = limits.get(letter)
            # Compared, and not looked up: of a size that isn't known yet, `in` would ask about each number.
            if size < (allowed.start if allowed else 0) or (allowed and size >= allowed.stop):
                bounds = f"{allowed[0]} <= {letter} <= {allowed[-1]}" if allowed else f"0 <= {letter}"
                raise ValueError(f"{want} with {bounds}, got {got}")
            sizes[letter], setter[letter] = size, name
        elif size != sizes[letter]:
            raise ValueError(f"{want} with {_known(dims, sizes, setter)}, got {got}")


def _known(dims: Iterable[str], sizes: Sizes, setter: Mapping[str, str]) -> str:
    return ", ".join(f"{k} = {sizes[k]} (set by {setter[k]})" for k in dict.fromkeys(map(_letter, dims)) if k in sizes)


def _resolve(dims: Dims, letters: Iterable[str]) -> Dims:
    """The dimensions as they are in a call whose arguments have these letters."""
    return tuple(next((d for d in dim.split("|") if d in letters), dim) for dim in dims)


def _letter(dim: str) -> str:
    return dim.partition("+")[0]


def _more(dim: str) -> int:
    return int(dim.partition("+")[2] or 0)


def _argument(text: str) -> tuple[str, tuple[Dims, ...], bool]:
    dim = r"(?:\.\.\.|\w+(?:\+\d+)?(?:\|\w+)?)"
    found = re.fullmatch(rf"\s*(\w+)(\??)\s*:\s*({dim}(?:\s+{dim})*)\s*", text)
    if not found:
        raise ValueError(f"not an argument in named dimensions: {text.strip()!r}")
    name, optional, dims = found.groups()
    forms = tuple(tuple(form.split()) for form in re.split(r"\sor\s", dims))
    if any(ELLIPSIS in form[1:] for form in forms) or (len(forms) > 1 and any(ELLIPSIS in form for form in forms)):
        raise ValueError(f"'...' can only stand first, in the only form: {text.strip()!r}")
    return name, forms, bool(optional)


def _agree(function, present, rule, key, describe, error) -> None:
    """All present arguments must have the same key; the message shows the first and the first that differs."""
    for argument, array in present[1:]:
        first, first_array = present[0]
        if key(array) != key(first_array):
            raise error(f"{function}: {rule}: {first.name} is {describe(first_array)}, {argument.name} is {describe(array)}")
