"""Batches of optimizer step n, for one data rank: a pure function of n.

The global batch of step n is rows n G to (n + 1) G of the run. Micro-batch j of data rank r of R holds M of them from
j R M + r M. Which rank computes a row changes with the layout; which rows a step has does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch

from .batch import IGNORE, Batch
from .rows import Rows, Stretch


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a global batch is cut."""

    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int

    def __post_init__(self) -> None:
        if self.global_batch % (self.micro_batch * self.data_size):
            raise ValueError(f"{self}: the global batch is not a multiple of micro-batch x data ranks")

    @property
    def num_microbatches(self) -> int:
        """Of one data rank."""
        return self.global_batch // (self.micro_batch * self.data_size)


class Loader:
    """Batches of a run. ``apart``: rows hold several documents between which nothing may pass.

    ``padding``: rows as long as the data set's, or as the longest of the global batch, rounded up to ``multiple``.
    """

    def __init__(
        self,
        rows: Rows,
        cut: Cut,
        *,
        padding: Literal["full", "longest"] = "full",
        multiple: int = 1,
        apart: bool = False,
    ) -> None:
        if rows.sequence % multiple:
            raise ValueError(f"rows of {rows.sequence} tokens are not a multiple of {multiple}")
        self.rows = rows
        self.cut = cut
        self.padding = padding
        self.multiple = multiple
        self.apart = apart

    @property
    def num_rows(self) -> int:
        """Rows of the first epoch; with packing others may have a few more or less."""
        return self.rows.per_epoch(0)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps that take every row once."""
        return self.num_rows / self.cut.global_batch

    @property
    def num_trained(self) -> int:
        """Tokens of the data set that carry loss, were its rows long enough for all of them."""
        return self.rows.store.num_trained

    def step(self, n: int) -> list[Batch]:
        """Micro-batches of this data rank for optimizer step ``n``."""
        return self._batches([self.rows.stretches(samples) for samples in self.samples(n)])

    def samples(self, n: int) -> list[tuple[int, ...]]:
        """What each row of the global batch of step ``n`` is made of (``Rows.samples``): the same on every rank."""
        first = n * self.cut.global_batch
        return [self.rows.samples(*self.rows.locate(first + i)) for i in range(self.cut.global_batch)]

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that take every row ``epochs`` times; the last may reach into the next epoch."""
        whole = int(epochs)
        rows = sum(self.rows.per_epoch(epoch) for epoch in range(whole))
        rows += round((epochs - whole) * self.rows.per_epoch(whole)) if epochs > whole else 0
        return max(1, -(-rows // self.cut.global_batch))

    def once(self, limit: int | None = None) -> Sequence[list[Batch]]:
        """Every row of epoch 0 once, for validation: at most ``limit`` global batches, each made when it is asked for.

        Rows without a label fill up the last.
        """
        return _Once(self, limit)

    def batches_of(self, rows: Sequence[list[Stretch]]) -> list[Batch]:
        """Micro-batches of this data rank for a global batch of ``rows``; empty rows fill up what is missing."""
        return self._batches([*rows, *([[]] * (self.cut.global_batch - len(rows)))])

    def _batches(self, rows: Sequence[list[Stretch]]) -> list[Batch]:
        cut, length = self.cut, self._length(rows)
        stride = cut.data_size * cut.micro_batch
        starts = [j * stride + cut.data_rank * cut.micro_batch for j in range(cut.num_microbatches)]
        return [self._batch(rows[start : start + cut.micro_batch], length) for start in starts]

    def _length(self, rows: Sequence[list[Stretch]]) -> int:
        if self.padding == "full":
            return self.rows.sequence
        longest = max(2, *(sum(stretch.length for stretch in row) for row in rows))
        return min(-(-longest // self.multiple) * self.multiple, self.rows.sequence)

    def _batch(self, rows: Sequence[list[Stretch]], length: int) -> Batch:
        shape = (len(rows), length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        documents = np.zeros(shape, np.int32)  # of padding: 0
        for row, stretches in enumerate(rows):
            at = 0
            for number, stretch in enumerate(stretches, 1):
                ids, trained = self.rows.store.span(stretch.start, stretch.length)
                size = min(stretch.length, length - at)
                here = slice(at, at + size)
                tokens[row, here] = ids[:size]
                positions[row, here] = np.arange(size)
                documents[row, here] = number
                # The token at i predicts the one at i + 1 of its own stretch.
                targets = np.where(trained[1:], ids[1:], IGNORE)[:size]
                labels[row, at : at + len(targets)] = targets
                at += size
            positions[row, at:] = np.arange(length - at)
        as_tensor = torch.from_numpy
        return Batch(
            tokens=as_tensor(tokens),
            labels=as_tensor(labels),
            positions=as_tensor(positions),
            documents=as_tensor(documents) if self.apart else None,
        )


class _Once(Sequence[list[Batch]]):
    def __init__(self, loader: Loader, limit: int | None) -> None:
        self._loader = loader
        num = -(-loader.num_rows // loader.cut.global_batch)
        self._num = num if limit is None else min(num, limit)

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> list[Batch]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[list[Batch]]: ...
    def __getitem__(self, index: int | slice) -> list[Batch] | Sequence[list[Batch]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._num))]
        if not -self._num <= index < self._num:
            raise IndexError(index)
        rows, size = self._loader.rows, self._loader.cut.global_batch
        first = index % self._num * size
        positions = range(first, min(first + size, self._loader.num_rows))
        return self._loader.batches_of([rows.row(0, position) for position in positions])
