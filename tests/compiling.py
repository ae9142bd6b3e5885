"""Compiles every kernel of the ops' cases without a GPU, for the GPUs named on the command line (80, 90, 100), or of named cases.

A program of its own: kernels can't be compiled in a process that interprets them. Prints one line of JSON a kernel:
its name, the GPU, registers, bytes of stack, sums of pairs of lanes that a product was fused into, and seconds.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bridge import Launch, Plan, ops, parity
from bridge.case import Case
from bridge.op import Op
from bridge.plan import FP_FUSION
from bridge.signature import Array
from examples.causal_conv1d import causal_conv1d

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def plans(op: Op, case: Case, dtype: str) -> list[tuple[Plan, dict[str, Array]]]:
    """The plans of a case, and the arrays that they start from."""
    call = parity.call_of(op, case, case.inputs(), dtype)
    inputs = {name: array for name, array in call.given.items() if array}
    made = [(op.forward_plan(call, save), inputs) for save in (False, True)]
    if op.backward:
        results = op.results(call, True) | {f"d{name}": array for name, array in call.outputs.items()}
        made.append((op.backward_plan(call, call.floating), inputs | results))
    return made


def source(launch: Launch, arrays: dict[str, Array]) -> ASTSource:
    """The kernel as a launch calls it: pointers aligned to 16 bytes, nothing known of scalars."""
    kernel = launch.kernel
    inputs = [TYPES[arrays[name].dtype if name in arrays else launch.wide] for name in launch.inputs]
    scalars = ["i32" if isinstance(s, int) else "fp32" for s in launch.scalars]
    outputs = [TYPES[array.dtype] for array in launch.outputs.values()]
    types = [*("*" + t for t in inputs), *scalars, *("*" + t for t in outputs)]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(launch.constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    constants = {(kernel.arg_names.index(name),): value for name, value in launch.constants.items()}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def key(launch: Launch, made: ASTSource) -> str:
    return str((launch.kernel.fn.__name__, made.signature, made.constants, launch.num_warps, launch.num_stages))


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack frame."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2])


def fused_pairs(ptx: str) -> int:
    """How often a product is fused with a value that came from another lane: then two lanes round one sum differently."""
    shuffled = set(re.findall(r"shfl\.sync\S*\s+(%r\d+)", ptx))
    shuffled |= {to for to, source in re.findall(r"mov\.b32\s+(%[fr]\d+),\s*(%[rf]\d+);", ptx) if source in shuffled}
    return sum(addend in shuffled for addend in re.findall(r"fma\.rn\.f32\s+%\w+,\s*%\w+,\s*%\w+,\s*(%\w+);", ptx))


def main(targets: list[int], dtypes: list[str], names: list[str], cases: list[str]) -> None:
    seen = set()
    known = {**ops, causal_conv1d.name: causal_conv1d}
    for op in (known[name] for name in names or ops):
        for case in op.cases:
            for dtype in dtypes if not cases or case.name in cases else ():
                for plan, arrays in plans(op, case, dtype):
                    arrays = arrays | plan.arrays
                    for launch in plan.launches:
                        made = source(launch, arrays)
                        for target in targets:
                            if (target, key(launch, made)) in seen:
                                continue
                            seen.add((target, key(launch, made)))
                            started = time.perf_counter()
                            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": FP_FUSION}
                            compiled = triton.compile(made, target=GPUTarget("cuda", target, 32), options=options)
                            registers, stack = resources(compiled.asm["cubin"])
                            seconds = round(time.perf_counter() - started, 1)
                            kernel = f"{op.name}.{launch.kernel.fn.__name__}"
                            print(
                                json.dumps(
                                    {
                                        "kernel": kernel,
                                        "case": case.name,
                                        "dtype": dtype,
                                        "target": target,
                                        "registers": registers,
                                        "fused": fused_pairs(compiled.asm["ptx"]),
                                        "stack": stack,
                                        "seconds": seconds,
                                    }
                                ),
                                flush=True,
                            )


if __name__ == "__main__":
    names, cases = (argument.split(",") if argument else [] for argument in (*sys.argv[3:], "", "")[:2])
    main([int(t) for t in sys.argv[1].split(",")], sys.argv[2].split(","), names, cases)
