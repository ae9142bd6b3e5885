"""What DTensor is told of the passes of an op: how their arguments can be sharded, and how the results are then.

bridge/sharding.py says along which dimensions a call can be split. Over a mesh of several axes each axis splits one of them, or
none; of these strategies DTensor takes the one for which the least has to be moved.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bridge import sharding
from bridge.backends import choose
from bridge.op import Call, Op
from bridge.signature import Given
from torch_ops.tensors import NAMES

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

Split = tuple[str | None, ...]  # for each axis of a mesh, the dimension that it splits
Places = Callable[[Split], Sequence[tuple["Placement", ...]]]

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
    *args, save = schema.args_schema
    mesh, call = schema.get_mesh_from_args(), _call(op, args)
    rule = sharding.rule(op, call)
    given = [axes for axes in rule.inputs if axes is not None]
    made = [*rule.outputs, *(_saved(op, rule, args, mesh) if save else ())]
    return _strategy(schema, mesh, _splits(op, call, mesh), partial(_placed, given), partial(_placed, made))


def _backward(op: Op, schema: "OpSchema") -> "OpStrategy":
    *args, needs, saved, cotangents = schema.args_schema
    mesh, call = schema.get_mesh_from_args(), _call(op, args)
    rule = sharding.rule(op, call)
    further = iter(_saved(op, rule, args, mesh))
    kept = [rule.outputs[op.output_names.index(name)] if name in op.output_names else next(further) for name in op.saves(call.options)]
    given = [axes for axes in (*rule.inputs, *kept, *rule.outputs) if axes is not None]
    made = [(axes, rule.summed(i)) for i, (axes, need) in enumerate(zip(rule.inputs, needs, strict=True)) if need]

    def gradients(split: Split):
        return [_place(axes, split, summed) for axes, summed in made]

    return _strategy(schema, mesh, _splits(op, call, mesh), partial(_placed, given), gradients)


def _call(op: Op, args: Sequence[Any]) -> Call:
    """The call that inputs and options stand for, on the arrays as a whole."""
    n = len(op.signature.inputs)
    given = [x and Given(tuple(x.shape), NAMES[x.tensor_meta.dtype]) for x in args[:n]]
    return op.call(given, args[n : n + len(op.options)])


def _saved(op: Op, rule: sharding.Rule, args: Sequence[Any], mesh: "DeviceMesh") -> Sequence[sharding.Axes]:
    """The loop saves nothing: what it hands on is empty, and the same everywhere."""
    return [(None,)] * len(rule.saved) if choose(op.name, args[-1], mesh.device_type == "cuda")[0] == "reference" else rule.saved


def _splits(op: Op, call: Call, mesh: "DeviceMesh") -> Iterator[Split]:
    for split in itertools.product((None, *sharding.rule(op, call).counts), repeat=mesh.ndim):
        parts = {dim: math.prod(n for n, d in zip(mesh.shape, split, strict=True) if d == dim) for dim in split if dim}
        if sharding.part(op, call, parts) is not None:
            yield split


def _placed(arrays: Sequence[sharding.Axes], split: Split) -> list[tuple["Placement", ...]]:
    return [_place(axes, split) for axes in arrays]


def _place(axes: sharding.Axes, split: Split, summed: Sequence[str] = ()) -> tuple["Placement", ...]:
    """Where an array lies, on each axis of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return tuple(Shard(axes.index(dim)) if dim in axes and dim else Partial() if dim in summed else Replicate() for dim in split)


def _strategy(schema: "OpSchema", mesh: "DeviceMesh", splits: Iterator[Split], given: Places, made: Places) -> "OpStrategy":
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    def specs(places: Sequence[tuple["Placement", ...]], metas: Sequence[Any]) -> list["DTensorSpec"]:
        return [DTensorSpec(mesh, place, tensor_meta=meta) for place, meta in zip(places, metas, strict=True)]

    arguments = schema.args_strategy
    metas = [a.strategies[0].output_spec.tensor_meta for a in arguments]
    options = []
    for split in splits:
        inputs, places = specs(given(split), metas), made(split)
        costs = [generate_redistribute_costs(a, spec) for a, spec in zip(arguments, inputs, strict=True)]
        options.append(OpSpec(tuple(specs(places, [None] * len(places))), inputs, costs))
    return OpStrategy(options)
