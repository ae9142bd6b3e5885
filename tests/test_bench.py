"""python -m bridge bench: its arithmetic, what it does when something fails, and a run on small cases."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from common import FRONTENDS, KERNELS, NAMES, OPS, by_name, python

from bridge import __main__ as cli
from bridge import bench, limits, ops, plot
from bridge.bench import Bench, Job, Row
from bridge.frontend import Baseline, Timing
from bridge.limits import Card

SCAN, SINKHORN = ops["selective_scan"], ops["sinkhorn"]
MAMBA = Job(SCAN, SCAN.models[0], "bfloat16")  # b 8, t 2048, d 2048, n 16, all inputs in two bytes
X, BC, A, STATE = 8 * 2048 * 2048, 8 * 2048 * 16, 2048 * 16, 8 * 2048 * 16
SAVED = 8 * (2048 // 64) * 16 * 2048


def test_bytes_of_a_pass():
    call = bench.full_call(MAMBA)
    inputs = 2 * (2 * X + A + 2 * BC)
    outputs = 2 * X + 4 * STATE
    assert limits.moved(SCAN, call, "forward") == inputs + outputs
    assert limits.moved(SCAN, call, "training forward") == inputs + outputs + 4 * SAVED
    assert limits.moved(SCAN, call, "backward") == inputs + 4 * SAVED + outputs + inputs
    assert limits.made(SCAN, call, "forward") == outputs
    assert limits.made(SCAN, call, "training forward") == outputs + 4 * SAVED
    assert limits.made(SCAN, call, "backward") == inputs


def test_exponentials_of_a_pass():
    """One a state and step, and twice as many where time is cut; b t d n / (16 x multiprocessors x clock) is their time."""
    whole, cut = (bench.full_call(Job(SCAN, case, "float32")) for case in SCAN.models[:2])
    assert limits.exponentials(SCAN, whole, "training forward") == 16 * X
    assert limits.exponentials(SCAN, cut, "forward") == 2 * 8192 * 2048 * 16
    assert limits.exponentials(SINKHORN, bench.full_call(Job(SINKHORN, SINKHORN.models[0], "float32")), "forward") is None
    assert 16 * X / Card(132, 1.98e9).exponentials == pytest.approx(0.128e-3, rel=0.01)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_full_call_has_the_sizes_of_its_case(op):
    for case in (*op.cases, *op.models):
        call = bench.full_call(Job(op, case, "float32"))
        sizes = {dim: size for dim, size in case.sizes.items() if dim in call.sizes}
        assert {dim: call.sizes[dim] for dim in sizes} == sizes
        assert call.sizes.leading == case.sizes.get("...", ())


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_inputs_repeat_their_period(frontend):
    case = replace(SCAN.models[0], sizes=dict(b=3, t=1024, d=5, n=2, g=1))
    call, inputs, (cotangent,) = bench.draw(Job(SCAN, case, "float32"), frontend)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {name: a.shape for name, a in call.given.items() if a}
    assert tuple(cotangent.shape) == (3, 1024, 5)
    x = frontend.numpy(inputs["x"])
    assert np.array_equal(x, np.tile(x[:1, :512], (3, 2, 1)))
    assert len(np.unique(x[0, :512])) > 2000


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_prepared_passes_are_the_passes(frontend):
    """What is timed gives what the op gives, outputs and every gradient."""
    job = Job(SINKHORN, SINKHORN.cases[0], "float32")
    _, inputs, cotangents = bench.draw(job, frontend)
    outputs, gradients = frontend.run(SINKHORN, inputs, {}, cotangents, "reference")

    def function(**inputs):
        return frontend.function(SINKHORN)(**inputs, backend="reference")

    for which, expected in (("forward", outputs), ("backward", gradients.values())):
        made = bench.arrays(frontend.prepare(function, inputs, cotangents, which)())
        for a, b in zip(made, expected, strict=True):
            np.testing.assert_allclose(frontend.numpy(a), frontend.numpy(b), rtol=1e-5, atol=1e-7)
    training = frontend.prepare(function, inputs, cotangents, "training forward")
    made = training()
    frontend.wait(made)
    timing = frontend.time(training, 1e-3)
    assert 0 < timing.seconds < 10


PROGRAM = """
import jax, jax.numpy as jnp
from jax_ops.program import Program

program = Program(lambda x: jnp.sort(x) + 1, jnp.arange(3.0))
compiled, arguments = program.together(4)
assert [made.tolist() for made in compiled(*arguments)] == [[1, 2, 3]] * 4
assert program.time(1e-2, 1e-4, gpu=True).seconds > 0
print(program.once.as_text().count("sort("), compiled.as_text().count("sort("))
"""


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_calls_in_one_program_are_all_there():
    """The compiler, which optimizes here, takes none of them for another: the time would be that of fewer."""
    done = python("-c", PROGRAM, env={"JAX_DISABLE_MOST_OPTIMIZATIONS": ""})
    assert done.stdout.split() == ["1", "4"], done.stderr


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_kernels_that_are_not_there_are_missed(monkeypatch):
    import jax.numpy as jnp

    from jax_ops import program

    monkeypatch.setattr(program, "KERNELS", "parameter(0)")  # of which any program has one
    with pytest.raises(RuntimeError, match="4 calls in one program should hold"):
        program.Program(lambda x: x + 1, jnp.zeros(3)).together(4)


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_nothing_is_copied_to_be_kept():
    """What the forward pass of training hands on is the outputs and the saved states, and none of its own inputs."""
    from jax_ops.frontend import frontend

    case = replace(SCAN.models[0], sizes=dict(b=2, t=8, d=16, n=4, g=1))
    call, inputs, cotangents = bench.draw(Job(SCAN, case, "float32"), frontend)
    made = frontend.prepare(frontend.function(SCAN), inputs, cotangents, "training forward")()
    shapes = sorted(tuple(x.shape) for x in made)
    assert shapes == sorted([call.outputs["y"].shape, *(a.shape for a in SCAN.saved(call).values())])


class Driver:
    """As much of CUDA's driver as tells of a card."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, handle, device):
        handle._obj.value = 40 + device
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        assert handle.value == 40
        value._obj.value = {16: 132, 13: 1_980_000}[attribute]
        return 0


def test_the_driver_is_asked_for_the_card(monkeypatch):
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: Driver())
    assert limits.card() == Card(132, 1.98e9)
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)
    assert limits.card() is None


@pytest.mark.skipif("torch" not in NAMES, reason="needs PyTorch")
@pytest.mark.parametrize(("late", "starved"), [(False, False), (True, True)])
def test_events_around_each_call(monkeypatch, late, starved):
    """The median of what events say; and whether the device was awake before the host had started all calls."""
    import torch

    from torch_ops.frontend import frontend

    events, slept, times = [], [], iter([3.0, 1.0, 2.0])

    class Event:
        def __init__(self, enable_timing=False):
            events.append(self)

        def record(self):
            self.recorded = True

        def query(self):
            return late

        def elapsed_time(self, end):
            assert self.recorded
            assert end.recorded
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(type(frontend), "wait", lambda self, results=None: None)
    calls = []
    assert frontend._device_time(lambda: calls.append(1), 3, 1.5e-3) == Timing(2e-3, starved)
    assert len(calls) == 3
    assert len(events) == 7
    assert slept[0] >= 2e9 * 3 * 1.5e-3


@pytest.mark.usefixtures("compiled")
def test_inputs_that_do_not_fit_fail_one_job(monkeypatch):
    def full(self, array, repeats):
        raise MemoryError("no room")

    monkeypatch.setattr(Clock, "tile", full)
    (row,) = run(Clock())
    assert row.failed
    assert row.note == "MemoryError: no room"


def test_jobs():
    assert {(job.op.name, job.case.name) for job in bench.jobs(True)} == {(op.name, case.name) for op in OPS for case in op.models}
    assert {job.dtype for job in bench.jobs(True)} == set(bench.DTYPES)
    assert [job.case.name for job in bench.jobs(False)] == [op.cases[0].name for op in OPS]
    assert [(job.sweep, job.case) for job in bench.jobs(True, "sinkhorn", sweep=True)] == [("count", c) for c in SINKHORN.sweeps["count"]]
    assert [job.case.name for job in bench.jobs(False, cases=["text"], op="sinkhorn")] == ["text"]
    assert [job.case for job in bench.jobs(True, "selective_scan", [SCAN.sweeps["t"][0].name], "float32")] == [SCAN.sweeps["t"][0]]
    with pytest.raises(ValueError, match="nothing of selective_scan_step to run"):
        bench.jobs(True, "selective_scan_step")
    with pytest.raises(ValueError, match="for a GPU"):
        bench.jobs(False, sweep=True)


class Clock:
    """A frontend's stand-in on which everything takes a millisecond."""

    name, gpu = "torch", True

    def __init__(self, baselines=(), error=None, factor=1.0):
        self.others, self.error, self.factor = baselines, error, factor

    def card(self):
        return ""

    def array(self, value, dtype):
        return np.asarray(value, np.float32)

    def tile(self, array, repeats):
        return np.tile(array, repeats)

    def numpy(self, array):
        return array

    def function(self, op):
        return lambda logits, **_: self.factor * logits

    def prepare(self, function, inputs, cotangents, which):
        if self.error and which == "backward":
            raise self.error
        return lambda: function(**inputs)

    def copying(self, size):
        return None

    def time(self, call, seconds):
        return Timing(1e-3)

    def peak(self, call):
        return 7

    def host_time(self, function, inputs):
        return 2e-5

    def free(self):
        pass

    def baselines(self, op):
        return list(self.others)


SMALL = Job(SINKHORN, SINKHORN.cases[0], "float32")


@pytest.fixture
def compiled(monkeypatch):
    """As if kernels were compiled here."""
    monkeypatch.setattr(bench, "choose", lambda *_: ("triton", ""))


def run(clock):
    return list(Bench([clock]).run(SMALL))


@pytest.mark.usefixtures("compiled")
def test_a_row_has_its_shares(monkeypatch):
    monkeypatch.setattr(limits, "card", lambda: Card(100, 1e9))
    found = run(Clock())
    assert [row.which for row in found] == list(limits.PASSES)
    forward = found[0]
    assert forward.copy_share == pytest.approx(forward.moved / (2 * bench.COPIED))
    assert (forward.peak, forward.host, forward.exponential_share) == (7, 2e-5, None)
    assert found[1].host is None


@pytest.mark.usefixtures("compiled")
def test_a_baseline_that_differs_is_not_timed():
    right = Baseline("right", lambda logits: logits)
    wrong = Baseline("wrong", lambda logits: 1.01 * logits)
    other = Baseline("layout", lambda logits: logits, lambda name, x: np.swapaxes(x, 0, 1), lambda x: np.swapaxes(x, 0, 1))
    absent = Baseline("elsewhere", lambda logits: logits, refuse=lambda call: "not for this")
    broken = Baseline("broken", lambda logits: 1 / 0)
    nan = Baseline("nan", lambda logits: logits * math.nan)
    found = {(row.by, row.which): row for row in run(Clock([right, wrong, other, absent, broken, nan]))}
    assert found["right", "backward"].seconds
    assert found["layout", "forward"].seconds
    for name, note in (
        ("wrong", "differ by 1e-02"),
        ("elsewhere", "not for this"),
        ("broken", "ZeroDivisionError"),
        ("nan", "differ by inf"),
    ):
        assert note in found[name, "forward"].note
        assert found[name, "forward"].seconds is None
    assert not any(row.failed for row in found.values())


@pytest.mark.usefixtures("compiled")
def test_what_fails_is_told_with_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(cli, "load", lambda name: Clock(error=RuntimeError("out of memory")))
    assert cli.main(["bench", "--op", "sinkhorn", "--case", "base", "--dtype", "float32", "--alone", "--frontend", NAMES[0]]) == 1
    printed = capsys.readouterr().out
    assert "out of memory" in printed
    assert "1 measurements failed" in printed


def test_bench(tmp_path):
    """A small case in every frontend, in a process that wasn't started for the interpreter; and its file shown again."""
    file = tmp_path / "bench.json"
    names = ["--op", "selective_scan_step", "--case", "base", "--dtype", "float32", "--alone"]
    done = python("-m", "bridge", "bench", *names, "--json", str(file), env={"TRITON_INTERPRET": "", "BRIDGE_BACKEND": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    found = json.loads(file.read_text())
    assert [(row["frontend"], row["which"]) for row in found["rows"]] == [(name, which) for name in NAMES for which in limits.PASSES]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert all(found["environment"]["frontends"][name]["versions"] for name in NAMES)
    assert found["command"].startswith("python -m bridge bench --op selective_scan_step")
    if KERNELS == "interpret":
        assert "No GPU: small cases on backend 'reference'" in done.stdout
        assert "GB/s" not in done.stdout
    assert cli.main(["bench", "--from", str(file)]) == 0


def test_what_can_not_be_run_is_refused(capsys):
    assert cli.main(["bench", "--case", "no such case", "--frontend", NAMES[0]]) == 2
    assert "no case named 'no such case'" in capsys.readouterr().out
    if KERNELS == "interpret":
        assert cli.main(["bench", "--tune", "--frontend", NAMES[0]]) == 2
        assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.skipif(KERNELS != "interpret", reason="needs a process without a GPU")
def test_a_backend_that_can_not_run_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("BRIDGE_BACKEND", "triton")
    assert cli.main(["bench", "--frontend", NAMES[0]]) == 2
    assert "needs arrays on a GPU" in capsys.readouterr().out


def test_options_that_mean_nothing_together_are_refused(capsys):
    for arguments in (["--tune", "--json", "file"], ["--from", "file", "--sweep"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["bench", *arguments])
        assert "means nothing with" in capsys.readouterr().err


def series(sweep="t", by=bench.OURS):
    times = {1024: 1.0, 4096: 1.2, 262144: 1.5}
    return [Row("selective_scan", f"t = {t}", sweep, t, "bfloat16", "forward", "torch", by, "triton", seconds=s) for t, s in times.items()]


def test_growth_is_of_the_longest_over_the_shortest():
    assert bench.growth([*reversed(series()), *series("b"), *series(by="mamba_ssm")]) == {
        "selective_scan, torch, bfloat16, forward": pytest.approx(1.5)
    }
    assert not bench.growth(series()[:1])


def test_sweeps_hold_the_number_of_elements():
    assert {case.sizes["b"] * case.sizes["t"] * case.sizes["d"] for case in SCAN.sweeps["t"]} == {2**25}
    assert [case.sizes["t"] for case in SCAN.sweeps["t"]][::4] == [1024, 262144]


def test_lines_of_a_plot():
    rows = [vars(row) for row in (*series()[::-1], replace(series()[0], seconds=None), *series("b"))]
    assert plot.lines(rows, "selective_scan", "t") == {
        ("kernel-bridge (torch, bfloat16)", "forward"): [(1024, 1000.0), (4096, 1200.0), (262144, 1500.0)]
    }


def test_plots(tmp_path):
    rows = [vars(row) for row in series()]
    with pytest.raises(ValueError if _matplotlib() else ImportError):
        plot.draw([], tmp_path)
    if _matplotlib():
        assert [file.name for file in plot.draw(rows, tmp_path)] == ["selective_scan_t.svg"]


def _matplotlib():
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None
