"""The matrix of transforms, ops and frameworks: docs/transforms.md, made from what tests found.

    pytest ... --matrix=FILE                 tests write what they found to FILE
    python tests/matrix.py FILE...           the page, to standard output
    python tests/matrix.py --check FILE...   exit status 1 where docs/transforms.md says something else

A test says what it shows through the fixture `covers`.
"""

import json
import sys
from pathlib import Path

from bridge import ops

PAGE = Path(__file__).parent.parent / "docs" / "transforms.md"
WORKS = "✓"

# What each is, in the order of the page.
TRANSFORMS = {
    "jax": {
        "jit": "`jax.jit`",
        "grad": "`jax.grad`, `jax.value_and_grad`, `jax.vjp`, with respect to every input",
        "jacrev": "`jax.jacrev`",
        "grad of grad": "`jax.grad` of a function of `jax.grad`; through the reference",
        "vmap": "`jax.vmap` over one argument, over those with the batch, over all: weights of an ensemble, too",
        "vmap of vmap": "`jax.vmap(jax.vmap(f))`",
        "vmap of grad": "`jax.vmap(jax.grad(f))`, gradients of each example",
        "grad of vmap": "`jax.grad` through `jax.vmap`",
        "scan": "`jax.lax.scan` over the op, and its gradient",
        "while_loop": "`jax.lax.while_loop` (JAX differentiates none)",
        "remat": "`jax.checkpoint`, with policies by the names `<op>.<array>` of what the forward pass keeps",
        "shard_map": "`jax.shard_map` with `check_vma=True`: gradients of weights are summed, wrong `out_specs` are an error",
        "Auto mesh": "`jax.jit` over split arrays, axes of type Auto: no array is gathered, gradients of weights are summed once",
        "Explicit mesh": "the same, axes of type Explicit",
        "vmap over a mesh": "`jax.vmap` of gradients, split batch, split mapped axis",
        "export": "`jax.export`, and the program read again",
        "donation": "`donate_argnums`",
        "cost": "`compiled.cost_analysis()` counts operations",
        "forward mode": "`jax.jvp`, `jax.jacfwd`; in a compiled function the error is in JAX's own words",
        "time over devices": "`selective_scan_over_time`: steps split over a mesh axis, and gradients",
        "several processes": "`jax.distributed`",
    },
    "torch": {
        "autograd": "`backward`, `torch.autograd.grad`, with respect to every input",
        "double backward": "`create_graph=True`, `gradgradcheck`; through the reference",
        "grad": "`torch.func.grad`, `torch.func.vjp`",
        "jacrev": "`torch.func.jacrev`",
        "grad of grad": "`torch.func.grad` of a function of `torch.func.grad`",
        "hessian": "`torch.func.hessian`: forward mode over reverse mode",
        "forward mode": "`torch.func.jvp`, `jacfwd`, `forward_ad`; through the reference; within itself it is an error",
        "vmap": "`torch.func.vmap` over one argument, over those with the batch, over all: weights of an ensemble, too",
        "vmap of vmap": "`vmap(vmap(f))`",
        "vmap of grad": "`vmap(grad(f))`, gradients of each example",
        "grad of vmap": "`grad` through `vmap`",
        "compile": "`torch.compile(fullgraph=True)`, with gradients and without: sizes that change are compiled once for all. Around calls "
        "within `torch.func` transforms the graph breaks, which `fullgraph` makes an error",
        "Inductor": "`torch.compile` with its default backend",
        "export": "`torch.export` for sizes that change, saved, loaded, decomposed",
        "AOTInductor": "`torch._inductor.aoti_compile_and_package`, for sizes that change",
        "opcheck": "`torch.library.opcheck` of both passes: contiguous, strided, empty",
        "checkpoint": "`torch.utils.checkpoint`, and a policy that keeps what `torch.ops.kernel_bridge.<op>_forward` made",
        "autocast": "`torch.autocast` casts nothing: dtypes can be mixed, and arithmetic is in float32 anyway",
        "deterministic algorithms": "`torch.use_deterministic_algorithms(True)`",
        "dispatch modes": "`TorchDispatchMode` sees one operator a pass",
        "flop counter": "`torch.utils.flop_counter` counts each pass by its definition",
        "CUDA graph": "`torch.cuda.graph`, `make_graphed_callables`: both passes",
        "streams": "passes run on the current stream",
        "another device": "arrays on a GPU that isn't the current one",
        "DTensor": "split batch or channels, on a mesh of one or two axes: no array moves, gradients are split or sums",
        "compiled DTensor": "`torch.compile(fullgraph=True)` of that, for a batch that changes and falls into equal parts",
        "tensor parallel": "`parallelize_module` for channels, with `fully_shard` for the data",
        "FSDP2": "`fully_shard`, also with checkpoints and mixed precision",
        "DDP": "`DistributedDataParallel`",
        "time over processes": "`selective_scan_over_time`: steps split over a process group, and gradients",
    },
}
GPU, NONE = "GPU", "–"
# What cells say in which nothing was found.
OTHERWISE = {"CUDA graph": GPU, "streams": GPU, "another device": GPU, "time over devices": NONE, "time over processes": NONE}
FRAMEWORKS = {"jax": "JAX", "torch": "PyTorch"}


def read(files: list[str]) -> dict[tuple[str, str, str], str]:
    """(framework, transform, op) -> what was found: what the tests said, or FAILS where one of them failed."""
    found: dict[tuple[str, str, str], str] = {}
    for file in files:
        for framework, transform, op, outcome, passed in json.loads(Path(file).read_text()):
            key = (framework, transform, op)
            found[key] = "FAILS" if not passed or found.get(key) == "FAILS" else outcome
    return found


def page(found: dict[tuple[str, str, str], str]) -> str:
    """docs/transforms.md. Raises ValueError for a transform that isn't in TRANSFORMS."""
    unknown = {(framework, transform) for framework, transform, _ in found if transform not in TRANSFORMS[framework]}
    if unknown:
        raise ValueError(f"not in TRANSFORMS: {sorted(unknown)}")
    lines = [
        "# Transforms", "",
        "What was tested of each framework's transforms, for each op: against the same transform of the loop that defines the op, or",
        f"against the op without it. {WORKS} works; {GPU}: its tests run where there is one; {NONE}: the op has no time that could be",
        "split. This page is made by `make matrix`.",
    ]  # fmt: skip
    for framework, title in FRAMEWORKS.items():
        rows = TRANSFORMS[framework]
        tested = {op for f, _, op in found if f == framework}
        columns = [*(op for op in ops if op in tested), *sorted(tested - set(ops))]
        lines += ["", f"## {title}", "", f"| transform | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cell(name, found.get((framework, name, op), '')) for op in columns)} |" for name in rows]
        lines += ["", *(f"- **{name}**: {meaning}" for name, meaning in rows.items())]
    return "\n".join(lines) + "\n"


def cell(transform: str, outcome: str) -> str:
    """What needs a GPU is the same page with one and without."""
    return outcome if outcome and (OTHERWISE.get(transform) != GPU or outcome == "FAILS") else OTHERWISE.get(transform, "")


def names(text: str) -> dict[str, list[str]]:
    """The transforms that a page has in its tables, for each framework."""
    sections = {framework: text.partition(f"## {title}\n")[2].partition("\n## ")[0] for framework, title in FRAMEWORKS.items()}
    rows = {f: [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")] for f, section in sections.items()}
    return {framework: [name for name in found if name != "transform"] for framework, found in rows.items()}


if __name__ == "__main__":
    check, files = sys.argv[1] == "--check", [a for a in sys.argv[1:] if a != "--check"]
    made = page(read(files))
    if not check:
        print(made, end="")
    elif made != PAGE.read_text():
        sys.exit(f"{PAGE.name} isn't what tests found: make matrix")
