"""A pass of an op as a JAX primitive, which vmap and the compiler's sharding can see through.

There are two for each pass. The inner one runs the pass on one device; its batching rule folds the mapped axis into the
batch. The outer one is what a traced program holds: vmap only notes the mapped axis, so that the outer primitive's lowering
can split first, mapped axes too, and leave the folding to each device. Folding first would merge a split axis with another,
for which the compiler gathers whole arrays.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from bridge.signature import Array
from bridge.vmap import rule, unmapped
from jax_ops.sharding import Split, partitioned

Level = tuple[int, tuple[bool, ...]]  # a mapped axis: its size, and which arguments have it


def primitive(
    name: str, batch: str | None, implementation: Callable, abstract: Callable, positions: Callable, split: Callable[..., Split]
) -> Callable[..., list[jax.Array]]:
    """A function of arrays and keyword parameters, made of:

    implementation(gpu, *arrays, **params), the results; abstract(*avals, **params), their shapes and dtypes;
    positions(shapes, size, **params), where the batch stands in arguments and results (see bridge.vmap);
    split(*avals, **params), how they can be split over devices.
    """
    inner, outer = Primitive(f"{name}_part"), Primitive(name)
    for p in (inner, outer):
        p.multiple_results = True
        p.def_impl(partial(dispatch.apply_primitive, p))
    dispatch.prim_requires_devices_during_lowering.add(outer)

    def fold(arrays, axes, **params):
        size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        shapes = [unmapped(x.shape, axis) for x, axis in zip(arrays, axes, strict=True)]
        return rule(jnp, _each, batch, partial(inner.bind, **params), size, axes, arrays, *positions(shapes, size, **params))

    inner.def_abstract_eval(lambda *avals, **params: _like_first(avals, abstract(*avals, **params)))
    batching.primitive_batchers[inner] = fold
    for platform, gpu in ((None, False), ("cuda", True), ("rocm", True)):
        mlir.register_lowering(inner, mlir.lower_fun(partial(implementation, gpu), multiple_results=True), platform=platform)

    def note(arrays, axes, levels, **params):
        size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        first = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
        found = outer.bind(*first, levels=((size, tuple(axis is not None for axis in axes)), *levels), **params)
        return found, [0] * len(found)

    def shapes(*avals, levels, **params):
        sizes = tuple(size for size, _ in levels)
        return _like_first(avals, [Array(sizes + a.shape, a.dtype) for a in abstract(*_unmapped(avals, levels), **params)])

    def lower(*arrays, levels, **params):
        function = partial(inner.bind, **params)
        for _, has in reversed(levels):
            function = jax.vmap(function, [0 if there else None for there in has])
        return partitioned(function, lambda: split(*_unmapped(arrays, levels), **params).mapped(levels))(*arrays)

    outer.def_abstract_eval(shapes)
    batching.primitive_batchers[outer] = note
    mlir.register_lowering(outer, mlir.lower_fun(lower, multiple_results=True))
    return partial(outer.bind, levels=())


def _like_first(avals, arrays: list[Array]) -> list:
    """Abstract values. What varies over a manual mesh axis in the first argument, and so in all, does so in the results."""
    first = avals[0]
    return [
        first.update(
            shape=a.shape, dtype=jnp.dtype(a.dtype), weak_type=False, sharding=first.sharding.update(spec=PartitionSpec(*[None] * len(a.shape)))
        )
        for a in arrays
    ]  # fmt: skip


def _unmapped(avals, levels: tuple[Level, ...]) -> list[jax.ShapeDtypeStruct]:
    """The arguments as the mapped function sees them."""
    return [jax.ShapeDtypeStruct(x.shape[sum(has[i] for _, has in levels) :], x.dtype) for i, x in enumerate(avals)]


def _each(function, slices):
    return jax.lax.map(lambda current: function(*current), tuple(slices))
