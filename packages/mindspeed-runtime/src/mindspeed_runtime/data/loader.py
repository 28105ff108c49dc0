"""Batches of optimizer step n, for one data rank: a pure function of n.

The global batch of step n is rows n G to (n + 1) G of the run. Micro-batch j of data rank r of R holds M of them from
j R M + r M. Which rank computes a row changes with the layout; which rows a step has does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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

    @property
    def num_microbatches(self) -> int:
        """Of one data rank."""
        return self.global_batch // (self.micro_batch * self.data_size)


class Loader:
    """Batches of a run. ``apart``: rows hold several documents between which nothing may pass."""

    def __init__(
        self,
        rows: Rows,
        cut: Cut,
        *,
        padding: Literal["full", "longest"] = "full",
        multiple: int = 1,
        apart: bool = False,
    ) -> None:
        self.rows = rows
        self.cut = cut
        self.padding = padding
        self.multiple = multiple
        self.apart = apart

    def step(self, n: int) -> list[Batch]:
        """Micro-batches of this data rank for optimizer step ``n``."""
        cut = self.cut
        first = n * cut.global_batch
        return self._batches([self._row(first + i) for i in range(cut.global_batch)])

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that take every row ``epochs`` times; the last may reach into the next epoch."""
        whole = int(epochs)
        rows = sum(self.rows.per_epoch(epoch) for epoch in range(whole))
        rows += round((epochs - whole) * self.rows.per_epoch(whole)) if epochs > whole else 0
        return max(1, -(-rows // self.cut.global_batch))

    def once(self, limit: int | None = None) -> list[list[Batch]]:
        """Every row of epoch 0 once, in global batches, for validation; empty rows fill up the last."""
        size = self.cut.global_batch
        rows = [self.rows.row(0, position) for position in range(self.rows.per_epoch(0))]
        parts = [rows[start : start + size] for start in range(0, len(rows), size)][:limit]
        return [self._batches([*part, *([[]] * (size - len(part)))]) for part in parts]

    def _row(self, n: int) -> list[Stretch]:
        return self.rows.row(*self.rows.locate(n))

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
        documents = np.zeros(shape, np.int32)
        for row, stretches in enumerate(rows):
            at = 0
            for number, stretch in enumerate(stretches, 1):
                ids, trained = self.rows.store.span(stretch.start, stretch.length)
                size = min(stretch.length, length - at)
                here = slice(at, at + size)
                tokens[row, here] = ids[:size]
                positions[row, here] = stretch.position + np.arange(size)
                documents[row, here] = number
                # The token at i predicts the one at i + 1 of its own document.
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
