"""The same bits from run to run, and for a part of a batch alone."""

import pytest
from common import FRONTENDS, KERNELS, OPS, arrays, by_name, resized, same_bits

from bridge.parity import draw_cotangents, named

JOBS = [(op, case) for op in OPS for case in (op.cases[0], op.cases[-1])]


def run(frontend, op, case, inputs):
    cotangents = draw_cotangents(op, case, inputs, frontend, 0)
    return named(op, *frontend.run(op, inputs, case.options, cotangents, KERNELS))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize(("op", "case"), JOBS, ids=by_name)
def test_same_bits_twice(op, case, frontend):
    inputs = arrays(frontend, case, "float32")
    assert same_bits(frontend, run(frontend, op, case, inputs), run(frontend, op, case, inputs))


@pytest.mark.parametrize("frontend", FRONTENDS, ids=by_name)
@pytest.mark.parametrize("op", [op for op in OPS if op.batch == "..."], ids=by_name)
def test_a_matrix_alone(op, frontend):
    """A matrix gives the same bits alone as among others."""
    case = resized(op.cases[0], **{"...": (37,), "n": 4})
    inputs = case.inputs()
    many = frontend.function(op)(**{k: frontend.array(x, "float32") for k, x in inputs.items()}, **case.options, backend=KERNELS)
    for i in (0, 17, 36):
        one = frontend.function(op)(**{k: frontend.array(x[i], "float32") for k, x in inputs.items()}, **case.options, backend=KERNELS)
        assert (frontend.bits(one) == frontend.bits(many)[i]).all()
