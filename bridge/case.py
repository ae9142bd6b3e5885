"""Cases: named sizes and options, used alike by tests, parity, bench and tuning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Sample = Callable[[np.random.Generator, "Case"], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """One way to call an op. `sample` draws its inputs, in float64; those named in `without` are left out.

    `sizes` gives the dimensions of the op's signature by name, the leading ones as a tuple under "...".
    """

    name: str
    sizes: Mapping[str, Any]
    sample: Sample
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Fresh inputs. The same seed gives the same values."""
        drawn = self.sample(np.random.default_rng(seed), self)
        return {name: value for name, value in drawn.items() if name not in self.without}
