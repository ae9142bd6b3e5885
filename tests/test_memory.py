"""What is kept, what is allocated, and what isn't."""

import pytest
from common import FRONTENDS, KERNELS, arrays, by_name, python

from bridge import Op, ops

SCAN = ops["selective_scan"]


@pytest.mark.parametrize("wanted", [("x",), ("A", "D"), ("B",), ("delta_bias", "initial_state")], ids=str)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_only_the_gradients_that_are_asked_for(frontend, wanted, monkeypatch):
    """In both frameworks the plan of the backward pass is that of the gradients that somebody wants."""
    planned, plan = [], Op.backward_plan

    def record(op, call, needs):
        planned.append(needs)
        return plan(op, call, needs)

    monkeypatch.setattr(Op, "backward_plan", record)
    case = next(c for c in SCAN.cases if c.name == "everything")
    given = arrays(frontend, case, "float32")
    function = frontend.function(SCAN)
    if frontend.name == "torch":
        for name in wanted:
            given[name].requires_grad_()
        function(**given, **case.options, backend=KERNELS).sum().backward()
        assert all((given[name].grad is not None) == (name in wanted) for name in given)
    else:
        import jax

        def loss(chosen):
            return function(**{**given, **chosen}, **case.options, backend=KERNELS).sum()

        jax.jit(jax.grad(loss))({name: given[name] for name in wanted})
    assert planned == [wanted]


LONG = """
import re, numpy as np
from pathlib import Path
from bridge.frontend import load
from bridge import ops
f = load({name!r})
if f.name == "torch":
    type(f).gpu = False
t, d, n = 4096, 256, 16
rng = np.random.default_rng(0)
shapes = dict(x=(1, t, d), delta=(1, t, d), A=(d, n), B=(1, t, n), C=(1, t, n))
inputs = {{k: f.array(-rng.random(s) if k == "A" else rng.random(s), "float32") for k, s in shapes.items()}}
cotangents = [f.array(rng.standard_normal((1, t, d)), "float32"), f.array(rng.standard_normal((1, d, n)), "float32")]
outputs, found = f.run(ops["selective_scan"], inputs, {{}}, cotangents, "reference")
assert all(np.isfinite(f.numpy(g)).all() for g in found.values())
# The peak of this program alone: getrusage counts that of the process which started it, too.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_the_loop_trains_in_memory_that_grows_with_the_root_of_t(frontend):
    """t = 4096, d = 256, n = 16 on a CPU: all states together would be 64 MB in each of many copies; under 2 GB in all."""
    done = python(
        "-c", LONG.format(name=frontend.name), env={"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "", "TRITON_INTERPRET": ""}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2000, done.stdout


TORCH_GPU = [f for f in FRONTENDS if f.name == "torch" and f.gpu]


@pytest.mark.skipif(not TORCH_GPU, reason="needs torch and a GPU")
def test_training_memory():
    """b 8, t 2048, d 2048, n 16 in bfloat16: at most 1 byte of state is kept for an element of x, and forward and backward
    together peak at 2.5 times the inputs, outputs and gradients."""
    import torch

    import torch_ops

    b, t, d, n = 8, 2048, 2048, 16

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    given = [normal(b, t, d), normal(b, t, d), -torch.rand(d, n, device="cuda"), normal(b, t, n), normal(b, t, n)]
    given = [x.requires_grad_() for x in given]
    dy = normal(b, t, d)
    torch_ops.selective_scan(*given, delta_softplus=True).backward(dy)  # compiles
    for x in given:
        x.grad = None
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = torch_ops.selective_scan(*given, delta_softplus=True)
    size = 2 * b * t * d
    kept = torch.cuda.memory_allocated() - start - size
    assert kept <= b * t * d + 4 * b * d * n + 2**21, kept  # the final state is an output too
    y.backward(dy)
    floor = sum(2 * x.nbytes for x in given) + 2 * size
    held = sum(x.nbytes for x in given) + size  # inputs and dy were there before
    peak = torch.cuda.max_memory_allocated() - start + held
    print(f"kept {kept / (b * t * d):.3f} bytes an element; peak {peak / floor:.2f} of {floor / 2**20:.0f} MiB")
    assert peak <= 2.5 * floor


# One tensor each with more than 2^31 elements, or more rows than a grid's other axes have; all else small.
LARGE = {
    "d 70000": dict(b=1, t=3, d=70_000, n=3),
    "b 70000": dict(b=70_000, t=2, d=5, n=3),
    "x": dict(b=1, t=2**20 + 7, d=2049, n=1),
    "x, batches": dict(b=2**15 + 1, t=32, d=2049, n=1),
    "A": dict(b=1, t=2, d=2**23 + 3, n=257),
    "B": dict(b=1, t=2**23 + 5, d=2, n=257),
    "state": dict(b=2**13 + 1, t=2, d=1025, n=257),
}


@pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
@pytest.mark.skipif(not TORCH_GPU, reason="needs torch and a GPU")
def test_large(sizes):
    """The last channels of the last batch, at their last steps, are what a call on them alone gives, gradients too."""
    import torch

    import torch_ops

    torch.manual_seed(0)
    b, t, d, n = (sizes[dim] for dim in "btdn")
    few, narrow = min(b, 2), min(d, 2)

    def make(*shape):
        return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_()

    x, delta, B, C = make(b, t, d), make(b, t, d).abs_().mul_(0.1), make(b, t, n), make(b, t, n)
    A, state = -make(d, n).abs_(), make(b, d, n)
    given = [v.requires_grad_() for v in (x, delta, A, B, C, state)]
    dy = make(b, t, d)
    y, final = torch_ops.selective_scan(x, delta, A, B, C, initial_state=state, return_final_state=True)
    found = torch.autograd.grad(y, given, dy)
    last = slice(b - few, b), slice(None), slice(d - narrow, d)
    # The same numbers alone; a gradient that is summed over what is left out can't be compared.
    part = [
        v.detach()[cut].clone().requires_grad_()
        for v, cut in zip(given, (last, last, last[2:], last[:1], last[:1], (last[0], last[2])), strict=True)
    ]
    y_part, final_part = torch_ops.selective_scan(*part[:5], initial_state=part[5], return_final_state=True)
    expected = torch.autograd.grad(y_part, part, dy[last])

    def close(one, other):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)

    close(y[last], y_part)
    close(final[last[0], last[2]], final_part)
    close(found[0][last], expected[0])
    close(found[1][last], expected[1])
    close(found[5][last[0], last[2]], expected[5])
    if b == few:
        close(found[2][last[2]], expected[2])
    if d == narrow:
        close(found[3][last[0]], expected[3])
        close(found[4][last[0]], expected[4])
    for g in found:
        assert torch.isfinite(g.sum(dtype=torch.float32))
