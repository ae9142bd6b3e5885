"""Tensors as the bridge sees them, and plans carried out on them."""

from functools import cache

import torch

from bridge import interpret
from bridge.language import mend_cache_folder
from bridge.plan import FP_FUSION, Launch, Plan
from bridge.signature import Array, Given

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensor: torch.Tensor | None) -> Given | None:
    if tensor is None:
        return None
    return Given(tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), str(tensor.device))


def prepared(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous, and aligned to 16 bytes: kernels are compiled for that."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def empty(array: Array, device: torch.device) -> torch.Tensor:
    return torch.empty(array.shape, dtype=DTYPES[array.dtype], device=device)


def run_compiled(plan: Plan, arrays: dict[str, torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """Carry a plan out on a GPU, on the device of the arrays and its current stream."""

    def execute(launch: Launch, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
        outputs = [empty(array, device) for array in launch.outputs.values()]
        if launch.grid:
            pointers = [_absent(DTYPES[launch.wide], device) if x is None else x for x in inputs]
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": FP_FUSION}
            launch.kernel[(launch.grid,)](*pointers, *launch.scalars, *outputs, **launch.constants, **options)
        return outputs

    mend_cache_folder()
    with torch.cuda.device(device):
        return plan.run(arrays, execute)


def run_interpreted(plan: Plan, arrays: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
    """Carry a plan out on the CPU, in Triton's interpreter."""

    def execute(launch: Launch, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
        bits = interpret.execute(launch, [None if x is None else (_bits(x), NAMES[x.dtype]) for x in inputs])
        return [torch.from_numpy(b).view(DTYPES[a.dtype]) for b, a in zip(bits, launch.outputs.values(), strict=True)]

    return plan.run(arrays, execute)


def _bits(tensor: torch.Tensor):
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _absent(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands for an array that isn't there."""
    return torch.zeros(1, dtype=dtype, device=device)
