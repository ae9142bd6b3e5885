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


def _room(count: int) -> str:
    """An assembly block that hands an integer on, and has `count` others live at a time: x_0, x_(k+1) = x_k^2 + 5, all of them
    combined in reverse order. y (y + 1) is even, so what is left of them in the end is 0, but the assembler doesn't know."""
    squares = "".join(f"mad.lo.s32 x{k + 1}, x{k}, x{k}, 5; " for k in range(count))
    combined = "".join(f"xor.b32 y, y, x{k}; " for k in reversed(range(count)))
    even = "mad.lo.s32 y, y, y, y; and.b32 y, y, 1; xor.b32 $0, $1, y;"
    return f"{{ .reg .b32 y, x<{count + 1}>; mov.b32 x0, $1; {squares}mov.b32 y, x{count}; {combined}{even} }}"


ROOM = tl.constexpr(_room(80))


@triton.jit
def roomy(index):
    """The same int32, in a kernel that gets 90 registers a lane at least.

    The assembler gives a kernel as few as it can, and reads and computes each number just before it is used. That pays where other warps
    fill the time, but a scan has about two for each scheduler of a GPU: it has to have what comes next under way itself. No
    option for it is passed on by both frameworks; a place in the kernel that can't do with fewer does the same.
    """
    if PORTABLE:
        return index
    else:
        return tl.inline_asm_elementwise(ROOM, "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
