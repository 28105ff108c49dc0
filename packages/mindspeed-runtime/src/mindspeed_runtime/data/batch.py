"""What a model is fed.   Letters: B rows, S tokens a row."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # a label that is not trained


@dataclass(frozen=True)
class Batch:
    """One micro-batch, already shifted: ``labels[b, s]`` is the token after ``tokens[b, s]``, or IGNORE."""

    tokens: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64
    positions: Tensor  # (B, S) int64, restarting at every document
    documents: Tensor | None  # (B, S) int32: attention stays inside equal numbers; padding is a document of its own.
    #                           None: each row is one document, causal attention is enough

    @property
    def num_trained(self) -> int:
        """How many tokens carry loss."""
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device), documents)
