"""An op that updates some of its inputs in place -> a PyTorch function, as one dispatcher op that says so."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bridge.op import Op
from torch_ops import loops
from torch_ops.dispatch import check_values, register, schema, split
from torch_ops.tensors import check_kinds, empty, prepared, run


def bind_in_place(op: Op, updates: Mapping[str, str]) -> Callable[..., Any]:
    """A PyTorch function of `op` that returns its first output and writes those in `updates` (output -> input) over inputs.

    It has no gradient: where one could be asked for, it raises ValueError.
    """
    first = op.output_names[0]

    def implementation(*args):
        inputs, call, backend, device = split(op, args)
        check_values(op, call, inputs)
        given = dict(zip(call.given, inputs, strict=True))
        if backend == "reference":
            made = dict(zip(op.output_names, loops.run(op, inputs, args[len(inputs) : -1]), strict=True))
        else:
            ready: dict[str, Any] = {name: prepared(x) for name, x in given.items()}
            buffers = {output: ready[name] for output, name in updates.items()}
            made = {first: run(op.forward_plan(call, False), backend, ready, device, buffers)[0], **buffers}
        for output, name in updates.items():
            if made[output] is not given[name]:  # the loop's, or that of a copy that lies as kernels want it
                given[name].copy_(made[output])
        return made[first]

    def fake(*args):
        _, call, _, device = split(op, args)
        return empty(call.outputs[first], device)

    passed = register(op.name, f"({schema(op, updates.values())}) -> Tensor", implementation, fake)

    def call(arrays: tuple, values: tuple, backend: str | None):
        values = op.check_options(values, backend)
        check_kinds(op, arrays)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
            raise ValueError(f"{op.name}: has no gradient; call it under torch.no_grad()")
        return passed(*arrays, *values[: len(op.options)], backend)

    return op.function(__package__, call)
