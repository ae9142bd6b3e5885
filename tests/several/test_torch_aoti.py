"""AOTInductor, which compiles C++."""

import shutil

import pytest
from test_torch_compile import NUMBERS, exported, function, inputs

from bridge import ops

torch = pytest.importorskip("torch")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_compiled_ahead_of_time(tmp_path, covers):
    """A package made once, for a batch and a time that change."""
    op = ops["selective_scan"]
    covers("torch", "AOTInductor", op.name)
    package = torch._inductor.aoti_compile_and_package(exported(op, "reference"), package_path=str(tmp_path / "op.pt2"))
    other = inputs(op, NUMBERS[1])
    found = torch._inductor.aoti_load_package(package)(*other.values())
    for one, wanted in zip(found, function(op, "reference")(**other), strict=True):
        torch.testing.assert_close(one, wanted)
