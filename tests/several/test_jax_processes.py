"""Two processes of jax.distributed: a batch, and a sequence, over the devices of both."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT

pytest.importorskip("jax")
from jax_settings import ALL


def test_two_processes(covers):
    for op in ALL:
        covers("jax", "several processes", op.name)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(Path(__file__).with_name("jax_process.py")), address]
    processes = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("agree" in text for text in said), "\n".join(said)
