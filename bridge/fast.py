"""What is particular to NVIDIA's GPUs, and its portable form for the interpreter."""

import triton
import triton.language as tl
from triton import knobs

PORTABLE = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def reciprocal(x):
    """1/x of numbers that are neither huge nor tiny, by the instruction for it: a division takes several times as long."""
    if PORTABLE or x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(exponent):
    """2^exponent, by the instruction for it; results below the smallest normal number are 0.

    Written as assembly it also keeps the layout of its operand: the compiler moves no conversion across it. So the states of a
    scan stay in the lanes into which they were loaded, where a store in another order would have had all of them exchanged
    between lanes in every step.
    """
    if PORTABLE or exponent.dtype == tl.float64:
        return tl.exp2(exponent)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1)
