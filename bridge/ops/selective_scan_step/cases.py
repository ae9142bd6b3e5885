"""Named sizes of selective_scan_step, and inputs for them: those of one step of a scan."""

from dataclasses import replace
from functools import partial

import numpy as np

from bridge.case import Case
from bridge.ops.selective_scan.cases import case as scan_case
from bridge.ops.selective_scan.text import text_inputs


def one_step(rng: np.random.Generator, case: Case, scan: Case) -> dict[str, np.ndarray]:
    """The last step of a scan's inputs, with its initial state as the state."""
    drawn = scan.sample(rng, replace(scan, sizes={**scan.sizes, **case.sizes}))
    state = drawn.pop("initial_state")
    return {"state": state} | {name: value[:, -1] if value.ndim > 2 else value for name, value in drawn.items()}


def case(scan: Case) -> Case:
    sizes = {dim: size for dim, size in scan.sizes.items() if dim != "t"}
    return Case(scan.name, sizes, partial(one_step, scan=scan), scan.options, scan.without)


CASES = (
    case(scan_case("base", 3, 1, 20, 16, ("D", "z", "delta_bias"))),
    case(scan_case("groups", 2, 1, 18, 5, B="b t g n", C="b t n", g=3, delta_softplus=True)),
    case(scan_case("constant", 2, 1, 7, 3, ("z",), B="d n", C="d n")),
    case(Case("text", dict(b=2, t=24, d=16, n=8), text_inputs, {"delta_softplus": True})),
)
