"""The options of an op: keyword arguments that are plain values, fixed when a call is compiled."""

import numbers
import operator
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    default: bool = False

    @property
    def allowed(self) -> str:
        """What it can be, in words, behind its default."""
        return ", or True" if not self.default else ", or False"

    def check(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{where} must be True or False, got {value!r}")
        return value


@dataclass(frozen=True)
class Integer:
    default: int | None
    minimum: int = 0

    @property
    def allowed(self) -> str:
        return f", an integer from {self.minimum} on"

    def check(self, where: str, value: Any) -> int | None:
        if value is None and self.default is None:
            return None
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{where} must be an integer, got {value!r}") from None
        if number < self.minimum:
            raise ValueError(f"{where} must be at least {self.minimum}, got {number}")
        return number


@dataclass(frozen=True)
class Real:
    default: float
    minimum: float = 0.0
    maximum: float = sys.float_info.max

    @property
    def allowed(self) -> str:
        return f", a number from {self.minimum} " + ("on" if self.maximum == sys.float_info.max else f"to {self.maximum}")

    def check(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{where} must be a real number, got {value!r}")
        number = float(value)
        if not self.minimum <= number <= self.maximum:  # nor for NaN
            raise ValueError(f"{where} must be{self.allowed.removeprefix(',')}, got {value!r}")
        return number


@dataclass(frozen=True)
class Choice:
    default: str
    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f", one of {', '.join(map(repr, self.choices))}"

    def check(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{where} must be one of {', '.join(map(repr, self.choices))}, got {value!r}")
        if value not in self.choices:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, self.choices))}, got {value!r}")
        return value


Option = Flag | Integer | Real | Choice
