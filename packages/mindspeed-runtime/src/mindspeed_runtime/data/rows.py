"""Rows: what one line of a batch is made of.   Letters: S tokens a row.

A row is a list of stretches of the store, to be laid one after the other. Three ways to make them: windows of a
running text, one document a row, several whole documents a row. Within each, every epoch has every row once.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .order import Order
from .store import Store


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """``length`` tokens of the store from ``start``, which the model sees as one text."""

    start: int
    length: int  # may be one more than there is room for: the last token is then only a target


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
    def samples(self, epoch: int, position: int) -> tuple[int, ...]:
        """What the row at a position of an epoch is made of: numbers of documents, or of its window of the text."""

    @abstractmethod
    def stretches(self, samples: Sequence[int]) -> list[Stretch]:
        """The stretches of a row that is made of ``samples``."""

    def row(self, epoch: int, position: int) -> list[Stretch]:
        """The row at a position of an epoch."""
        return self.stretches(self.samples(epoch, position))

    def locate(self, n: int) -> tuple[int, int]:
        """Epoch and position of the n-th row of the run."""
        return divmod(n, self.per_epoch(0))

    def _order(self, num_rows: int) -> Order:
        return Order(num_rows=num_rows, seed=self.seed, shuffle=self.shuffle)


class Windows(Rows):
    """Text that flows on: windows of S + 1 tokens over all documents, one token shared between neighbours.

    So each token but the first is predicted once an epoch; the last window may be shorter. ``apart``: a window is
    one stretch a document, and nothing is predicted across a boundary.
    """

    def __init__(self, store: Store, sequence: int, seed: int, shuffle: bool, *, apart: bool) -> None:
        super().__init__(store, sequence, seed, shuffle)
        self.apart = apart
        self._num = -(-max(0, store.num_tokens - 1) // sequence)

    def per_epoch(self, epoch: int) -> int:
        return self._num

    def samples(self, epoch: int, position: int) -> tuple[int, ...]:
        return (self._order(self._num).at(epoch, position),)

    def stretches(self, samples: Sequence[int]) -> list[Stretch]:
        start = samples[0] * self.sequence
        stop = min(start + self.sequence + 1, self.store.num_tokens)
        if not self.apart:
            return [Stretch(start=start, length=stop - start)]
        # Boundaries of documents inside the window, and its own two ends.
        first, last = np.searchsorted(self.store.starts, (start + 1, stop))
        ends = [start, *np.unique(self.store.starts[first:last]).tolist(), stop]
        return [Stretch(start=a, length=b - a) for a, b in pairwise(ends)]


class Single(Rows):
    """One document a row, cut to S + 1 tokens."""

    def per_epoch(self, epoch: int) -> int:
        return len(self.store)

    def samples(self, epoch: int, position: int) -> tuple[int, ...]:
        return (self._order(len(self.store)).at(epoch, position),)

    def stretches(self, samples: Sequence[int]) -> list[Stretch]:
        return [_whole(self.store, number, self.sequence) for number in samples]


class Packed(Rows):
    """Whole documents, several a row, in the order of the epoch's permutation. A document is never split.

    A row takes the next documents as long as they fit, so how many rows an epoch has depends on its permutation; the
    run is the epochs one after the other. A document longer than a row has a row of its own and is cut to S + 1.
    """

    def __init__(self, store: Store, sequence: int, seed: int, shuffle: bool) -> None:
        super().__init__(store, sequence, seed, shuffle)
        self._room = np.minimum(store.lengths.astype(np.int64), sequence)
        self._packs = lru_cache(maxsize=2)(self._pack)
        self._firsts = [0]  # number in the run of the first row of each epoch

    def per_epoch(self, epoch: int) -> int:
        while len(self._firsts) < epoch + 2:
            rows = len(self._packs(len(self._firsts) - 1)[1]) - 1
            self._firsts.append(self._firsts[-1] + rows)
        return self._firsts[epoch + 1] - self._firsts[epoch]

    def samples(self, epoch: int, position: int) -> tuple[int, ...]:
        order, bounds = self._packs(epoch)
        return tuple(order[bounds[position] : bounds[position + 1]].tolist())

    def stretches(self, samples: Sequence[int]) -> list[Stretch]:
        return [_whole(self.store, number, self.sequence) for number in samples]

    def locate(self, n: int) -> tuple[int, int]:
        while self._firsts[-1] <= n:
            self.per_epoch(len(self._firsts) - 1)
        epoch = bisect_right(self._firsts, n) - 1
        return epoch, n - self._firsts[epoch]

    def _pack(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's order of documents, and where in it each row begins; the end comes last."""
        order = self._order(len(self.store)).epoch(epoch)
        filled = np.concatenate(([0], np.cumsum(self._room[order])))
        bounds = [0]
        while bounds[-1] < len(order):
            limit = filled[bounds[-1]] + self.sequence
            bounds.append(int(np.searchsorted(filled, limit, side="right")) - 1)
        return order, np.asarray(bounds, np.int64)


def _whole(store: Store, number: int, sequence: int) -> Stretch:
    return Stretch(start=int(store.starts[number]), length=min(int(store.lengths[number]), sequence + 1))
