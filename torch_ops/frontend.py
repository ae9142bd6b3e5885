"""PyTorch as parity, bench and tests see it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bridge.frontend import Arrays, Baseline, Result, Timing
from bridge.language import INTERPRETING
from bridge.op import Op
from torch_ops import baselines, loops
from torch_ops.bind import bind
from torch_ops.reference import function as reference
from torch_ops.tensors import DTYPES, card

BITS = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class TorchFrontend:
    name = "torch"

    @property
    def gpu(self) -> bool:
        return torch.cuda.is_available() and not INTERPRETING

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch",)}

    def devices(self) -> list[str]:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if self.gpu else 0)] or ["CPU"]

    def card(self) -> str:
        return card(torch.device("cuda" if self.gpu else "cpu"))

    def array(self, value: np.ndarray, dtype: str) -> torch.Tensor:
        return torch.tensor(value, dtype=DTYPES[dtype], device="cuda" if self.gpu else "cpu")

    def numpy(self, array: torch.Tensor) -> np.ndarray:
        return (array.detach().double() if array.is_floating_point() else array).cpu().numpy()

    def bits(self, array: torch.Tensor) -> np.ndarray:
        return array.detach().contiguous().cpu().view(BITS[array.element_size()]).numpy()

    def function(self, op: Op) -> Callable[..., Any]:
        return bind(op)

    def reference(self, op: Op) -> Callable[..., Any]:
        return reference(op)

    def run(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any], backend: str | None) -> Result:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
        flags = {f"return_{o.name}": True for o in op.signature.outputs if o.optional}
        outputs = bind(op)(**{**inputs, **leaves}, **options, **flags, backend=backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = torch.autograd.grad(outputs, list(leaves.values()), list(cotangents))
        return tuple(o.detach() for o in outputs), dict(zip(leaves, found, strict=True))

    def run_reference(self, op: Op, inputs: Arrays, options: Mapping[str, Any], cotangents: Sequence[Any]) -> Result:
        arrays = [inputs.get(i.name) for i in op.signature.inputs]
        chosen = [options.get(name, option.default) for name, option in op.options.items()]
        needs = [x is not None and x.is_floating_point() for x in arrays]
        with torch.no_grad():
            outputs = loops.run(op, arrays, chosen)
        found = iter(loops.gradients(op, arrays, chosen, tuple(cotangents), needs))
        return outputs, {i.name: next(found) for i, need in zip(op.signature.inputs, needs, strict=True) if need}

    def tile(self, array: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
        return array.repeat(*repeats)

    def prepare(self, function: Callable[..., Any], inputs: Arrays, cotangents: Sequence[Any], which: str) -> Callable[[], Any]:
        if which == "forward":
            return torch.no_grad()(lambda: function(**inputs))
        leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
        if which == "training forward":
            return lambda: function(**leaves)
        outputs, wanted = function(**leaves), [x for x in leaves.values() if x.requires_grad]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return lambda: torch.autograd.grad(outputs, wanted, list(cotangents), retain_graph=True)

    def copying(self, size: int) -> Callable[[], Any]:
        source = torch.zeros(size, dtype=torch.int8, device="cuda" if self.gpu else "cpu")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def wait(self, results: Any = None) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any], seconds: float) -> Timing:
        call()  # what is compiled or allocated at first
        self.wait()
        begun = time.perf_counter()
        call()
        started = time.perf_counter() - begun
        self.wait()
        count = min(max(int(seconds / (time.perf_counter() - begun)), 1), 50)
        return self._device_time(call, max(count, 3), started) if self.gpu else _wall_time(call, count)

    def _device_time(self, call: Callable[[], Any], count: int, started: float) -> Timing:
        """The median of calls between two events each. The device sleeps at first, so that the host is ahead of it: else a call
        that is over sooner than it is started would be as long as the host takes."""
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
        awake = torch.cuda.Event()
        torch.cuda._sleep(int(min(2 * count * started + 1e-3, 0.5) * 2e9))  # clocks, of at most 2 GHz
        awake.record()
        for begin, end in zip(begins, ends, strict=True):
            begin.record()
            call()
            end.record()
        ahead = not awake.query()
        self.wait()
        found = statistics.median(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)) / 1e3
        return Timing(found, not ahead and started > found / 2)

    def peak(self, call: Callable[[], Any]) -> int | None:
        if not self.gpu:
            return None
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def host_time(self, function: Callable[..., Any], inputs: Arrays) -> float:
        call, found = self.prepare(function, inputs, (), "forward"), []
        for _ in range(20):
            self.wait()
            begun = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun)
        self.wait()
        return statistics.median(found)

    def free(self) -> None:
        if self.gpu:
            torch.cuda.empty_cache()

    def baselines(self, op: Op) -> list[Baseline]:
        return baselines.of(op) if self.gpu else []


def _wall_time(call: Callable[[], Any], count: int) -> Timing:
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return Timing(statistics.median(found))


frontend = TorchFrontend()
