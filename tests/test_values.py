"""Forward and every gradient against float64 autodiff of the loop, in each frontend; and the frontends against each other."""

import pytest
from common import FRONTENDS, by_name

from bridge import parity

# On a CPU `make parity` runs other dtypes, through the same kernels in the same interpreter.
JOBS = [job for dtype in parity.BOUNDS if FRONTENDS[0].gpu or dtype == "float32" for job in parity.jobs(dtype)]


@pytest.mark.parametrize(("op", "case", "dtype"), JOBS, ids=by_name)
def test_parity(op, case, dtype):
    findings = list(parity.check(op, case, dtype, FRONTENDS, seed=1))
    assert findings
    assert not [f for f in findings if not f.passed]
    kernels = {f.backend for f in findings} - {"reference"}
    bits = [f for f in findings if isinstance(f, parity.Agreement)]
    assert len(bits) == (len(kernels) if len(FRONTENDS) > 1 else 0)
