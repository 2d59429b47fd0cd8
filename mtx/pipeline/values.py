"""Values by number: computed, given, or still to come; and barriers over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from mtx.pipeline.nodes import Part
from mtx.pipeline.slots import read


class Values:
    def __init__(self):
        self.values: list[Any] = []  # None: still to be computed; or where it lies
        self.weights: set[int] = set()

    def given(self, arrays: Sequence[Any], *, weights: bool = False) -> list[int]:
        """The numbers under which arrays are known from now on. weights: no barrier is put before
        them, so that matmuls read them where they lie."""
        first = len(self.values)
        self.values.extend(arrays)
        numbers = list(range(first, len(self.values)))
        self.weights.update(numbers if weights else ())
        return numbers

    def parts(self, arrays: Sequence[Any], *index) -> list[int]:
        """The numbers of array[index] of each, which is read where it is needed."""
        return self.given([Part(number, index) for number in self.given(arrays)])

    def value(self, number: int) -> Any:
        """Computed or given."""
        value = self.values[number]
        return read(self.values[value.array], *value.index) if isinstance(value, Part) else value

    def read(self, numbers: Sequence[int]) -> list:
        return [self.value(number) for number in numbers]

    def barrier(self, numbers: set[int]) -> None:
        """None of them is there for others before all are."""
        parts = {n: value for n in numbers if isinstance(value := self.values[n], Part)}
        held = sorted(numbers - parts.keys() | {part.array for part in parts.values()})
        self.set(held, lax.optimization_barrier(self.read(held)))

    def set(self, numbers: Sequence[int], values: Sequence) -> None:
        for number, value in zip(numbers, values, strict=True):
            self.values[number] = value
