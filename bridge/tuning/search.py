"""Measures the candidates of what can be tuned on the GPU of this machine, and writes its table."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bridge import tuning
from bridge.bench import Job, draw, full_call
from bridge.case import Case
from bridge.frontend import Frontend
from bridge.op import Op

GAIN = 1.02  # below it a difference is noise, and the default stays
SECONDS = 0.1  # that a candidate is measured for

Values = dict[str, int]


def classes(op: Op, dtype: str) -> dict[str, list[Case]]:
    """The sizes that users run, by class."""
    found: dict[str, list[Case]] = {}
    for case in op.models:
        found.setdefault(op.size_class(full_call(Job(op, case, dtype))), []).append(case)
    return found


def candidates(op: Op, which: str) -> Iterator[Values]:
    """Every combination, the defaults first."""
    names = op.tunables[which]
    default = {name: t.default for name, t in names.items()}
    yield default
    for values in itertools.product(*(t.candidates for t in names.values())):
        chosen = dict(zip(names, values, strict=True))
        if chosen != default:
            yield chosen


def search(op: Op, which: str, cases: list[Case], dtype: str, frontend: Frontend) -> Values:
    """What is fastest over the cases together (of the ratio to the default, the mean of logarithms), all of one class."""
    size_class = op.size_class(full_call(Job(op, cases[0], dtype)))
    totals = [0.0 for _ in candidates(op, which)]
    for case in cases:
        call, inputs, cotangents = draw(Job(op, case, dtype), frontend)
        function = partial(frontend.function(op), **case.options)
        timed: dict[str, float] = {}  # candidates that make the same plan take the same time
        for i, values in enumerate(candidates(op, which)):
            with tuning.trial({op.name: {which: {size_class: values}}}):
                plan = plan_of(op, replace(call, card=frontend.card()), which)
                if plan not in timed:
                    prepared = frontend.prepare(function, inputs, cotangents, "backward" if which == "backward" else "training forward")
                    timed[plan] = frontend.time(prepared, SECONDS).seconds
                totals[i] += math.log(timed[plan])
        frontend.free()
    best = min(range(len(totals)), key=totals.__getitem__)
    if (totals[0] - totals[best]) / len(cases) < math.log(GAIN):
        best = 0
    return list(candidates(op, which))[best]


def plan_of(op: Op, call: Any, which: str) -> str:
    """What a plan launches, in words that are equal for equal plans."""
    plan = op.backward_plan(call, call.floating) if which == "backward" else op.forward_plan(call, True)
    return repr(
        [
            (id(launch.kernel), *(getattr(launch, name) for name in ("grid", "scalars", "constants", "num_warps", "num_stages")))
            for launch in plan.launches
        ]
    )


def tune(
    frontend: Frontend, chosen: list[Op], dtype: str, advance: Callable[[str, int], None], device: str, measured: Mapping[str, str]
) -> str:
    """Measure everything that the ops can be tuned in, and write the table of this card: what it says of other ops stays. Gives
    the file's name. `advance` is told what is being measured, and of how many."""
    kind = tuning.kind(device)
    jobs = [(op, which, size_class, cases) for op in chosen for size_class, cases in classes(op, dtype).items() for which in op.tunables]
    found: dict[str, Any] = {}
    for op, which, size_class, cases in jobs:
        advance(f"{op.name}, {which}, {size_class}", len(jobs))
        found.setdefault(op.name, {}).setdefault(which, {})[size_class] = search(op, which, cases, dtype, frontend)
    file = tuning.path(kind)
    before = json.loads(file.read_text()).get("measured", {}) if file.is_file() else {}
    told = {**before, **{op.name: dict(measured) for op in chosen}}
    table = {"card": device, "measured": told, "ops": {**tuning.read(kind), **found}}
    file.write_text(json.dumps(table, indent=1) + "\n")
    return str(file)
