"""Tokenised documents on disk, memory-mapped, in the layout of megatron-core's indexed data sets.

``NAME.bin`` holds the tokens of all documents one after the other, ``NAME.idx`` their lengths and offsets; megatron-core
reads both. ``NAME.trained.bin`` beside them has one byte a token: whether it carries loss.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_CODES: dict[str, int] = {"uint16": 8, "int32": 4}  # dtype codes of the index


@dataclass(frozen=True, kw_only=True)
class Example:
    """One document as tokens, and which of them carry loss as targets."""

    tokens: list[int]
    trained: list[bool]


class Store:
    """Documents that were written by ``write_store``."""

    def __init__(self, prefix: Path) -> None:
        with _with(prefix, ".idx").open("rb") as file:
            if file.read(9) != _MAGIC:
                raise ValueError(f"{prefix}: not a token store")
            _, code, documents, _ = struct.unpack("<QBQQ", file.read(25))
            self.lengths: NDArray[np.int32] = np.fromfile(file, np.int32, documents)
            offsets = np.fromfile(file, np.int64, documents)
        dtype = np.dtype(next(name for name, number in _CODES.items() if number == code))
        self.starts: NDArray[np.int64] = offsets // dtype.itemsize
        self._tokens = _mapped(_with(prefix, ".bin"), dtype)
        self._trained = _mapped(_with(prefix, ".trained.bin"), np.dtype(np.bool_))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return int(self.lengths.sum())

    @property
    def num_trained(self) -> int:
        """Tokens that carry loss."""
        return int(self._trained.sum())

    def span(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens and mask of a stretch of the concatenated documents."""
        stop = start + length
        return self._tokens[start:stop].astype(np.int64), np.asarray(self._trained[start:stop])

    def document(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens and mask of one document."""
        return self.span(int(self.starts[number]), int(self.lengths[number]))


def write_store(prefix: Path, examples: Iterable[Example], vocabulary: int) -> int:
    """Write documents; returns how many. The token type is the smallest that holds the vocabulary."""
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
    lengths: list[int] = []
    with _with(prefix, ".bin").open("wb") as tokens, _with(prefix, ".trained.bin").open("wb") as trained:
        for example in examples:
            tokens.write(np.asarray(example.tokens, dtype).tobytes())
            trained.write(np.asarray(example.trained, np.bool_).tobytes())
            lengths.append(len(example.tokens))
    sizes = np.asarray(lengths, np.int32)
    offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)[:-1])) * dtype.itemsize if lengths else sizes
    with _with(prefix, ".idx").open("wb") as index:
        index.write(_MAGIC + struct.pack("<QBQQ", _VERSION, _CODES[dtype.name], len(lengths), len(lengths) + 1))
        index.write(sizes.tobytes() + offsets.astype(np.int64).tobytes())
        index.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    return len(lengths)


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
