"""Model weights to and from the ``model/`` folder of a checkpoint, in any layout."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from ..weights.shards import Box, Piece, load_pieces, save_pieces
from .geometry import VOCABULARY, local_pieces


def save_model(chunks: Sequence[torch.nn.Module], folder: Path, *, num_tokens: int, pg: ProcessGroupCollection) -> None:
    """Write the weights of all ranks into the existing ``folder``. The vocabulary is written without its padding."""
    pieces = [
        Piece(box=piece.box, dtype=piece.tensor.dtype, fill=piece.tensor)
        for held in local_pieces(chunks, num_tokens, pg).values()
        for piece in held
        if piece.is_main
    ]
    save_pieces(folder, pieces)


def load_model(chunks: Sequence[torch.nn.Module], folder: Path, *, num_tokens: int, pg: ProcessGroupCollection) -> None:
    """Fill the weights of this rank from ``folder``, cast to the dtype that each parameter has."""
    targets: list[tuple[Box, torch.Tensor]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: dict[Box, torch.Tensor] = {}
    for parameter, held in local_pieces(chunks, num_tokens, pg).items():
        if any(piece.box.key in VOCABULARY for piece in held) or not held:
            parameter.data.zero_()  # rows that pad the vocabulary
        for piece in held:
            if piece.box in seen:  # tied weights that are two parameters of one rank
                copies.append((piece.tensor, seen[piece.box]))
            else:
                seen[piece.box] = piece.tensor
                targets.append((piece.box, piece.tensor))
    load_pieces(folder, targets)
    for target, source in copies:
        target.copy_(source)
