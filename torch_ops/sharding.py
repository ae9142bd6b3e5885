"""What DTensor is told of the passes of an op: how their arguments can be sharded, and how the results are then.

bridge/sharding.py says along which dimensions a call can be split. Over a mesh of several axes each axis splits one of them, or
none; of these strategies DTensor takes the one for which the least has to be moved.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bridge.op import Call, Op
from bridge.sharding import Axes, Pass, backward_pass, forward_pass, part, rule
from bridge.signature import Given
from torch_ops.tensors import NAMES

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

Split = tuple[str | None, ...]  # for each axis of a mesh, the dimension that it splits

_waiting: list[tuple[Op, Any, Any]] = []


def announce(op: Op, forward, backward) -> None:
    """Have DTensor told of these passes once it is there: it takes too long to import for those who don't use it."""
    _waiting.append((op, forward, backward))


@torch.compiler.assume_constant_result  # as the compiler sees it, nothing happens here
def tell() -> None:
    """Tell DTensor what it doesn't know yet, if it has been imported: without it there are no DTensors."""
    if _waiting and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        propagator = DTensor._op_dispatcher.sharding_propagator
        while _waiting:
            op, forward, backward = _waiting.pop()
            info = RuntimeSchemaInfo(len(op.signature.inputs), needs_pytree=True)
            propagator.register_op_strategy(forward, partial(_forward, op), info)
            propagator.register_op_strategy(backward, partial(_backward, op), info)


def _forward(op: Op, schema: "OpSchema") -> "OpStrategy":
    args: tuple[Any, ...] = schema.args_schema
    call = _call(op, args)
    return _strategy(schema, op, call, forward_pass(op, call, args[-1]))


def _backward(op: Op, schema: "OpSchema") -> "OpStrategy":
    args: tuple[Any, ...] = schema.args_schema
    call = _call(op, args)
    return _strategy(schema, op, call, backward_pass(op, call, args[-3]))


def _call(op: Op, args: Sequence[Any]) -> Call:
    """The call that inputs and options stand for, on the arrays as a whole."""
    n = len(op.signature.inputs)
    return op.call([x and Given(tuple(x.shape), NAMES[x.tensor_meta.dtype]) for x in args[:n]], args[n : n + len(op.options)])


def _strategy(schema: "OpSchema", op: Op, call: Call, arrays: Pass) -> "OpStrategy":
    """All ways to carry a pass out over the mesh of its arguments, and what moving these there would cost."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    mesh, arguments, ways = schema.get_mesh_from_args(), schema.args_strategy, []
    for split in _splits(op, call, mesh):
        given = [
            DTensorSpec(mesh, _place(axes, split), tensor_meta=argument.tensor_meta)
            for axes, argument in zip(arrays.arguments, arguments, strict=True)
        ]
        made = [DTensorSpec(mesh, _place(axes, split, sums)) for axes, sums in zip(arrays.results, arrays.sums, strict=True)]
        costs = [generate_redistribute_costs(argument, spec) for argument, spec in zip(arguments, given, strict=True)]
        ways.append(OpSpec(tuple(made), given, costs))
    return OpStrategy(ways)


def _splits(op: Op, call: Call, mesh: "DeviceMesh") -> Iterator[Split]:
    for split in itertools.product((None, *rule(op, call).counts), repeat=mesh.ndim):
        parts = {dim: math.prod(n for n, d in zip(mesh.shape, split, strict=True) if d == dim) for dim in split if dim}
        if part(op, call, parts) is not None:
            yield split


def _place(axes: Axes, split: Split, sums: Sequence[str] = ()) -> tuple["Placement", ...]:
    """Where an array lies, on each axis of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return tuple(Shard(axes.index(dim)) if dim in axes and dim else Partial() if dim in sums else Replicate() for dim in split)
