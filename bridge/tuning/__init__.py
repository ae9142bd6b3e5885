"""What shapes programs and depends on the card: values by op, pass, class of sizes and kind of GPU, for both frontends.

An op declares what can be tuned, with candidates and a default (Op.tunables). Beside this file lies one of JSON for each kind
of GPU that was measured, named after it; `python -m bridge bench --tune` writes them. What a file doesn't say, and every
card without a file, has the defaults.

A plan stays a pure function of its call: the kind of GPU is a part of the call, as a string. Frontends put it there.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.op import Op

FOLDER = Path(__file__).parent

Table = Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]  # op -> pass -> class of sizes -> name -> value


@dataclass(frozen=True)
class Tunable:
    """A number that an op's plans can be made with. The default is one of the candidates."""

    default: int
    candidates: tuple[int, ...]

    def __post_init__(self):
        if self.default not in self.candidates:
            raise ValueError(f"the default, {self.default}, must be one of the candidates {self.candidates}")


def kind(device: str) -> str:
    """The kind of GPU from the name that its driver gives it, which both frameworks hand on: "NVIDIA H200" -> "nvidia_h200".

    It names a card's file. Within `trial`, the kind is that trial, whatever the card.
    """
    return _trial or _normal(device)


@cache  # every call of an op comes by
def _normal(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def path(kind: str) -> Path:
    """Where the table of a kind of GPU lies, or would lie."""
    return FOLDER / f"{kind}.json"


@cache
def read(kind: str) -> Table:
    """The table of a kind of GPU; an empty one where there is no file. Raises ValueError for a file that holds no table."""
    file = path(kind)
    if not kind or not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text())["ops"]
        _depth(table, 4)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: must be JSON with 'ops': op -> pass -> class of sizes -> name -> number ({error!r})") from error
    return table


def check(op: "Op", table: Table, where: str) -> None:
    """Raises ValueError for what the op doesn't declare: a pass, a class of sizes, a name, or a value."""
    for which, classes in table.get(op.name, {}).items():
        known = op.tunables.get(which)
        if known is None:
            raise ValueError(f"{where}: {op.name} has nothing to tune in {which!r}, but in {', '.join(op.tunables) or 'no pass'}")
        for size_class, values in classes.items():
            if size_class not in op.size_classes:
                raise ValueError(f"{where}: {op.name} has no sizes {size_class!r}, but {', '.join(map(repr, op.size_classes))}")
            for name, value in values.items():
                if name not in known:
                    raise ValueError(f"{where}: {op.name}, {which}: nothing named {name!r}, but {', '.join(known)}")
                if isinstance(value, bool) or value not in known[name].candidates:
                    raise ValueError(
                        f"{where}: {op.name}, {which}, {size_class}: {name} must be one of {known[name].candidates}, got {value!r}"
                    )


def values(op: "Op", kind: str, which: str, size_class: str) -> dict[str, int]:
    """The values for a pass of an op: the table's, and the defaults of what it doesn't say."""
    chosen = _checked(op, kind).get(op.name, {}).get(which, {}).get(size_class, {})
    return {name: chosen.get(name, tunable.default) for name, tunable in op.tunables.get(which, {}).items()}


@cache
def _checked(op: "Op", kind: str) -> Table:
    table = _trials.get(kind) or read(kind)
    check(op, table, kind if kind in _trials else str(path(kind)))
    return table


_trials: dict[str, Table] = {}
_numbers = itertools.count(1)
_trial = ""  # no ContextVar: torch runs backward passes in other threads


@contextmanager
def trial(table: Table) -> Iterator[None]:
    """Within it, calls are planned with this table, on any card. It has a kind of its own, so that plans that were kept
    don't mix; what JAX has compiled before keeps its plan. For tests and for measuring candidates."""
    global _trial
    before, _trial = _trial, f"trial {next(_numbers)}"
    _trials[_trial] = table
    try:
        yield
    finally:
        _trial = before


def _depth(table: Any, depth: int) -> None:
    if depth:
        for inner in table.values():
            _depth(inner, depth - 1)
    elif not isinstance(table, int):
        raise TypeError(f"{table!r} is no number")
