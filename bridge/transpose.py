"""Arrays that lie with time last, brought into the order that kernels read: a copy at the speed of one."""

from functools import lru_cache

import triton
import triton.language as tl

from bridge.plan import Launch, Plan, cdiv
from bridge.signature import Array

BLOCK = 64  # rows and columns of a tile: whole sectors on both sides
UNIT = 8  # numbers that are read and written together, where sizes allow it


@triton.jit(do_not_specialize=["rows", "columns"])
def transpose(source, rows, columns, turned, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """turned (b c r) from source (b r c). Sizes are in units, so that the compiler knows that they are multiples of it."""
    height, width = rows * UNIT, columns * UNIT
    down, across = tl.cdiv(height, BLOCK), tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    begin = (program // (down * across)).to(tl.int64) * height * width
    i = program // across % down * BLOCK + tl.arange(0, BLOCK)
    j = program % across * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(source + begin + (i[:, None].to(tl.int64) * width + j[None, :]), mask=(i < height)[:, None] & (j < width)[None, :])
    tl.store(
        turned + begin + (j[:, None].to(tl.int64) * height + i[None, :]), tl.trans(tile), mask=(j < width)[:, None] & (i < height)[None, :]
    )


@lru_cache(maxsize=1024)
def transposition(b: int, rows: int, columns: int, dtype: str) -> Plan:
    """`turned` b columns rows, from `source` b rows columns."""
    unit = UNIT if rows % UNIT == 0 and columns % UNIT == 0 else 1
    grid = b * cdiv(rows, BLOCK) * cdiv(columns, BLOCK)
    turned = {"turned": Array((b, columns, rows), dtype)}
    launch = Launch(transpose, grid, ("source",), (rows // unit, columns // unit), turned, {"UNIT": unit, "BLOCK": BLOCK})
    return Plan((launch,), ("turned",))
