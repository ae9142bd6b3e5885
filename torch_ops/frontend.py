"""PyTorch as parity, bench and tests see it."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bridge.frontend import Arrays, Result
from bridge.language import INTERPRETING
from bridge.op import Op
from torch_ops import loops
from torch_ops.bind import bind
from torch_ops.reference import function as reference
from torch_ops.tensors import DTYPES

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


frontend = TorchFrontend()
