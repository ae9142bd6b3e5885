"""Op -> a differentiable PyTorch function.

Each pass is a dispatcher op (dispatch.py). Over them stand two autograd.Functions: the backward pass is one of its own,
so that vmap and a second derivative find something to hold on to. This form composes with torch.func, torch.compile and
torch.export; an autograd formula registered with the dispatcher does not.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from bridge.op import Op
from bridge.vmap import rule, unmapped
from torch_ops import flops, loops, sharding
from torch_ops.dispatch import define
from torch_ops.tensors import DTYPES, call_of, check_kinds


class _Binding:
    """An op with its two passes, and where its arguments stand: inputs, then options and backend, then the rest."""

    def __init__(self, op: Op):
        self.op, self.function = op, op.function(__package__, partial(_call, op.name))
        self.forward, self.backward = define(op)
        flops.register(op, self.forward, self.backward)
        sharding.announce(op, self.forward, self.backward)
        self.inputs, self.outputs = len(op.signature.inputs), len(op.signature.outputs)
        self.rest = self.inputs + len(op.options) + 1

    def batches(self, inputs, axes, size):
        """Where the batch stands in inputs and outputs, of which `axes` of this size are being mapped."""
        names = (i.name for i in self.op.signature.inputs)
        return self.op.batches({n: unmapped(x.shape, axis) for n, x, axis in zip(names, inputs, axes, strict=True) if x is not None}, size)

    def complete(self, cotangents, inputs, options):
        """The gradients of the outputs, with zeros for those that nothing was made of; as the others are, on a mesh, say."""
        if all(c is not None for c in cotangents):
            return cotangents
        one = next(x for x in (*cotangents, *inputs) if x is not None)
        made = call_of(self.op, inputs, options).outputs.values()
        given = zip(cotangents, made, strict=True)
        return [one.new_zeros(a.shape, dtype=DTYPES[a.dtype]) if c is None else c for c, a in given]


_bound: dict[str, _Binding] = {}


def bind(op: Op) -> Callable[..., Any]:
    """A differentiable PyTorch function of `op`: the op's inputs in order, its options by keyword, and `backend`.

    Binding an op again gives the same function. Raises ValueError for another op of the same name.
    """
    if op.name not in _bound:
        _bound[op.name] = _Binding(op)
    if _bound[op.name].op is not op:
        raise ValueError(f"another op named {op.name!r} is bound already")
    return _bound[op.name].function


def _call(name: str, arrays: tuple, values: tuple, backend: str | None):
    bound = _bound[name]
    op = bound.op
    values = op.check_options(values, backend)
    check_kinds(op, arrays)
    sharding.tell()
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        # It would take no notice of Forward's vmap, nor of its backward, and say nothing: what is around this call runs uncompiled.
        torch._dynamo.graph_break("torch.compile can't look into torch.func transforms of kernel-bridge's ops")
    args = (*arrays, *values[: len(op.options)], backend)
    save = (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)) or _transforming()
    if save or _forward_mode():
        return op.returned(_forward().apply(name, save, *args), values)
    return op.returned(bound.forward(*args, False), values)  # also because torch.compile takes no Function of which no gradient is wanted


# The functions stand at the top of the module and take the op by name: torch.compile can't look into classes that are
# made within a function.


class Forward(torch.autograd.Function):
    """(name, save, *inputs, *options, backend) -> (*outputs, *what is saved besides)"""

    @staticmethod
    def forward(name, save, *args):
        return tuple(_bound[name].forward(*args, save))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name, save, *args = inputs
        bound = _bound[ctx.name]
        ctx.settings = tuple(args[bound.inputs :])
        ctx.set_materialize_grads(False)  # they would be plain tensors, also where outputs are of another class
        ctx.mark_non_differentiable(*output[bound.outputs :])
        ctx.save_for_backward(*args[: bound.inputs], *(bound.op.kept(output, ctx.settings[:-1]) if save else ()))

    @staticmethod
    def backward(ctx, *cotangents):
        bound, kept = _bound[ctx.name], ctx.saved_tensors
        n, needs = bound.inputs, ctx.needs_input_grad[2 : 2 + bound.inputs]
        inputs, saved = kept[:n], kept[n:]
        if all(c is None for c in cotangents[: bound.outputs]):
            return (None,) * (2 + n + len(ctx.settings))
        cotangents = bound.complete(cotangents[: bound.outputs], inputs, ctx.settings[:-1])
        if torch.compiler.is_compiling():  # it has no second derivatives, and can't look into one Function from another
            found = iter(bound.backward(*inputs, *ctx.settings, list(needs), list(saved), list(cotangents)))
        else:
            found = iter(_backward().apply(ctx.name, needs, len(saved), *inputs, *ctx.settings, *saved, *cotangents))
        return None, None, *(next(found) if need else None for need in needs), *(None,) * len(ctx.settings)

    @staticmethod
    def vmap(info, axes, name, save, *args):
        bound = _bound[name]
        n = bound.inputs

        def apply(*tensors):
            return _forward().apply(name, save, *tensors, *args[n:])

        inside, outside = bound.batches(args[:n], axes[2 : 2 + n], info.batch_size)
        outside += [0] * (bound.op.further(args[n:-1]) if save else 0)
        made, where = rule(loops.xp, _each, bound.op.batch, apply, info.batch_size, axes[2 : 2 + n], args[:n], inside, outside)
        return tuple(made), tuple(where)


class Backward(torch.autograd.Function):
    """(name, needs, how many are saved, *inputs, *options, backend, *saved, *cotangents) -> the gradients that are needed"""

    @staticmethod
    def forward(name, needs, count, *args):
        bound = _bound[name]
        tensors = args[bound.rest :]
        return tuple(bound.backward(*args[: bound.rest], list(needs), list(tensors[:count]), list(tensors[count:])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name, ctx.needs, ctx.count, *args = inputs
        bound = _bound[ctx.name]
        ctx.options = tuple(args[bound.inputs : bound.rest - 1])
        ctx.save_for_backward(*args[: bound.inputs], *args[bound.rest + ctx.count :])

    @staticmethod
    def backward(ctx, *seconds):
        bound, kept = _bound[ctx.name], ctx.saved_tensors
        n = bound.inputs
        found, of_cotangents = loops.second_gradients(bound.op, kept[:n], ctx.options, kept[n:], ctx.needs, seconds)
        return None, None, None, *found, *(None,) * (bound.rest - n + ctx.count), *of_cotangents

    @staticmethod
    def vmap(info, axes, name, needs, count, *args):
        bound = _bound[name]
        n, rest = bound.inputs, bound.rest
        tensors, tensor_axes = (*args[:n], *args[rest:]), (*axes[3 : 3 + n], *axes[3 + rest :])

        def apply(*tensors):
            return _backward().apply(name, needs, count, *tensors[:n], *args[n:rest], *tensors[n:])

        batches, output_batches = bound.batches(args[:n], axes[3 : 3 + n], info.batch_size)
        inside = [*batches, *[0] * count, *output_batches]
        outside = [p for p, need in zip(batches, needs, strict=True) if need]
        made, where = rule(loops.xp, _each, bound.op.batch, apply, info.batch_size, tensor_axes, tensors, inside, outside)
        return tuple(made), tuple(where)


class Dual(Forward):
    """The same within forward-mode differentiation. (The compiler can't look into a Function that has a jvp.)"""

    @staticmethod
    def setup_context(ctx, inputs, output):
        Forward.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[2 : 2 + _bound[ctx.name].inputs])
        ctx.further = len(output) - _bound[ctx.name].outputs

    @staticmethod
    def jvp(ctx, *tangents):
        """The gradient's own gradient with respect to the cotangents, in which it is linear."""
        _check_nesting(ctx.name)
        bound, inputs, options = _bound[ctx.name], ctx.saved_tensors, ctx.settings[:-1]
        given = tangents[2 : 2 + bound.inputs]
        needs, seconds = [t is not None for t in given], [t for t in given if t is not None]
        cotangents = bound.complete([None] * bound.outputs, inputs, options)
        _, made = loops.second_gradients(bound.op, inputs, options, cotangents, needs, seconds)
        return *made, *(None,) * ctx.further


class DualBackward(Backward):
    @staticmethod
    def setup_context(ctx, inputs, output):
        Backward.setup_context(ctx, inputs, output)
        bound, args = _bound[ctx.name], inputs[3:]
        ctx.save_for_forward(*args[: bound.inputs], *args[bound.rest + ctx.count :], *output)

    @staticmethod
    def jvp(ctx, *tangents):
        """Likewise by what is linear, here the second gradients in the tangents of the gradients."""
        _check_nesting(ctx.name)
        bound, kept = _bound[ctx.name], ctx.saved_tensors
        n, end, args = bound.inputs, bound.inputs + bound.outputs, tangents[3:]
        along = (*args[:n], *args[bound.rest + ctx.count :])

        def second(*seconds):
            found, of_cotangents = loops.second_gradients(bound.op, kept[:n], ctx.options, kept[n:end], ctx.needs, seconds)
            return tuple(g for g, tangent in zip((*found, *of_cotangents), along, strict=True) if tangent is not None)

        return torch.func.vjp(second, *map(torch.zeros_like, kept[end:]))[1](tuple(t for t in along if t is not None))


for _function in (Forward.forward, Backward.forward):
    _function.__signature__ = inspect.signature(_function)  # type: ignore[attr-defined]  # apply asks in every call, and finds it here


def _each(function, slices):
    if not slices[0].shape[0]:  # results of the right shapes, none of them
        return [r.new_empty((0, *r.shape)) for r in function(*(s.new_zeros(s.shape[1:]) for s in slices))]
    made = [function(*current) for current in zip(*(s.unbind(0) for s in slices), strict=True)]
    return [torch.stack(values) for values in zip(*made, strict=True)]


def _forward() -> type[Forward]:
    return Dual if _forward_mode() else Forward


def _backward() -> type[Backward]:
    return DualBackward if _forward_mode() else Backward


def _forward_mode() -> bool:
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _check_nesting(name: str) -> None:
    """PyTorch runs a Function's jvp with forward mode off, so that one around it would find nothing, and say nothing."""
    if eager_transforms.JVP_NESTING > 1:
        raise NotImplementedError(f"{name}: has no forward mode within forward mode; use torch_ops.reference.function(op), or jacrev")


def _transforming() -> bool:
    """Under a torch.func transform requires_grad speaks of one level only: assume that a gradient will be asked for."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
