"""examples/several_gpus.py on devices that the CPU plays."""

import json

import pytest
from common import NAMES, python

PLAYED = {"BRIDGE_TEST_FRONTENDS": "", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
# Gradients of A, D and delta_bias, 48 numbers, are summed where the batch or time is split; of B and C, 512, where channels are.
# A device sends 2 (k - 1) / k of each, and over time k - 1 times 40 numbers forward, backward once (JAX) or twice as many.
FOUND = {
    "torch": (2, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"], [192, 2048, 192 + 3 * 160, 0]),
    "jax": (4, [], [288, 3072, 288 + 2 * 3 * 160, 0]),
}


@pytest.mark.parametrize("framework", [name for name in FOUND if name in NAMES])
def test_several(framework, tmp_path):
    count, launcher, sent = FOUND[framework]
    # Without emitters XLA compiles in half of the time.
    flags = f"--xla_force_host_platform_device_count={count} --xla_cpu_use_fusion_emitters=false"
    environment = {**PLAYED, "XLA_FLAGS": flags}
    arguments = ["--framework", framework, "--backend", "reference", "--repeat", "1", "--json", str(tmp_path / "found.json")]
    ran = python(*launcher, "examples/several_gpus.py", *arguments, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["framework"], found["devices"]) == (framework, count)
    rows = found["rows"]
    expected = [("selective_scan", "batch"), ("selective_scan", "channels"), ("selective_scan", "time"), ("sinkhorn", "batch")]
    assert [(row["op"], row["split"]) for row in rows] == expected
    assert [row["bytes"] for row in rows] == sent
    assert all(row["passed"] and row["error"] <= 1e-5 and min(row["one"], row["all"], row["part"]) > 0 for row in rows)
