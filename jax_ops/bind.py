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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from bridge.op import Call, Op
from bridge.signature import Given
from jax_ops import loops
from jax_ops.passes import Backward, Forward
from jax_ops.primitive import primitive
from jax_ops.sharding import explicit

FORWARD_MODE = (
    "has no forward mode (jax.jvp, jax.jacfwd, jax.linearize): use reverse mode (jax.vjp, jax.grad, jax.jacrev), "
    "or the loop of this name in jax_ops.reference"
)

_bound: dict[str, tuple[Op, Callable[..., Any]]] = {}


def bind(op: Op) -> Callable[..., Any]:
    """A differentiable JAX function of `op`: the op's inputs in order, its options by keyword, and `backend`.

    What the forward pass keeps for the backward one has the name "<op>.<array>" for policies of jax.checkpoint. Binding an op
    again gives the same function. Raises ValueError for another op of the same name.
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
        names = op.saves(dict(zip(op.options, options, strict=True)))
        kept = [checkpoint_name(k, f"{op.name}.{name}") for k, name in zip(kept, names, strict=True)]
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
        inputs, values, checked = check(op, arrays, values, backend)
        options = values[: len(op.options)]
        op.check_values(checked, {n: np.asarray(x) for n, x in zip(checked.given, inputs, strict=True) if n in op.values and _readable(x)})
        try:
            outputs = explicit(op, checked, inputs, lambda *inputs: apply(options, backend, False, *_equally_varying(inputs))[0])
        except TypeError as error:
            if "custom_vjp" in str(error):  # what JAX says of forward mode
                raise TypeError(f"{op.name}: {FORWARD_MODE}") from error
            raise
        return op.returned(outputs, values)

    return op.function(__package__, call)


def _forward(op: Op):
    """(options, backend, save, inputs) -> results, as one primitive."""
    run = primitive(Forward(op))

    def forward(options, backend, save, inputs):
        present = tuple(x is not None for x in inputs)
        return run(*(x for x in inputs if x is not None), present=present, options=options, backend=backend, save=save)

    return forward


def _backward(op: Op):
    """(options, backend, needs, inputs, kept, cotangents) -> the gradients of the inputs that `needs` marks, as one primitive."""
    run = primitive(Backward(op))

    def backward(options, backend, needs, inputs, kept, cotangents):
        if not any(needs):
            return []
        present = tuple(x is not None for x in inputs)
        arrays = (*(x for x in inputs if x is not None), *kept, *cotangents)
        return run(*arrays, present=present, options=options, backend=backend, needs=needs)

    return backward


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


def _readable(x: jax.Array | None) -> bool:
    """Whether values can be looked at without waiting for a GPU."""
    return x is not None and not isinstance(x, jax.core.Tracer) and all(device.platform == "cpu" for device in x.devices())


def check(op: Op, arrays: tuple, values: tuple, backend: str | None = None) -> tuple[list[jax.Array | None], tuple, Call]:
    """Inputs and settings of a call, and the call that they make. Raises what is wrong with them, in the op's names."""
    values = op.check_options(values, backend)
    for argument, value in zip(op.signature.inputs, arrays, strict=True):
        if not (isinstance(value, (jax.Array, np.ndarray)) or (value is None and argument.optional)):
            raise TypeError(f"{op.name}: {argument.name} must be a jax.Array, got {type(value).__name__}")
    inputs = [None if x is None else jnp.asarray(x) for x in arrays]
    given = [None if x is None else Given(x.shape, x.dtype.name, _device(x)) for x in inputs]
    return inputs, values, op.call(given, values[: len(op.options)])


def _device(x: jax.Array) -> str:
    """Where an array was put. One that is being traced, or that nobody placed, goes where the others are."""
    if isinstance(x, jax.core.Tracer) or not x.committed:
        return ""
    return ", ".join(sorted(f"{device.platform}:{device.id}" for device in x.devices()))


def _equally_varying(inputs):
    """Inside shard_map: inputs that don't vary over a mesh axis that another varies over are made to, so that what flows
    back to them is summed over it."""
    axes = loops.varying_axes(*(x for x in inputs if x is not None))
    return [x if x is None else loops.vary(x, axes) for x in inputs]
