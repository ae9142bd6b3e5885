"""The ops that ship, by name."""

from bridge.op import Op
from bridge.ops.selective_scan.op import selective_scan
from bridge.ops.selective_scan_step.op import selective_scan_step
from bridge.ops.sinkhorn.op import mhc_bwd, sinkhorn

ops: dict[str, Op] = {op.name: op for op in (selective_scan, selective_scan_step, sinkhorn, mhc_bwd)}
