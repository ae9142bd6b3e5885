"""What torch.utils.flop_counter counts the passes of an op as."""

from torch.utils.flop_counter import register_flop_formula

from bridge.op import Op
from torch_ops.tensors import describe


def register(op: Op, forward, backward) -> None:
    """Have passes counted as the op says. An op that says nothing counts as nothing, as any other function."""
    if op.flops is None:
        return
    count = op.flops

    def formula(index: int):
        def counted(*args, out_val=None):
            n = len(op.signature.inputs)
            return count(op.call([describe(x) for x in args[:n]], args[n : n + len(op.options)]))[index]

        return counted

    for index, done in enumerate((forward, backward)):
        register_flop_formula(done._overloadpacket, get_raw=True)(formula(index))
