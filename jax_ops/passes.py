"""The passes of an op on traced arrays: what each computes, and what JAX has to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from bridge.backends import choose
from bridge.op import Call, Op
from bridge.plan import Plan
from bridge.sharding import backward_pass, forward_pass
from bridge.signature import Array, Given, Shape
from bridge.vmap import Position
from jax_ops import loops
from jax_ops.launch import run_compiled, run_interpreted
from jax_ops.sharding import Split


@dataclass(frozen=True)
class Pass:
    """A pass of `op`, as functions of the arrays that are there and of static parameters."""

    op: Op
    index: ClassVar[int]  # which of the op's FLOP counts is this pass's

    def backend(self, gpu: bool, backend: str | None) -> str:
        return choose(self.op.name, backend, gpu)[0]

    def call(self, inputs, options) -> Call:
        return self.op.call([x if x is None else Given(x.shape, x.dtype.name) for x in inputs], options)

    def carry_out(self, plan: Plan, call: Call, backend: str, arrays) -> list[jax.Array]:
        if backend == "interpret":
            return run_interpreted(plan, arrays)
        return run_compiled(plan, arrays, self.op.flops(call)[self.index] if self.op.flops else 0)

    def batches(self, shapes: Sequence[Shape], size: int, present) -> tuple[list[Position], list[Position]]:
        """Where the batch stands in the inputs that are there, and in the outputs."""
        names = [i.name for i, there in zip(self.op.signature.inputs, present, strict=True) if there]
        inside, outside = self.op.batches(dict(zip(names, shapes, strict=True)), size)
        return [p for p, there in zip(inside, present, strict=True) if there], outside


class Forward(Pass):
    """Inputs -> outputs and, where `save` asks for it, what is saved besides them."""

    index = 0

    @property
    def name(self) -> str:
        return f"{self.op.name}_forward"

    def run(self, gpu, *arrays, present, options, backend, save) -> list[jax.Array]:
        inputs = spread(arrays, present)
        call, chosen = self.call(inputs, options), self.backend(gpu, backend)
        if chosen != "reference":
            return self.carry_out(self.op.forward_plan(call, save), call, chosen, dict(zip(call.given, inputs, strict=True)))
        # Only kernels need what is saved; in a compiled program what nobody reads is not there.
        further = list(self.op.results(call, save).values())[len(self.op.output_names) :]
        return [*loops.run(self.op, inputs, options), *(loops.xp.zeros(a.shape, jnp.zeros((), a.dtype)) for a in further)]

    def results(self, *avals, present, options, backend, save) -> list[Array]:
        """Shapes and dtypes of the results."""
        return list(self.op.results(self.call(spread(avals, present), options), save).values())

    def positions(self, shapes, size, *, present, options, backend, save) -> tuple[list[Position], list[Position]]:
        """Where the batch stands in the arguments and the results, see bridge.vmap."""
        inside, outside = self.batches(shapes, size, present)
        return inside, outside + ([0] * self.op.further(options) if save else [])

    def split(self, *avals, present, options, backend, save) -> Split:
        """How the arrays can be split over devices."""
        call = self.call(spread(avals, present), options)
        return Split(self.op, call, forward_pass(self.op, call, save))


class Backward(Pass):
    """Inputs, what the forward pass kept, gradients of the outputs -> gradients of the inputs that `needs` marks."""

    index = 1

    @property
    def name(self) -> str:
        return f"{self.op.name}_backward"

    def kinds(self, arrays, present):
        n, end = sum(present), len(arrays) - len(self.op.output_names)
        return spread(arrays[:n], present), arrays[n:end], arrays[end:]

    def run(self, gpu, *arrays, present, options, backend, needs) -> list[jax.Array]:
        op, (inputs, kept, cotangents) = self.op, self.kinds(arrays, present)
        call, chosen = self.call(inputs, options), self.backend(gpu, backend)
        if chosen == "reference" or op.backward is None:
            return [g for g in loops.gradients(op, inputs, options, cotangents, needs) if g is not None]
        known = dict(zip(call.given, inputs, strict=True))
        known |= zip(op.saves(call.options), kept, strict=True)
        known |= zip((f"d{name}" for name in op.output_names), cotangents, strict=True)
        needed = tuple(name for name, need in zip(call.given, needs, strict=True) if need)
        return self.carry_out(op.backward_plan(call, needed), call, chosen, known)

    def results(self, *avals, present, options, backend, needs) -> list[Array]:
        inputs, _, _ = self.kinds(avals, present)
        return [Array(x.shape, x.dtype.name) for x, need in zip(inputs, needs, strict=True) if need]

    def positions(self, shapes, size, *, present, options, backend, needs) -> tuple[list[Position], list[Position]]:
        inside, outside = self.batches(shapes[: sum(present)], size, present)
        kept = [0] * len(self.op.saves(dict(zip(self.op.options, options, strict=True))))
        needed = [p for p, need in zip(spread(inside, present), needs, strict=True) if need]
        return [*inside, *kept, *outside], needed

    def split(self, *avals, present, options, backend, needs) -> Split:
        inputs, _, _ = self.kinds(avals, present)
        call = self.call(inputs, options)
        return Split(self.op, call, backward_pass(self.op, call, needs))


def spread(arrays, present) -> list:
    """Arrays at their places among all inputs, None where there is none."""
    rest = iter(arrays)
    return [next(rest) if there else None for there in present]
