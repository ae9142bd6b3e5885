"""Op -> a differentiable JAX function.

Each pass becomes a primitive with an abstract evaluation, a lowering for each platform and a batching rule. Over them
stand two custom_vjp functions, outermost as JAX wants it: the backward pass is one of its own, so that it can be
differentiated again, through the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from bridge.backends import choose
from bridge.op import Call, Op
from bridge.signature import Array, Given
from bridge.vmap import rule, unmapped
from jax_ops import loops
from jax_ops.launch import run_compiled, run_interpreted

_bound: dict[str, tuple[Op, Callable[..., Any]]] = {}


def bind(op: Op) -> Callable[..., Any]:
    """A differentiable JAX function of `op`: the op's inputs in order, its options by keyword, and `backend`.

    Binding an op again gives the same function. Raises ValueError for another op of the same name.
    """
    if op.name not in _bound:
        _bound[op.name] = op, _bind(op)
    known, function = _bound[op.name]
    if known is not op:
        raise ValueError(f"another op named {op.name!r} is bound already")
    return function


def _bind(op: Op) -> Callable[..., Any]:
    run_forward, run_backward = _forward(op), _backward(op)

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
    def apply(options, backend, save, *inputs):
        results = run_forward(options, backend, save, inputs)
        return tuple(results[: len(op.output_names)]), op.kept(results, options) if save else []

    def apply_forward(options, backend, save, *primals):
        inputs = [p and p.value for p in primals]
        needs = tuple(p is not None and p.perturbed for p in primals)
        # Itself and not the primitive, so that a second derivative finds a rule here too.
        outputs, kept = apply(options, backend, True, *inputs)
        return (outputs, kept if save else []), (_Needs(needs), inputs, kept)

    def apply_backward(options, backend, save, residuals, cotangents):
        needs, inputs, kept = residuals
        numbers = _equally_varying([*map(_number, cotangents[0]), *inputs])[: len(cotangents[0])]
        return tuple(gradients(options, backend, needs.inputs, inputs, kept, numbers))

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
    def gradients(options, backend, needs, inputs, kept, cotangents):
        found = iter(run_backward(options, backend, needs, inputs, kept, cotangents))
        return [next(found) if need else None for need in needs]

    def gradients_forward(options, backend, needs, inputs, kept, cotangents):
        return gradients(options, backend, needs, inputs, kept, cotangents), (inputs, kept, cotangents)

    def gradients_backward(options, backend, needs, residuals, seconds):
        inputs, kept, cotangents = residuals
        floats = [x if x is not None and loops.floating(x) else None for x in inputs]

        def first(floats, cotangents):
            return loops.gradients(op, [x if f is None else f for f, x in zip(floats, inputs, strict=True)], options, cotangents, needs)

        _, pull = jax.vjp(first, floats, cotangents)
        of_inputs, of_cotangents = pull(seconds)
        return of_inputs, [jnp.zeros_like(k) for k in kept], of_cotangents

    apply.defvjp(apply_forward, apply_backward, symbolic_zeros=True)
    gradients.defvjp(gradients_forward, gradients_backward)

    def call(arrays: tuple, values: tuple, backend: str | None):
        values = op.check_options(values, backend)
        for argument, value in zip(op.signature.inputs, arrays, strict=True):
            if not (isinstance(value, (jax.Array, np.ndarray)) or (value is None and argument.optional)):
                raise TypeError(f"{op.name}: {argument.name} must be a jax.Array, got {type(value).__name__}")
        inputs = [None if x is None else jnp.asarray(x) for x in arrays]
        options = values[: len(op.options)]
        checked = op.call([x if x is None else Given(x.shape, x.dtype.name, _device(x)) for x in inputs], options)
        op.check_values(checked, {n: np.asarray(x) for n, x in zip(checked.given, inputs, strict=True) if n in op.values and _readable(x)})
        return op.returned(apply(options, backend, False, *_equally_varying(inputs))[0], values)

    return op.function(call)


def _forward(op: Op):
    """(options, backend, save, inputs) -> results, as one primitive."""

    def implementation(gpu, *arrays, present, options, backend, save):
        inputs = _spread(arrays, present)
        call = _call(op, inputs, options)
        chosen, _ = choose(op.name, backend, gpu)
        if chosen != "reference":
            return _run(op.forward_plan(call, save), chosen, dict(zip(call.given, inputs, strict=True)))
        # Only kernels need what is saved; in a compiled program what nobody reads is not there.
        further = list(op.results(call, save).values())[len(op.output_names) :]
        return [*loops.run(op, inputs, options), *(loops.xp.zeros(a.shape, jnp.zeros((), a.dtype)) for a in further)]

    def abstract(*avals, present, options, backend, save):
        return list(op.results(_call(op, _spread(avals, present), options), save).values())

    def positions(shapes, size, present, options, backend, save):
        inside, outside = _batches(op, shapes, size, present)
        return inside, outside + ([0] * op.further(options) if save else [])

    primitive = _primitive(f"{op.name}_forward", op.batch, implementation, abstract, positions)

    def run(options, backend, save, inputs):
        present = tuple(x is not None for x in inputs)
        return primitive.bind(*(x for x in inputs if x is not None), present=present, options=options, backend=backend, save=save)

    return run


def _backward(op: Op):
    """(options, backend, needs, inputs, kept, cotangents) -> the gradients of the inputs that `needs` marks, as one primitive."""

    def split(arrays, present):
        n, end = sum(present), len(arrays) - len(op.output_names)
        return _spread(arrays[:n], present), arrays[n:end], arrays[end:]

    def implementation(gpu, *arrays, present, options, backend, needs):
        inputs, kept, cotangents = split(arrays, present)
        call = _call(op, inputs, options)
        chosen, _ = choose(op.name, backend, gpu)
        if chosen == "reference" or op.backward is None:
            return [g for g in loops.gradients(op, inputs, options, cotangents, needs) if g is not None]
        known = dict(zip(call.given, inputs, strict=True))
        known |= zip(op.saves(call.options), kept, strict=True)
        known |= zip((f"d{name}" for name in op.output_names), cotangents, strict=True)
        needed = tuple(name for name, need in zip(call.given, needs, strict=True) if need)
        return _run(op.backward_plan(call, needed), chosen, known)

    def abstract(*avals, present, options, backend, needs):
        inputs = split(avals, present)[0]
        return [Array(x.shape, x.dtype.name) for x, need in zip(inputs, needs, strict=True) if need]

    def positions(shapes, size, present, options, backend, needs):
        inside, outside = _batches(op, shapes[: sum(present)], size, present)
        kept = [0] * len(op.saves(dict(zip(op.options, options, strict=True))))
        needed = [p for p, need in zip(_spread(inside, present), needs, strict=True) if need]
        return [*inside, *kept, *outside], needed

    primitive = _primitive(f"{op.name}_backward", op.batch, implementation, abstract, positions)

    def run(options, backend, needs, inputs, kept, cotangents):
        if not any(needs):
            return []
        present = tuple(x is not None for x in inputs)
        arrays = (*(x for x in inputs if x is not None), *kept, *cotangents)
        return primitive.bind(*arrays, present=present, options=options, backend=backend, needs=needs)

    return run


def _primitive(name: str, batch: str | None, implementation: Callable, abstract: Callable, positions: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(partial(dispatch.apply_primitive, primitive))

    def shaped(*avals, **params):
        # What varies over a manual mesh axis in the inputs does so in the outputs.
        first = avals[0]

        def like_first(array: Array):
            sharding = first.sharding.update(spec=PartitionSpec(*[None] * len(array.shape)))
            return first.update(shape=array.shape, dtype=jnp.dtype(array.dtype), weak_type=False, sharding=sharding)

        return [like_first(array) for array in abstract(*avals, **params)]

    def batched(arrays, axes, **params):
        def apply(*arrays):
            return primitive.bind(*arrays, **params)

        size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        shapes = [unmapped(x.shape, axis) for x, axis in zip(arrays, axes, strict=True)]
        return rule(jnp, _each, batch, apply, size, axes, arrays, *positions(shapes, size, **params))

    primitive.def_abstract_eval(shaped)
    batching.primitive_batchers[primitive] = batched
    for platform, gpu in ((None, False), ("cuda", True), ("rocm", True)):
        mlir.register_lowering(primitive, mlir.lower_fun(partial(implementation, gpu), multiple_results=True), platform=platform)
    return primitive


def _run(plan, backend: str, arrays) -> list[jax.Array]:
    return run_interpreted(plan, arrays) if backend == "interpret" else run_compiled(plan, arrays)


def _call(op: Op, inputs, options) -> Call:
    return op.call([x if x is None else Given(x.shape, x.dtype.name) for x in inputs], options)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """Which inputs need a gradient, where only arrays and what is static can stand."""

    inputs: tuple[bool, ...]


def _number(cotangent):
    """An array, where JAX says no more than that it is zero."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _batches(op: Op, shapes, size, present) -> tuple[list, list]:
    """Where the batch stands in the inputs that are there and in the outputs."""
    names = [i.name for i, there in zip(op.signature.inputs, present, strict=True) if there]
    inside, outside = op.batches(dict(zip(names, shapes, strict=True)), size)
    return [p for p, there in zip(inside, present, strict=True) if there], outside


def _readable(x: jax.Array | None) -> bool:
    """Whether values can be looked at without waiting for a GPU."""
    return x is not None and not isinstance(x, jax.core.Tracer) and all(device.platform == "cpu" for device in x.devices())


def _device(x: jax.Array) -> str:
    """Where an array was put. One that is being traced, or that nobody placed, goes where the others are."""
    if isinstance(x, jax.core.Tracer) or not x.committed:
        return ""
    return ", ".join(sorted(f"{device.platform}:{device.id}" for device in x.devices()))


def _spread(arrays, present) -> list:
    """Arrays at their places among all inputs, None where there is none."""
    rest = iter(arrays)
    return [next(rest) if there else None for there in present]


def _each(function, slices):
    return jax.lax.map(lambda current: function(*current), tuple(slices))


def _equally_varying(inputs):
    """Inside shard_map: inputs that don't vary over a mesh axis that another varies over are made to, so that what flows
    back to them is summed over it."""
    axes = loops.varying_axes(*(x for x in inputs if x is not None))
    return [x if x is None else loops.vary(x, axes) for x in inputs]
