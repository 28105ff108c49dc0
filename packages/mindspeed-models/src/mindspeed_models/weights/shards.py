"""Pieces of tensors in megatron-core's distributed format (``torch_dist``).

The format is a folder of PyTorch distributed-checkpoint files with ``common.pt`` and ``metadata.json`` beside them.
A stored tensor is a set of boxes that tile it; any other set of boxes can be read back. So a checkpoint knows nothing
of the layout that wrote it, and nothing is ever gathered: each rank writes the boxes it owns and reads the boxes it
needs. Boxes that a rank writes may be made on demand, one at a time.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mindspeed_kernels.errors import UserError
from mindspeed_kernels.reference import untouched
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat
from torch.distributed.checkpoint.filesystem import _write_item as write_to_stream
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class ShardError(UserError):
    """A stored tensor that is absent, incomplete or of another shape than asked for."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Where a piece lies in its whole tensor."""

    key: str
    whole: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_whole(cls, key: str, shape: tuple[int, ...]) -> "Box":
        """The box that is the whole tensor."""
        return cls(key=key, whole=shape, offset=(0,) * len(shape), shape=shape)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box and what fills it: a tensor, or a function that makes it when its turn comes."""

    box: Box
    dtype: torch.dtype
    fill: Tensor | Callable[[], Tensor]

    def tensor(self) -> Tensor:
        """The filled box."""
        tensor = self.fill if isinstance(self.fill, Tensor) else self.fill()
        if tuple(tensor.shape) != self.box.shape or tensor.dtype != self.dtype:
            raise ShardError(
                f"{self.box.key}: expected {self.dtype} {self.box.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        return tensor


def save_pieces(folder: Path, pieces: Sequence[Piece], group: dist.ProcessGroup | None = None) -> None:
    """Write ``pieces`` of all ranks of ``group`` (or of this process alone) into the existing ``folder``.

    Together they must tile every tensor exactly once.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1)
    rank = 0 if alone else dist.get_rank(group)
    try:
        with untouched(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as meant, when this process is alone
            dcp.save(
                {},
                storage_writer=_Writer(folder),
                planner=_SavePlanner(pieces),
                process_group=group,
                no_dist=alone,
            )
    except dcp.CheckpointException as error:
        raise _cause(error) from error
    if rank == 0:
        torch.save({}, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(_FORMAT))


class Shards:
    """The stored tensors of a folder. What is where is read once; each rank reads for itself."""

    def __init__(self, folder: Path) -> None:
        """ShardError when the folder is not a complete one."""
        if not (folder / ".metadata").is_file():
            raise ShardError(f"{folder}: no .metadata, so this is not a complete torch_dist folder")
        self._reader = dcp.FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """By key: whole shape (``size``), dtype (``properties``) and boxes (``chunks``)."""
        entries = self._metadata.state_dict_metadata
        return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def load(self, targets: Sequence[tuple[Box, Tensor]]) -> None:
        """Fill each tensor with its box of the stored tensors, cast to the tensor's dtype."""
        planner = _LoadPlanner(targets)
        with untouched():
            planner.set_up_planner({}, self._metadata, is_coordinator=True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()


def load_pieces(folder: Path, targets: Sequence[tuple[Box, Tensor]]) -> None:
    """``Shards(folder).load(targets)``, for a single use."""
    if targets:
        Shards(folder).load(targets)


class _Writer(dcp.FileSystemWriter):
    """PyTorch's writer of one file a rank, but for two things.

    It lets go of a piece once that is written: torch 2.13 keeps all of them until the file is complete. And it writes
    equal bytes for equal content: nothing of when and where.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        written: list[WriteResult] = []
        if plan.items:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, Tensor)
                    tensor = data.cpu()
                    if tensor.untyped_storage().size() != tensor.nbytes:
                        tensor = tensor.clone()  # or the whole of what it is a view of would be written
                    form = SerializationFormat.TORCH_SAVE
                    written.append(write_to_stream(self.transforms, stream, tensor, item, name, form))
                    del data, tensor
                stream.flush()
                os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    """Plans one write a piece and fills each when it is written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {_index(piece.box): piece for piece in pieces}
        if len(self._pieces) != len(pieces):
            raise ShardError("a box is written twice by one rank")

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(index, piece) for index, piece in self._pieces.items()]
        self.plan = SavePlan(items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                held = sum(_volume(tuple(chunk.sizes)) for chunk in entry.chunks)
                if held != _volume(tuple(entry.size)):
                    raise ShardError(f"{key}: pieces of {held} elements do not tile a tensor of {tuple(entry.size)}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key = MetadataIndex(write_item.index.fqn, write_item.index.offset)
        return self._pieces[key].tensor().detach().contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill the given boxes, and checks that the stored boxes cover them."""

    def __init__(self, targets: Sequence[tuple[Box, Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._targets = {_index(box): (box, tensor) for box, tensor in targets}
        if len(self._targets) != len(targets):
            raise ShardError("a box is asked for twice by one rank")

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for index, (box, _) in self._targets.items():
            entry = self.metadata.state_dict_metadata.get(box.key)
            if not isinstance(entry, TensorStorageMetadata):
                raise ShardError(f"{box.key}: the checkpoint has no such tensor")
            if tuple(entry.size) != box.whole:
                raise ShardError(f"{box.key}: stored as {tuple(entry.size)}, the model wants {box.whole}")
            found = create_read_items_for_chunk_list(box.key, entry, [_chunk(box)])
            if sum(_volume(tuple(item.lengths)) for item in found) != _volume(box.shape):
                raise ShardError(f"{box.key}: the stored pieces do not cover {box.offset} + {box.shape}")
            items += [_aimed_at(item, index) for item in found]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        key = MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)
        tensor = self._targets[key][1].detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: ``resolve_tensor`` handed out views of the targets."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:  # pyright: ignore[reportIncompatibleMethodOverride]  torch names it new_plan in one place
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ShardError(f"{read_item.dest_index.fqn}: stored as bytes, not as a tensor")


def _index(box: Box) -> MetadataIndex:
    return MetadataIndex(box.key, torch.Size(box.offset))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece.box),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.box.whole),
        ),
    )


def _aimed_at(item: ReadItem, index: MetadataIndex) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=item.dest_offsets,
        storage_index=item.storage_index,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


_volume = math.prod


def _cause(error: dcp.CheckpointException) -> BaseException:
    """The first rank's own error: the library wraps it in one that prints tracebacks of all."""
    first = next(iter(error.failures.values()))
    return cast(BaseException, first[0] if isinstance(first, tuple) else first)


__all__ = ["Box", "Piece", "ShardError", "Shards", "load_pieces", "save_pieces"]
