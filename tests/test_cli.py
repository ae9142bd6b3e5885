"""python -m bridge: what it prints, what it writes, and its exit status."""

import json

import pytest
from common import NAMES, OPS, python

from bridge import __main__ as cli
from bridge import parity


def test_parity(tmp_path):
    """In a process that wasn't started for the interpreter; it starts itself over."""
    file = tmp_path / "parity.json"
    done = python(
        "-m",
        "bridge",
        "parity",
        "--dtype",
        "float32",
        "--op",
        "selective_scan_step",
        "--all",
        "--json",
        str(file),
        env={"TRITON_INTERPRET": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout  # plain text in a pipe
    found = json.loads(file.read_text())
    assert found["passed"]
    assert {row["frontend"] for row in found["errors"]} == set(NAMES)
    assert len({row["backend"] for row in found["errors"]}) == 2
    assert all(row["norm"] <= row["bound"] and row["maximum"] < 1e-4 for row in found["errors"])
    assert f"{len(found['errors'])} outputs and gradients checked: all within bounds" in done.stdout
    if len(NAMES) > 1:
        assert found["bits"]
        assert all(bits["passed"] for bits in found["bits"])


def test_parity_fails_with_an_exit_status(monkeypatch, capsys):
    monkeypatch.setitem(parity.BOUNDS, "float32", 1e-12)
    assert cli.main(["parity", "--dtype", "float32", "--op", "mhc_bwd", "--frontend", NAMES[0]]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_nan_never_passes():
    row = parity.Row("op", "case", "float32", "torch", "triton", "y", float("nan"), 0.0, 1e-2)
    assert not row.passed


def test_info(tmp_path):
    file = tmp_path / "info.json"
    done = python("-m", "bridge", "info", "--json", str(file), env={"TRITON_INTERPRET": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    for name in NAMES:
        assert found["frontends"][name]["backend"] in ("reference", "triton")
        assert found["frontends"][name]["reason"] in done.stdout


@pytest.mark.parametrize("command", [[], ["parity"], ["bench"], ["info"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_cases_have_one_from_text():
    for op in OPS:
        if op.name != "mhc_bwd":
            assert any("text" in case.name for case in op.cases)
