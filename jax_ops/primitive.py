"""A pass of an op as a JAX primitive, which vmap and the compiler's sharding can see through.

There are two for each pass. The inner one runs the pass on one device; its batching rule folds the mapped axis into the
batch. The outer one is what a traced program holds: vmap only notes the mapped axis there, so that its lowering can split
arrays first, mapped axes too, and leave the folding to each device. Folding first would merge a split axis with another, for
which the compiler gathers whole arrays.
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
from jax_ops.passes import Backward, Forward
from jax_ops.sharding import Level, partitioned, split_in_front

PLATFORMS = ((None, False), ("cuda", True), ("rocm", True))  # and whether it has a GPU


def primitive(run: Forward | Backward) -> Callable[..., list[jax.Array]]:
    """A pass as a function of the arrays that are there and of the pass's static parameters, by keyword."""
    inner, outer = Primitive(f"{run.name}_part"), Primitive(run.name)
    for p in (inner, outer):
        p.multiple_results = True
        p.def_impl(partial(dispatch.apply_primitive, p))
    dispatch.prim_requires_devices_during_lowering.add(outer)

    def part(*avals, **params):
        return _like_first(avals, run.results(*avals, **params))

    def fold(arrays, axes, **params):
        size = _mapped_size(arrays, axes)
        positions = run.positions([unmapped(x.shape, axis) for x, axis in zip(arrays, axes, strict=True)], size, **params)
        return rule(jnp, _each, run.op.batch, partial(inner.bind, **params), size, axes, arrays, *positions)

    def whole(*avals, levels, **params):
        sizes = tuple(level.size for level in levels)
        return _like_first(avals, [Array(sizes + a.shape, a.dtype) for a in run.results(*_unmapped(avals, levels), **params)])

    def note(arrays, axes, levels, **params):
        first = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
        has = tuple(axis is not None for axis in axes)

        def mapped(*arrays):
            level = Level(_mapped_size(arrays, [0 if there else None for there in has]), has)
            return outer.bind(*arrays, levels=(level, *levels), **params)

        found = split_in_front(mapped, first, has)
        return found, [0] * len(found)

    def lower(gpu, *arrays, levels, **params):
        function: Callable[..., list] = partial(inner.bind, **params)
        for level in reversed(levels):
            function = jax.vmap(function, [0 if there else None for there in level.has])
        if run.backend(gpu, params["backend"]) != "interpret":  # a callback to the host can't be found from a split program
            function = partitioned(function, lambda: run.split(*_unmapped(arrays, levels), **params).mapped(levels))
        return function(*arrays)

    for p, shapes, batched, lowered in ((inner, part, fold, run.run), (outer, whole, note, lower)):
        p.def_abstract_eval(shapes)
        batching.primitive_batchers[p] = batched
        for platform, gpu in PLATFORMS:
            mlir.register_lowering(p, mlir.lower_fun(partial(lowered, gpu), multiple_results=True), platform=platform)
    return partial(outer.bind, levels=())


def _like_first(avals, arrays: list[Array]) -> list:
    """Abstract values. What varies over a manual mesh axis in the first argument, and so in all, does so in the results."""
    first = avals[0]

    def like_first(a: Array):
        sharding = first.sharding.update(spec=PartitionSpec(*[None] * len(a.shape)))
        return first.update(shape=a.shape, dtype=jnp.dtype(a.dtype), weak_type=False, sharding=sharding)

    return [like_first(a) for a in arrays]


def _mapped_size(arrays, axes) -> int:
    return next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)


def _unmapped(avals, levels: tuple[Level, ...]) -> list[jax.ShapeDtypeStruct]:
    """The arguments as the mapped function sees them."""
    return [jax.ShapeDtypeStruct(x.shape[sum(level.has[i] for level in levels) :], x.dtype) for i, x in enumerate(avals)]


def _each(function, slices):
    return jax.lax.map(lambda current: function(*current), tuple(slices))
