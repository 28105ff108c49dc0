"""Where each parameter of a model chunk lies in the tensors of a checkpoint.

megatron-core describes that in ``sharded_state_dict``; this module turns it into boxes (see ``weights.shards``), cuts
the rows that pad the vocabulary, and keeps where each piece sits inside its parameter, so that a flat range of a
parameter (a rank's share of the optimizer state) can be placed too.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..weights.shards import Box

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # tensors whose rows may be padded


@dataclass(frozen=True, kw_only=True)
class LocalPiece:
    """A contiguous piece of a local parameter, or of a buffer that is stored, and its place in the whole tensor."""

    box: Box
    start: int  # flat offset of the piece in the parameter
    tensor: Tensor  # a view of the parameter, of the box's shape
    replica: tuple[int, ...]  # which copy this is; the last number counts the copies of data parallelism

    @property
    def is_main(self) -> bool:
        """Of all ranks that hold this piece, this one writes it."""
        return is_main_replica(self.replica)

    @property
    def is_main_of_data(self) -> bool:
        """The same, where data-parallel ranks hold different things about the piece, as their optimizer shards are."""
        return is_main_replica(self.replica[:-1])


def unwrapped(chunk: torch.nn.Module) -> MegatronModule:
    """The model inside data-parallel and mixed-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module  # pyright: ignore[reportAssignmentType]
    assert isinstance(chunk, MegatronModule)
    return chunk


def local_pieces(
    chunks: Sequence[torch.nn.Module], num_tokens: int, pg: ProcessGroupCollection
) -> dict[Tensor, list[LocalPiece]]:
    """The pieces of every parameter and every stored buffer of this rank. ``num_tokens``: the true vocabulary."""
    found: dict[Tensor, list[LocalPiece]] = {}
    for chunk in chunks:
        model = unwrapped(chunk)
        entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True, "dp_cp_group": pg.dp_cp})
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in entries]
        for name, tensor in (*model.named_parameters(), *buffers):
            found[tensor] = [
                piece
                for sharded in _sharded(entries, name)
                if (piece := _piece(tensor, sharded, num_tokens)) is not None
            ]
    return found


def range_pieces(pieces: Sequence[LocalPiece], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """The boxes of elements ``start`` to ``end`` of a flattened parameter, each with its own flat start in it."""
    for piece in pieces:
        shape = piece.box.shape
        first, last = max(start, piece.start), min(end, piece.start + math.prod(shape))
        for offset, size in flat_boxes(shape, first - piece.start, last - piece.start):
            inner = sum(o * math.prod(shape[dim + 1 :]) for dim, o in enumerate(offset))
            moved = tuple(a + b for a, b in zip(piece.box.offset, offset, strict=True))
            yield Box(key=piece.box.key, whole=piece.box.whole, offset=moved, shape=size), piece.start + inner


def flat_boxes(shape: Sequence[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offset, shape), in order, that hold exactly elements ``start`` to ``end`` of a row-major tensor."""
    if start >= end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows are first..last
    if first > last:  # inside one row
        return [
            ((last, *offset), (1, *size))
            for offset, size in flat_boxes(shape[1:], start - last * row, end - last * row)
        ]
    head = flat_boxes(shape[1:], start - (first - 1) * row, row) if start < first * row else []
    tail = flat_boxes(shape[1:], 0, end - last * row)
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if last > first else []
    return [
        *(((first - 1, *offset), (1, *size)) for offset, size in head),
        *whole,
        *(((last, *offset), (1, *size)) for offset, size in tail),
    ]


def _sharded(entries: Mapping[str, object], name: str) -> list[ShardedTensor]:
    entry = entries[name]
    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        return list(built.values()) if isinstance(built, dict) else list(itertools.chain(built))
    assert isinstance(entry, ShardedTensor)
    return [entry]


def _piece(parameter: Tensor, sharded: ShardedTensor, num_tokens: int) -> LocalPiece | None:
    data = sharded.data
    assert data is not None and sharded.prepend_axis_num == 0
    start = (data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    whole, shape = tuple(sharded.global_shape), tuple(data.shape)
    if sharded.key in VOCABULARY:
        rows = min(shape[0], num_tokens - sharded.global_offset[0])
        if rows <= 0:
            return None  # nothing but padding
        data, shape, whole = data[:rows], (rows, *shape[1:]), (num_tokens, *whole[1:])
    box = Box(key=sharded.key, whole=whole, offset=tuple(sharded.global_offset), shape=shape)
    return LocalPiece(box=box, start=start, tensor=data.detach(), replica=tuple(sharded.replica_id))  # pyright: ignore[reportArgumentType]
