"""AOTInductor, which compiles C++."""

import shutil

import pytest
from test_torch_compile import EVERY, check_package


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_compiled_ahead_of_time(tmp_path, covers):
    for op in EVERY:
        covers("torch", "AOTInductor", op.name)
    check_package("reference", tmp_path / "ops.pt2", *EVERY)
