"""Rows: what one line of a batch is made of.   Letters: S tokens a row.

A row is a list of stretches of documents, to be laid one after the other. Three ways to make them: windows of a
running text, one document a row, several whole documents a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .order import Order
from .store import Store


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """``length`` tokens of the store from ``start``, of one document. ``fresh``: a document starts here, or is taken to."""

    start: int
    length: int
    position: int  # of its first token in what the model sees as one text


class Rows(ABC):
    """All rows of a data set, in the order of a run."""

    def __init__(self, store: Store, sequence: int, seed: int, shuffle: bool) -> None:
        self.store = store
        self.sequence = sequence
        self.seed = seed
        self.shuffle = shuffle

    @abstractmethod
    def per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""

    @abstractmethod
    def row(self, epoch: int, position: int) -> list[Stretch]:
        """The row at a position of an epoch. Its stretches have at most S + 1 tokens together, or S with one document each."""

    def locate(self, n: int) -> tuple[int, int]:
        """Epoch and position of the n-th row of the run."""
        return divmod(n, self.per_epoch(0))


class Windows(Rows):
    """Text that flows on: windows of S + 1 tokens over all documents, one token shared between neighbours."""

    def __init__(self, store: Store, sequence: int, seed: int, shuffle: bool, *, apart: bool) -> None:
        super().__init__(store, sequence, seed, shuffle)
        self.apart = apart
        self._num = max(0, (store.num_tokens - 1) // sequence)

    def per_epoch(self, epoch: int) -> int:
        return self._num

    def row(self, epoch: int, position: int) -> list[Stretch]:
        order = Order(num_rows=self._num, seed=self.seed, shuffle=self.shuffle)
        start = order[epoch * self._num + position] * self.sequence
        if not self.apart:
            return [Stretch(start=start, length=self.sequence + 1, position=0)]
        return self._documents(start, self.sequence + 1)

    def _documents(self, start: int, length: int) -> list[Stretch]:
        found = []
        number = int(np.searchsorted(self.store.starts, start, side="right")) - 1
        while length > 0:
            begin, size = int(self.store.starts[number]), int(self.store.lengths[number])
            take = min(begin + size - start, length)
            if take > 0:
                found.append(Stretch(start=start, length=take, position=0))
            start, length, number = start + take, length - take, number + 1
        return found


class Single(Rows):
    """One document a row, cut to the row's length."""

    def per_epoch(self, epoch: int) -> int:
        return len(self.store)

    def row(self, epoch: int, position: int) -> list[Stretch]:
        order = Order(num_rows=len(self.store), seed=self.seed, shuffle=self.shuffle)
        return [_whole(self.store, order[epoch * len(self.store) + position], self.sequence)]


class Packed(Rows):
    """Whole documents, several a row, in the order of the epoch's permutation. A document is never split.

    How many rows an epoch has depends on its permutation; the run is the epochs one after the other.
    """

    def per_epoch(self, epoch: int) -> int:
        return len(self._packs(epoch))

    def row(self, epoch: int, position: int) -> list[Stretch]:
        return [_whole(self.store, number, self.sequence) for number in self._packs(epoch)[position]]

    def locate(self, n: int) -> tuple[int, int]:
        epoch = 0
        while n >= (size := self.per_epoch(epoch)):
            n, epoch = n - size, epoch + 1
        return epoch, n

    def _packs(self, epoch: int) -> Sequence[Sequence[int]]:
        return _packed(self, epoch)


@lru_cache(maxsize=4)
def _packed(rows: Packed, epoch: int) -> list[list[int]]:
    """Documents of each row: next-fit along the permutation, so that order is kept and nothing is left out."""
    order = Order(num_rows=len(rows.store), seed=rows.seed, shuffle=rows.shuffle)
    packs: list[list[int]] = [[]]
    filled = 0
    for position in range(len(rows.store)):
        number = order[epoch * len(rows.store) + position]
        length = min(int(rows.store.lengths[number]), rows.sequence)
        if packs[-1] and filled + length > rows.sequence:
            packs.append([])
            filled = 0
        packs[-1].append(number)
        filled += length
    return packs


def _whole(store: Store, number: int, limit: int) -> Stretch:
    return Stretch(start=int(store.starts[number]), length=min(int(store.lengths[number]), limit), position=0)
