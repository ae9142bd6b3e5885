"""What only a GPU shows of PyTorch: graphs, streams, and a device that isn't the current one."""

import subprocess
import sys

import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, by_name, resized
from own_op import weighted

torch = pytest.importorskip("torch")
FRONTEND = next((f for f in FRONTENDS if f.name == "torch"), None)
if FRONTEND is None or KERNELS != "triton":
    pytest.skip("needs torch and a GPU", allow_module_level=True)

SIZES = {
    "selective_scan": dict(b=2, t=67, d=36, n=8),
    "selective_scan_step": dict(b=3, d=36, n=8),
    "sinkhorn": {"...": (70,), "n": 4},
    "mhc_bwd": {"...": (70,), "n": 4},
    "weighted": dict(b=2, t=9, d=20),
}
EVERY = [*OPS, weighted]
WAIT = 200_000_000  # cycles: long enough for what doesn't wait to come too early


class Setting:
    """An op as a function of the list of its arrays, and arrays for it."""

    def __init__(self, op, dtype="float32"):
        case = resized(next((c for c in op.cases if c.name == "everything"), op.cases[0]), **SIZES[op.name])
        flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
        options, bound = case.options, FRONTEND.function(op)
        given = arrays(FRONTEND, case, dtype)
        self.names, self.arrays = list(given), list(given.values())
        self.others = list(arrays(FRONTEND, case, dtype, seed=1).values())

        def call(*values):
            made = bound(**dict(zip(self.names, values, strict=True)), **options, **flags)
            return made if isinstance(made, tuple) else (made,)

        self.call = call

    def results(self, values):
        """Outputs and gradients."""
        leaves = [x.detach().requires_grad_() for x in values]
        made = self.call(*leaves)
        return [*(o.detach() for o in made), *torch.autograd.grad(sum(torch.sin(o).sum() for o in made), leaves)]


def same(found, expected):
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other.to(one.device)) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_graph(op, covers):
    """Forward and backward, captured once and replayed on other numbers."""
    covers("torch", "CUDA graph", op.name)
    s = Setting(op)
    expected = s.results(s.others)
    places = [x.clone() for x in s.arrays]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        s.results(places)  # kernels are compiled outside of a capture
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = s.results(places)
    for place, other in zip(places, s.others, strict=True):
        place.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    same(captured, expected)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_graphed_callable(op, covers):
    covers("torch", "CUDA graph", op.name)
    s = Setting(op)
    expected = s.results(s.others)
    graphed = torch.cuda.make_graphed_callables(s.call, tuple(x.clone().requires_grad_() for x in s.arrays))
    leaves = [x.detach().clone().requires_grad_() for x in s.others]
    made = graphed(*leaves)
    found = [*(o.detach() for o in made), *torch.autograd.grad(sum(torch.sin(o).sum() for o in made), leaves)]
    same(found, expected)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_stream(op, covers):
    """A pass runs on the stream that is current, behind what it waits for: several streams at a time, each with its numbers."""
    covers("torch", "streams", op.name)
    s = Setting(op)
    expected = [s.results(s.arrays), s.results(s.others)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    places = [[torch.full_like(x, float("nan")) for x in s.arrays] for _ in streams]
    torch.cuda.synchronize()
    found = []
    for stream, place, values in zip(streams, places, (s.arrays, s.others), strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(WAIT)
            for one, other in zip(place, values, strict=True):
                one.copy_(other)
            found.append(s.results(place))
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_deterministic_algorithms(op, covers):
    covers("torch", "deterministic algorithms", op.name)
    s = Setting(op)
    expected = s.results(s.arrays)
    torch.use_deterministic_algorithms(True)
    try:
        same(s.results(s.arrays), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("op", EVERY, ids=by_name)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_for_the_gpu(op, mode, covers):
    """By Inductor, between other operations, and with arrays that don't begin at a multiple of 16 bytes; with CUDA graphs too."""
    covers("torch", "Inductor", op.name)
    torch._dynamo.reset()
    s = Setting(op)

    def function(*values):
        return tuple(torch.sin(o) for o in s.call(*(x * 2 for x in values)))

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    leaves = []
    for x in s.arrays:
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
        leaves.append(shifted.copy_(x).requires_grad_())
    for _ in range(3):  # a graph is captured at the second call
        made = compiled(*leaves)
        found = [*(o.detach().clone() for o in made), *torch.autograd.grad(sum(o.sum() for o in made), leaves)]
    expected = function(*leaves)
    gradients = torch.autograd.grad(sum(o.sum() for o in expected), leaves)
    for one, other in zip(found, (*expected, *gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


RELU = """
import torch
program = torch.export.export(torch.nn.ReLU(), (torch.ones(3, device="cuda"),))
package = torch._inductor.aoti_compile_and_package(program, package_path={path!r})
torch._inductor.aoti_load_package(package)(torch.ones(3, device="cuda"))
"""


def test_compiled_ahead_of_time(tmp_path, covers):
    from test_torch_compile import check_package

    plain = RELU.format(path=str(tmp_path / "plain.pt2"))
    if subprocess.run([sys.executable, "-c", plain], capture_output=True).returncode:
        pytest.skip("PyTorch can't load a package that it made of nothing but a ReLU")

    for op in EVERY:
        covers("torch", "AOTInductor", op.name)
    check_package(None, tmp_path / "ops.pt2", *EVERY)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", EVERY, ids=by_name)
def test_another_device(op, covers):
    """Arrays on a GPU that isn't the current one: results are there, and the current device stays what it was."""
    covers("torch", "another device", op.name)
    s = Setting(op)
    expected = s.results(s.arrays)
    found = s.results([x.to("cuda:1") for x in s.arrays])
    assert {x.device for x in found} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 1030, 365), (2, 1024, 1024), (2, 3, 440, 720), (1, 2, 9, 2**16)], ids=str)
def test_time_last(shape, dtype):
    """Arrays that lie with time last are copied by a kernel of ours."""
    from torch_ops.tensors import lies_time_last, prepared

    x = torch.randn(shape, device="cuda").to(getattr(torch, dtype)).movedim(-1, 1)
    made = prepared(x)
    assert lies_time_last(x)
    assert made.is_contiguous()
    assert torch.equal(made, x)


def test_kernels_of_a_pass_are_compiled_together(monkeypatch):
    """All before the first is started, and none again."""
    import triton

    from torch_ops import tensors

    happened, start = [], tensors.start
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: happened.append("compiled"))
    monkeypatch.setattr(tensors, "start", lambda *given: (happened.append("started"), start(*given)))
    x = torch.rand(1, 4500, 52, device="cuda", dtype=torch.bfloat16)  # of sizes that no other test has
    B = torch.rand(1, 4500, 4, device="cuda", dtype=torch.bfloat16)
    FRONTEND.function(OPS[0])(x, x, -torch.rand(52, 4, device="cuda"), B, B)
    first = happened.index("started")
    assert happened[:first].count("compiled") == len(happened[first:]) == 4
    assert set(happened[first:]) == {"started"}
