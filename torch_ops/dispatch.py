"""The passes of an op as dispatcher ops: torch.ops.kernel_bridge.<name>_forward and <name>_backward.

Each has one implementation for tensors on a CPU or a GPU, which checks the call and carries it out on the backend that
it finds, and one for fake tensors, which says what comes out.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from bridge.backends import choose
from bridge.op import Call, Op
from bridge.options import Choice, Flag, Integer, Real
from bridge.signature import Array
from torch_ops import loops
from torch_ops.tensors import as_numpy, card, describe, empty, prepared, run

Pass = Callable[..., list[torch.Tensor]]

_library = torch.library.Library("kernel_bridge", "DEF")


def define(op: Op) -> tuple[Pass, Pass]:
    """forward(*inputs, *options, backend, save) -> outputs, then what is saved besides;
    backward(*inputs, *options, backend, needs, saved, cotangents) -> the gradients that are needed."""
    n, k = len(op.signature.inputs), len(op.options)

    def further(call: Call, save: bool, backend: str) -> list[Array]:
        """What is saved besides outputs. It is for kernels: the loop saves nothing, and hands empty tensors on."""
        saved = list(op.results(call, save).values())[len(call.outputs) :]
        return [Array((0,) * len(a.shape), a.dtype) for a in saved] if backend == "reference" else saved

    def forward(*args):
        inputs, call, backend, device = split(op, args[:-1], op.known_call)
        check_values(op, call, inputs)
        if backend != "reference":
            arrays = dict(zip(call.given, map(prepared, inputs), strict=True))
            return run(op.forward_plan(call, args[-1]), backend, arrays, device)
        with torch.no_grad():
            outputs = [o.contiguous() for o in loops.run(op, inputs, args[n : n + k])]
        own = [o.clone() if any(o is x for x in inputs) else o for o in outputs]  # a dispatcher op must not return its input
        return own + [empty(a, device) for a in further(call, args[-1], backend)]

    def forward_fake(*args):
        _, call, backend, device = split(op, args[:-1])
        return [empty(a, device) for a in (*call.outputs.values(), *further(call, args[-1], backend))]

    def backward(*args):
        needs, saved, cotangents = args[-3:]
        inputs, call, backend, device = split(op, args[:-3], op.known_call)
        if backend == "reference" or op.backward is None:
            return [g.contiguous() for g in loops.gradients(op, inputs, args[n : n + k], cotangents, needs)]
        arrays = dict(zip(call.given, map(prepared, inputs), strict=True))
        arrays.update(zip(op.saves(call.options), map(prepared, saved), strict=True))
        arrays.update(zip((f"d{name}" for name in op.output_names), map(prepared, cotangents), strict=True))
        needed = tuple(name for name, need in zip(call.given, needs, strict=True) if need)
        return run(op.backward_plan(call, needed), backend, arrays, device)

    def backward_fake(*args):
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, need in zip(args[:n], args[-3], strict=True) if need]

    given = schema(op)
    return (
        register(f"{op.name}_forward", f"({given}, bool save) -> Tensor[]", forward, forward_fake),
        register(
            f"{op.name}_backward", f"({given}, bool[] needs, Tensor[] saved, Tensor[] cotangents) -> Tensor[]", backward, backward_fake
        ),
    )


def register(name: str, schema: str, implementation: Callable, fake: Callable) -> Pass:
    _library.define(name + schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"kernel_bridge::{name}", fake, lib=_library)
    return getattr(torch.ops.kernel_bridge, name).default


def split(op: Op, args: Sequence[Any], check: Callable[..., Call] | None = None) -> tuple[Sequence[Any], Call, str, torch.device]:
    """Inputs, the call as `check` has checked it, the backend and the device from inputs, options and backend."""
    n, k = len(op.signature.inputs), len(op.options)
    device = next(x.device for x in args[:n] if x is not None)
    call = (check or op.call)(tuple(map(describe, args[:n])), tuple(args[n : n + k]), card(device))
    return args[:n], call, choose(op.name, args[n + k], device.type == "cuda")[0], device


def check_values(op: Op, call: Call, inputs: Sequence[torch.Tensor | None]) -> None:
    """Look at the values of integer inputs, where that doesn't wait for a device."""
    given = zip(call.given, inputs, strict=True)
    op.check_values(call, {name: as_numpy(x) for name, x in given if name in op.values and x is not None and x.device.type == "cpu"})


def schema(op: Op, written: Collection[str] = ()) -> str:
    """The arguments of a pass, as the dispatcher wants them declared; those `written` are changed in place."""
    kinds = {Flag: "bool", Integer: "int", Real: "float", Choice: "str"}
    tensors = [f"Tensor{f'({i.name}!)' if i.name in written else ''}{'?' * i.optional} {i.name}" for i in op.signature.inputs]
    options = [f"{kinds[type(option)]}{'?' * (option.default is None)} {name}" for name, option in op.options.items()]
    return ", ".join([*tensors, *options, "str? backend"])
