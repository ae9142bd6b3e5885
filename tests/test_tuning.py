"""Tables of block sizes: they change plans and nothing else, are checked, and are the same for both frontends."""

import json
from dataclasses import replace

import numpy as np
import pytest
from common import FRONTENDS, OPS, by_name, python

from bridge import ops, parity, tuning
from bridge.bench import Job, full_call
from bridge.case import Case
from bridge.tuning import Tunable, search

SCAN = ops["selective_scan"]
LONG = full_call(Job(SCAN, next(c for c in SCAN.models if c.sizes["t"] == 8192), "bfloat16"))


def grids(op, call, which="forward"):
    plan = op.backward_plan(call, call.floating) if which == "backward" else op.forward_plan(call, True)
    return [launch.grid for launch in plan.launches]


def table(op=SCAN, which="forward", size_class="few programs", **values):
    return {op.name: {which: {size_class: values}}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Tables from files of this test alone."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    for kept in (tuning.read, tuning._checked):
        kept.cache_clear()
    yield tmp_path
    for kept in (tuning.read, tuning._checked):
        kept.cache_clear()


def write(folder, card, content):
    (folder / f"{card}.json").write_text(json.dumps({"card": card, "ops": content}))


@pytest.mark.parametrize("file", sorted(tuning.FOLDER.glob("*.json")), ids=lambda f: f.stem)
def test_what_ships_is_right(file):
    found = tuning.read(file.stem)
    assert set(found) <= set(ops)
    assert tuning.kind(json.loads(file.read_text())["card"]) == file.stem
    for op in OPS:
        tuning.check(op, found, str(file))


def test_names_of_cards():
    assert tuning.kind("NVIDIA H200") == "nvidia_h200"
    assert tuning.kind("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia_geforce_rtx_4090_laptop"
    assert tuning.kind("") == ""


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_table_changes_the_plan_of_its_card(folder, which):
    candidates = SCAN.tunables[which]["wanted"].candidates
    write(folder, "fast", table(which=which, wanted=candidates[-1]))
    write(folder, "other sizes", table(which=which, size_class="many programs", wanted=candidates[-1]))
    default, unknown = grids(SCAN, LONG, which), grids(SCAN, replace(LONG, card="unknown"), which)
    fast, other = (grids(SCAN, replace(LONG, card=card), which) for card in ("fast", "other sizes"))
    assert unknown == other == default
    assert fast != default


def test_a_tile_of_a_table_reaches_the_kernel(folder):
    write(folder, "fast", table(ahead=16))
    tiles = [
        {launch.constants["TILE"] for launch in SCAN.forward_plan(replace(LONG, card=card), False).launches if "TILE" in launch.constants}
        for card in ("", "fast")
    ]
    assert tiles == [{16}, {8}]


def test_warps_of_a_table_have_matrices_of_their_own(folder):
    write(folder, "fast", {"sinkhorn": {"forward": {"4 x 4": {"warps": 4}, "16 x 16": {"warps": 4}}}})
    for side, expected in ((4, [(1, 32), (4, 128)]), (16, [(1, 8), (1, 8)])):
        call = full_call(Job(ops["sinkhorn"], next(c for c in ops["sinkhorn"].models if c.sizes["n"] == side), "float32"))
        launches = [ops["sinkhorn"].forward_plan(replace(call, card=card), False).launches[0] for card in ("", "fast")]
        assert [(launch.num_warps, launch.constants["S"]) for launch in launches] == expected


WRONG = {
    "nothing to tune in 'sideways'": table(which="sideways", wanted=2048),
    "no sizes 'all programs'": table(size_class="all programs", wanted=2048),
    "nothing named 'tile'": table(tile=8),
    "ahead must be one of": table(ahead=12),
    "full must be one of": table(full=True),
    "must be JSON with 'ops'": {"selective_scan": {"forward": {"few programs": {"ahead": "8"}}}},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_table_is_refused(folder, message):
    write(folder, "wrong", WRONG[message])
    with pytest.raises(ValueError, match=message) as raised:
        SCAN.forward_plan(replace(LONG, card="wrong"), False)
    assert str(folder / "wrong.json") in str(raised.value)


def test_a_file_that_is_no_table_is_refused(folder):
    (folder / "wrong.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        SCAN.forward_plan(replace(LONG, card="wrong"), False)


def test_a_default_is_a_candidate():
    with pytest.raises(ValueError, match="must be one of the candidates"):
        Tunable(3, (1, 2))


@pytest.mark.parametrize("op", [op for op in OPS if op.tunables], ids=by_name)
def test_what_is_saved_depends_on_no_table(op):
    """The passes can have different values, and fake tensors know no card."""
    for case in (*op.cases, *op.models):
        call = full_call(Job(op, case, "bfloat16"))
        assert op.size_class(call) in op.size_classes
        results = op.results(call, True)
        for which in op.tunables:
            for values in search.candidates(op, which):
                with tuning.trial(table(op, which, op.size_class(call), **values)):
                    there = replace(call, card=tuning.kind(""))
                    assert op.results(there, True) == results
                    plan = op.forward_plan(there, True)
                    assert {name: plan.arrays[name] for name in plan.outputs} == results


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
def test_a_frontend_asks_for_its_card(frontend, monkeypatch):
    """Both passes of a call are planned for one and the same kind of GPU, whichever frontend makes it."""
    op, asked, values = ops["sinkhorn"], [], tuning.values
    monkeypatch.setattr(tuning, "values", lambda op, kind, *rest: (asked.append(kind), values(op, kind, *rest))[1])
    inputs = {"logits": frontend.array(np.random.default_rng(0).standard_normal((37, 4, 4)), "float32")}
    backend = parity.backends(frontend.gpu)[0]
    with tuning.trial(table(op, size_class="4 x 4", warps=4)):
        kind = tuning.kind("any")
        case = Case("", {"...": (37,), "n": 4}, op.cases[0].sample)
        frontend.run(op, inputs, {"iters": 3}, parity.draw_cotangents(op, case, inputs, frontend, 0), backend)
    assert set(asked) == {kind}
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("op", "which", "size_class", "values"),
    [(ops["sinkhorn"], "forward", "4 x 4", {"warps": 4}), (SCAN, "forward", "few programs", {"ahead": 16})],
    ids=["warps", "ahead"],
)
def test_results_do_not_depend_on_a_table(op, which, size_class, values):
    """One of the frontends is enough: they run the same plans."""
    frontend, case = FRONTENDS[0], op.cases[0]
    inputs = parity.given(frontend, case.inputs(), "float32")
    function = frontend.function(op)
    with_default = function(**inputs, **case.options, backend=parity.backends(frontend.gpu)[0])
    with tuning.trial(table(op, which, size_class, **values)):
        with_values = function(**inputs, **case.options, backend=parity.backends(frontend.gpu)[0])
    np.testing.assert_allclose(frontend.numpy(with_values), frontend.numpy(with_default), rtol=1e-5, atol=1e-6)


def test_plans_are_kept_by_card():
    call = replace(LONG, card="some card")
    assert SCAN.forward_plan(call, True) is SCAN.forward_plan(replace(LONG, card="some card"), True)
    with tuning.trial(table(wanted=2048)):
        one = SCAN.forward_plan(replace(LONG, card=tuning.kind("")), True)
    with tuning.trial(table(wanted=4096)):
        other = SCAN.forward_plan(replace(LONG, card=tuning.kind("")), True)
    assert [launch.grid for launch in one.launches] != [launch.grid for launch in other.launches]


class Stopwatch:
    """A frontend on which plans with a certain value are the fastest."""

    name, gpu = "stopwatch", True

    def __init__(self, time):
        self.seconds = time

    def card(self):
        return tuning.kind("NVIDIA Test")

    def array(self, value, dtype):
        return np.broadcast_to(np.float32(0), value.shape)

    def tile(self, array, repeats):
        return np.broadcast_to(np.float32(0), [n * k for n, k in zip(array.shape, repeats, strict=True)])

    def function(self, op):
        return lambda **_: None

    def prepare(self, function, inputs, cotangents, which):
        return which

    def time(self, which, seconds):
        from bridge.frontend import Timing

        return Timing(self.seconds(tuning.values(SCAN, self.card(), which.split()[-1], "few programs")))

    def free(self):
        pass


def test_the_search_finds_what_is_fastest_and_writes_it(folder, monkeypatch):
    write(folder, "nvidia_test", table(ops["sinkhorn"], size_class="4 x 4", warps=2))
    sizes = [c for c in SCAN.models if c.sizes["b"] == 1][:1]
    monkeypatch.setattr(search, "classes", lambda op, dtype: {"few programs": sizes})
    told = []
    watch = Stopwatch(lambda values: 1.0 + (values["wanted"] != 4096) + (values.get("ahead", 16) != 16))
    search.tune(watch, [SCAN], "bfloat16", lambda what, total: told.append((what, total)), "NVIDIA Test", {"triton": "3"})
    tuning.read.cache_clear()
    found = tuning.read("nvidia_test")
    assert found["selective_scan"]["forward"]["few programs"]["wanted"] == 4096
    assert found["selective_scan"]["forward"]["few programs"]["ahead"] == 16
    assert found["selective_scan"]["backward"]["few programs"]["wanted"] == 4096
    assert found["sinkhorn"]["forward"]["4 x 4"] == {"warps": 2}
    assert [total for _, total in told] == [2, 2]
    for op in OPS:
        tuning.check(op, found, "what was written")


def test_the_search_keeps_defaults_that_are_as_good(folder):
    sizes = [c for c in SCAN.models if c.sizes["b"] == 1][:1]
    default = next(search.candidates(SCAN, "forward"))
    watch = Stopwatch(lambda values: 1.0 if values == default else 0.99)
    assert search.search(SCAN, "forward", sizes, "bfloat16", watch) == default


def test_every_model_has_its_class():
    found = search.classes(SCAN, "bfloat16")
    assert set(found) == set(SCAN.size_classes)


def test_tuning_needs_no_framework():
    done = python("-c", "import sys, bridge.tuning.search; print([n for n in ('torch', 'jax') if n in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr
