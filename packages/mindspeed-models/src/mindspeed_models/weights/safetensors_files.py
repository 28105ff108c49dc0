"""Safetensors folders: checked before anything is read, read by slices, written one tensor at a time.

The format: eight bytes of length, a JSON header with dtype, shape and byte range of every tensor, the bytes.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mindspeed_kernels.reference import untouched
from safetensors import safe_open
from torch import Tensor

from ..errors import WeightError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_AGAIN = "download it again"
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFolder:
    """The tensors of a folder. Opening it checks every file: nothing missing, cut, doubled or only promised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        promised = self._promised()
        if promised and SINGLE not in promised.values() and (folder / SINGLE).exists():
            raise WeightError(
                f"{folder}: holds {SINGLE} and {INDEX}, which does not name it; remove the one that is left over"
            )
        for name in dict.fromkeys(promised.values()) if promised else [SINGLE]:
            for key, entry in _read_header(folder / name):
                if key in self.entries:
                    raise WeightError(f"{folder / name}: {key} stands in {self.entries[key].file.name} too")
                self.entries[key] = entry
        for key, name in promised.items():
            if key not in self.entries or self.entries[key].file.name != name:
                raise WeightError(f"{folder / INDEX}: names {key} in {name}, which does not hold it; {_AGAIN}")
        if promised and (unlisted := [key for key in self.entries if key not in promised]):
            raise WeightError(
                f"{folder / INDEX}: does not list {unlisted[0]}, which {self.entries[unlisted[0]].file.name} holds"
            )
        self._open: dict[Path, Any] = {}

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or the part of it that the slices name."""
        entry = self.entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        with untouched():  # the library makes tensors through functions that the reference mode would widen
            view = self._open[entry.file].get_slice(name)
            return view[part] if part else view[:]

    def _promised(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            found = dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"{path}: not a weight index ({error!r}); {_AGAIN}") from error
        for key, name in found.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise WeightError(f"{path}: puts {key} into {name!r}, which is not a file of this folder")
        if not found:
            raise WeightError(f"{path}: names no tensor; {_AGAIN}")
        return found


def _read_header(path: Path) -> Iterator[tuple[str, Entry]]:
    """The tensors of a file: their bytes lie one after the other, without gap or overlap, to the end of the file."""
    size, length, header = _header_of(path)
    found = {key: item for key, item in header if key != "__metadata__"}
    if len(found) < sum(key != "__metadata__" for key, _ in header):
        raise WeightError(f"{path}: its header names a tensor twice; download it again")
    try:
        items = sorted(found.items(), key=lambda pair: pair[1]["data_offsets"])
        at = 0
        for key, item in items:
            if item["dtype"] not in DTYPES:
                raise WeightError(f"{path}: {key} has dtype {item['dtype']}, which is not supported")
            entry = Entry(file=path, shape=tuple(item["shape"]), dtype=DTYPES[item["dtype"]])
            start, stop = item["data_offsets"]
            if start != at or stop - start != math.prod(entry.shape) * entry.dtype.itemsize:
                raise WeightError(f"{path}: {key} is not where the header should say, or not of its size; {_AGAIN}")
            at = stop
            yield key, entry
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{path}: not a safetensors file, its header is damaged ({error!r}); {_AGAIN}") from error
    if 8 + length + at != size:
        raise WeightError(f"{path}: cut short or damaged, its size is not what its header says; {_AGAIN}")


def _header_of(path: Path) -> tuple[int, int, list[tuple[str, Any]]]:
    """Size of the file, length of the header, and its entries in order, with those that stand twice."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == _LFS[:8] and file.read(len(_LFS) - 8) == _LFS[8:]:
                raise WeightError(f"{path}: a Git LFS pointer, not the weights themselves; run `git lfs pull`")
            (length,) = struct.unpack("<Q", start)
            file.seek(8)
            if 8 + length > size:
                raise WeightError(f"{path}: cut short or damaged, its header is not all there; {_AGAIN}")
            header = json.loads(file.read(length), object_pairs_hook=_pairs)
    except FileNotFoundError as error:
        raise WeightError(f"{path}: missing; {_AGAIN}") from error
    except (struct.error, ValueError) as error:
        raise WeightError(f"{path}: not a safetensors file; {_AGAIN}") from error
    if not isinstance(header, _Pairs):
        raise WeightError(f"{path}: not a safetensors file; {_AGAIN}")
    return size, length, header.pairs


class _Pairs(dict[str, Any]):
    """A JSON object that remembers what it was written as."""

    pairs: list[tuple[str, Any]]


def _pairs(pairs: list[tuple[str, Any]]) -> _Pairs:
    found = _Pairs(pairs)
    found.pairs = pairs
    return found


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_folder(
    folder: Path, planned: Sequence[Planned], tensors: Iterable[tuple[str, Tensor]], *, max_shard: int
) -> None:
    """Write ``tensors``, which come in the order of ``planned``, into shards of at most ``max_shard`` bytes.

    One tensor is in memory at a time. WeightError when a tensor comes out of order, in another shape or dtype, or when
    one is missing.
    """
    shards = _split(planned, max_shard)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    )
    coming = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for plan in shard:
                key, tensor = next(coming, ("nothing", torch.empty(0)))
                if key != plan.name or tuple(tensor.shape) != plan.shape or tensor.dtype != plan.dtype:
                    raise WeightError(
                        f"{plan.name}: planned as {plan.dtype} {plan.shape}, got {key} {tensor.dtype} {tuple(tensor.shape)}"
                    )
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                del tensor  # before the next one is made
    if (extra := next(coming, None)) is not None:
        raise WeightError(f"{extra[0]}: not planned")
    if len(shards) > 1:
        weight_map = {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard}
        total = sum(plan.num_bytes for plan in planned)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(planned: Sequence[Planned], max_shard: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    filled = 0
    for plan in planned:
        if shards[-1] and filled + plan.num_bytes > max_shard:
            shards.append([])
            filled = 0
        shards[-1].append(plan)
        filled += plan.num_bytes
    return shards


def _header(shard: Sequence[Planned]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in shard:
        stop = start + plan.num_bytes
        header[plan.name] = {"dtype": _NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
