"""Sharding: the op's rule (bridge/sharding.py), told to JAX in the way of each kind of mesh axis.

Auto: what is split is the compiler's choice, so a pass carries its rule along (custom_partitioning). Explicit: what is split
stands in the arrays' types, so the call becomes a shard_map over them. Inside shard_map (Manual) there is nothing to do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax._src.sharding import IndivisibleError
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bridge.op import Call, Op
from bridge.sharding import Axes, Pass, part, rule
from jax_ops.loops import vary, varying_axes

Names = Mapping[str, tuple[str, ...]]  # dimension -> the mesh axes that it is split over


@dataclass(frozen=True)
class Level:
    """A mapped axis, which stands in front of others: its size, and which arguments have it. All results do."""

    size: int
    has: tuple[bool, ...]


@dataclass(frozen=True)
class Split:
    """How the arrays of one pass of one call can be split. `levels` are the sizes of mapped axes, by names that they get here."""

    op: Op
    call: Call
    arrays: Pass
    levels: Mapping[str, int] = field(default_factory=dict)

    def mapped(self, levels: Sequence[Level]) -> "Split":
        """The same pass with mapped axes, the outermost first. Any of them can be split."""
        names = [f"map{i}" for i in range(len(levels))]
        arguments = tuple(
            (*(name for name, level in zip(names, levels, strict=True) if level.has[i]), *axes)
            for i, axes in enumerate(self.arrays.arguments)
        )
        results = tuple((*names, *axes) for axes in self.arrays.results)
        sizes = {name: level.size for name, level in zip(names, levels, strict=True)}
        return replace(self, arrays=Pass(arguments, results, self.arrays.sums), levels=sizes)

    @property
    def counts(self) -> dict[str, int]:
        """For each dimension that can be split, the number that its parts must divide."""
        return {**{dim: math.gcd(*counts) for dim, counts in rule(self.op, self.call).counts.items()}, **self.levels}

    def fits(self, parts: Mapping[str, int]) -> bool:
        inside = {dim: n for dim, n in parts.items() if dim not in self.levels}
        return (
            all(self.levels[dim] % n == 0 for dim, n in parts.items() if dim in self.levels)
            and part(self.op, self.call, inside) is not None
        )


def partitioned(function: Callable[..., list], split: Callable[[], Split]) -> Callable[..., list]:
    """`function` with its rule: where the compiler splits arrays over a mesh, each device runs it on its parts."""

    def shardings(mesh, given, wanted):
        s = split()
        names = choose(s, mesh.shape, [_spec(a.sharding, mesh) for a in (*given, *wanted)])

        def placed(axes: Axes) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(names.get(dim or "") for dim in axes)))

        def run(*arrays):
            sums = [tuple(axis for dim in dims for axis in names.get(dim, ())) for dims in s.arrays.sums]
            return [jax.lax.psum(r, axes) if axes else r for r, axes in zip(function(*arrays), sums, strict=True)]

        return mesh, run, [*map(placed, s.arrays.results)], tuple(map(placed, s.arrays.arguments))

    def factors(mesh, argument_types, result_types):
        return _factors(split(), [t.shape for t in argument_types], [t.shape for t in result_types])

    wrapped = custom_partitioning(lambda *arrays: function(*arrays))
    wrapped.def_partition(partition=shardings, sharding_rule=factors, decode_shardings=False)
    return wrapped


def _spec(sharding: Any, mesh) -> PartitionSpec:
    """A sharding in mesh axes. What the compiler split over part of an axis can't be said so, and is called whole: it is gathered."""
    try:
        return parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0]
    except IndivisibleError:
        return PartitionSpec()


def choose(split: Split, mesh: Mapping[str, int], specs: Sequence[PartitionSpec]) -> Names:
    """What is split over what, as the first array has it that has it split, where the pass can be."""
    names: dict[str, tuple[str, ...]] = {}
    for spec, axes in zip(specs, (*split.arrays.arguments, *split.arrays.results), strict=True):
        for entry, dim in zip(spec, axes, strict=False):
            if entry is None or dim is None or dim in names:
                continue
            more = {**names, dim: entry if isinstance(entry, tuple) else (entry,)}
            used = [axis for found in more.values() for axis in found]
            if len(set(used)) == len(used) and split.fits(_parts(more, mesh)):
                names = more
    return names


def _parts(names: Names, mesh: Mapping[str, int]) -> dict[str, int]:
    return {dim: math.prod(mesh[axis] for axis in axes) for dim, axes in names.items()}


def _factors(split: Split, arguments, results) -> SdyShardingRule:
    """The rule in the compiler's terms: a factor for each dimension that can be split, and one of its own for each axis, or rest
    of an axis, that has to be whole."""
    counts = split.counts
    factors = {dim: f"f{i}" for i, dim in enumerate(counts)}
    whole: list[str] = []
    sizes: dict[str, int] = {}
    lone = {factors[dim] for dim in counts}

    def rest(size: int | None = None) -> str:
        whole.append(f"w{len(whole)}")
        if size is not None:
            sizes[whole[-1]] = size
        return whole[-1]

    def factor(size: int, dim: str | None):
        if dim is None:
            return rest()
        if size == counts[dim]:
            lone.discard(factors[dim])
            return factors[dim]
        return CompoundFactor(factors[dim], rest(size // counts[dim]))

    def mapping(shape, axes: Axes) -> ArrayMapping:
        return ArrayMapping(*(factor(size, dim) for size, dim in zip(shape, axes, strict=True)))

    left = tuple(mapping(s, a) for s, a in zip(arguments, split.arrays.arguments, strict=True))
    right = tuple(mapping(s, a) for s, a in zip(results, split.arrays.results, strict=True))
    sizes |= {factors[dim]: count for dim, count in counts.items() if factors[dim] in lone}
    return SdyShardingRule(left, right, need_replication_factors=tuple(whole), **sizes)


def explicit(op: Op, call: Call, inputs: Sequence[jax.Array | None], function: Callable[..., Any]) -> Any:
    """function(*inputs), the outputs of a call, as a shard_map where the inputs are on a mesh of Explicit axes.

    Raises ValueError where they are split in a way that the op can't be, or in several ways at once, and NotImplementedError
    where some axes of the mesh are of another type than others.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in inputs if x is not None]
    mesh = next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())
    if _axis_type(op, mesh) != AxisType.Explicit:
        return function(*inputs)
    whole = rule(op, call)
    names = _names(op, call, inputs)
    parts = _parts(names, mesh.shape)
    if part(op, call, parts) is None:
        raise ValueError(f"{op.name}: can't be split into {parts} parts, as its arguments are: use jax.sharding.reshard first")

    def spec(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(names.get(dim or "") for dim in axes))

    specs = tuple(None if dims is None else spec(dims) for dims in whole.inputs)
    placed = [x if x is None else jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(inputs, specs, strict=True)]
    split = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=tuple(map(spec, whole.outputs)))
    return jax.jit(split)(*placed)  # compiled, since JAX can't carry out a shard_map over a custom_vjp operation by operation


def _axis_type(op: Op, mesh) -> AxisType | None:
    """The type of a mesh's axes, of those that have several devices."""
    types: dict[AxisType, list[str]] = {}
    for name, kind in zip(mesh.axis_names, mesh.axis_types or (), strict=False):
        if mesh.shape[name] > 1:
            types.setdefault(kind, []).append(name)
    if len(types) > 1:
        found = " and ".join(f"{kind.name} ({', '.join(names)})" for kind, names in types.items())
        raise NotImplementedError(f"{op.name}: the mesh has axes of types {found}, but they have to be of one: shard_map over all of them")
    return next(iter(types), None)


def _names(op: Op, call: Call, inputs: Sequence[jax.Array | None]) -> Names:
    """What is split over what, as the inputs' types say."""
    whole = rule(op, call)
    names: dict[str, tuple[str, ...]] = {}
    for argument, x, dims in zip(op.signature.inputs, inputs, whole.inputs, strict=True):
        if x is None or dims is None:
            continue
        for i, (entry, dim) in enumerate(zip(jax.typeof(x).sharding.spec, dims, strict=True)):
            over = entry if isinstance(entry, tuple) else (entry,)
            if entry is None or names.setdefault(dim or "", over if dim else ()) == over:
                continue
            where = f"{op.name}: axis {i} of {argument.name}, {' '.join(call.sizes.forms[argument.name])}, is split over {', '.join(over)}"
            why = f"other arguments' {dim} over {', '.join(names[dim])}" if dim else f"only {', '.join(whole.counts) or 'nothing'} can be"
            raise ValueError(f"{where}, but {why}: use jax.sharding.reshard first")
    return {dim: over for dim, over in names.items() if dim}


def split_in_front(function: Callable[..., list], arrays: Sequence[jax.Array], has: Sequence[bool]) -> list:
    """function(*arrays), as a shard_map where the first axis, of the arrays that `has` marks, is split over Explicit mesh axes."""
    shardings = [jax.typeof(x).sharding for x, there in zip(arrays, has, strict=True) if there]
    over = next((s.spec[0] for s in shardings if s.spec and s.spec[0] is not None), None)
    if over is None:
        return function(*arrays)

    def local(*arrays):
        axes = varying_axes(*arrays)
        return function(*(vary(x, axes) for x in arrays))

    names = set(over if isinstance(over, tuple) else (over,))
    specs = tuple(PartitionSpec(over) if there else PartitionSpec() for there in has)
    return jax.shard_map(local, mesh=shardings[0].mesh, in_specs=specs, out_specs=PartitionSpec(over), axis_names=names)(*arrays)
