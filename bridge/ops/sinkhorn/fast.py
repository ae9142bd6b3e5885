"""What is particular to NVIDIA's GPUs, and its portable form for the interpreter."""

import triton
import triton.language as tl

from bridge import language

PORTABLE = tl.constexpr(language.INTERPRETING)


@triton.jit
def reciprocal(x):
    """1/x of numbers that are neither huge nor tiny, by the instruction for it: a division takes several times as long."""
    if PORTABLE or x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
