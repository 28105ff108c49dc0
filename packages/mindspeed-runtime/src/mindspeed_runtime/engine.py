"""What a training loop asks of a backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, the same on every rank."""

    loss: float  # mean over the trained tokens of the global batch
    grad_norm: float
    tokens: int  # all tokens of the global batch
    trained: int  # those that carry loss
    skipped: bool  # the gradients were not finite: nothing was changed


class Engine(Protocol):
    """A model that trains. Every rank calls every method."""

    @property
    def is_main(self) -> bool:
        """This rank reports and writes what is written once."""
        ...

    def train_step(self, step: int, batches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over this data rank's micro-batches. Dropout depends on (seed, step, rank) alone."""
        ...

    def evaluate(self, batches: Sequence[list[Batch]]) -> float:
        """Mean loss over the trained tokens of all ranks' batches."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer below ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote, also in another layout."""
        ...

    def is_finite(self) -> bool:
        """Whether every weight of every rank is a finite number."""
        ...

    def share(self, value: Any) -> Any:
        """The main rank's ``value``, on every rank."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        ...
