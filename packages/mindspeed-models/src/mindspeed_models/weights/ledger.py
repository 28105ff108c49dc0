"""An account of a conversion: every element of every source used once, every element of every target written once.

Rules and planners are built so that this holds. The ledger does not trust them: it is told what was really read and
what was really written, and the manifest of a conversion carries its totals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import WeightError
from .rule import Reader

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a conversion moved."""

    sources: int  # tensors read
    targets: int  # tensors written
    elements: int


class Ledger:
    """The account of one conversion between tensors of the given shapes."""

    def __init__(self, sources: Shapes, targets: Shapes) -> None:
        self._sources = _Account(sources, "was used")
        self._targets = _Account(targets, "was written")

    def reading(self, read: Reader) -> Reader:
        """``read``, with every part that it hands out put down as used."""

        def watched(name: str, part: tuple[slice, ...] = ()) -> Tensor:
            tensor = read(name, part)
            self.used(name, part[0].start if part else 0, tuple(tensor.shape))
            return tensor

        return watched

    def used(self, name: str, row: int, shape: Sequence[int]) -> None:
        """Rows of a source from ``row`` on were read, in full width."""
        self._sources.add(name, row, shape)

    def written(self, name: str, row: int, shape: Sequence[int]) -> None:
        """Rows of a target from ``row`` on were written, in full width."""
        self._targets.add(name, row, shape)

    def close(self) -> Totals:
        """The totals. WeightError for the first tensor that is not accounted for exactly once."""
        elements = self._sources.close()
        if (written := self._targets.close()) != elements:
            raise WeightError(f"conversion: {elements:,} elements were used and {written:,} written")
        return Totals(sources=self._sources.count, targets=self._targets.count, elements=elements)


class _Account:
    def __init__(self, shapes: Shapes, verb: str) -> None:
        self._shapes = shapes
        self._verb = verb
        self._rows: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
        self.count = len(shapes)

    def add(self, name: str, row: int, shape: Sequence[int]) -> None:
        if name not in self._rows:
            raise WeightError(f"{name}: {self._verb}, and is no part of this conversion")
        if tuple(shape[1:]) != tuple(self._shapes[name][1:]):
            raise WeightError(f"{name}: a part of shape {tuple(shape)} {self._verb} of {tuple(self._shapes[name])}")
        self._rows[name].append((row, row + shape[0]))

    def close(self) -> int:
        elements = 0
        for name, spans in self._rows.items():
            whole = self._shapes[name]
            at = 0
            for start, stop in sorted(spans):
                if start != at:
                    how = "twice" if start < at else "never"
                    low, high = sorted((start, at))
                    raise WeightError(f"{name}: rows {low} to {high} {self._verb.replace('was', f'were {how}', 1)}")
                at = stop
            if at != whole[0]:
                raise WeightError(f"{name}: rows {at} to {whole[0]} {self._verb.replace('was', 'were never', 1)}")
            elements += math.prod(whole)
        return elements
