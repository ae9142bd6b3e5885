"""What must stand before Triton and JAX are imported, and what all tests share."""

import json
import os
from pathlib import Path

# Without a GPU kernels run in Triton's interpreter, which decides on that when it is imported.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # small programs, each run a few times
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest
from hypothesis import settings

from bridge import interpret

NOWHERE = -(2**31)
FOUND: list[list] = []  # what tests cover, and whether they passed

settings.register_profile("here", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("here")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every buffer that is allocated empty with NaN, so that an element that no kernel writes can't hide; integers
    with one that no index is."""
    allocate = interpret.empty

    def poisoned(array):
        bits = allocate(array)
        bits.fill(0xFFFF if array.dtype == "bfloat16" else float("nan") if bits.dtype.kind == "f" else NOWHERE)
        return bits

    monkeypatch.setattr(interpret, "empty", poisoned)
    try:
        from torch_ops import tensors
    except ImportError:
        return
    allocate_tensor = tensors.empty

    def poisoned_tensor(array, device):
        tensor = allocate_tensor(array, device)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else NOWHERE)

    monkeypatch.setattr(tensors, "empty", poisoned_tensor)


@pytest.fixture
def covers(request):
    """covers(framework, transform, op, outcome): what a test shows, for the page of matrix.py."""

    def note(framework, transform, op, outcome="✓"):
        request.node.user_properties.append(("covers", (framework, transform, op, outcome)))

    return note


def pytest_addoption(parser):
    parser.addoption("--matrix", metavar="FILE", help="write what tests found of transforms to FILE, see matrix.py")


def pytest_runtest_logreport(report):
    if report.when == "call" and not report.skipped:
        FOUND.extend([*what, report.passed] for kind, what in report.user_properties if kind == "covers")


def pytest_sessionfinish(session):
    file = session.config.getoption("--matrix")
    if file and not hasattr(session.config, "workerinput"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(json.dumps(sorted(FOUND), indent=0))
