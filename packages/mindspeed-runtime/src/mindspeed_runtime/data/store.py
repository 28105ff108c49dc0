"""Tokenised documents on disk, memory-mapped, in the layout of megatron-core's indexed data sets.

``NAME.bin`` holds the tokens of all documents one after the other, ``NAME.idx`` their lengths and offsets; megatron-core
reads both. ``NAME.trained.bin`` beside them has one byte a token: whether it carries loss.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sources import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<QBQQ")  # version, code of the token type, documents, document bounds
_CODES: dict[int, Any] = {8: np.dtype(np.uint16), 4: np.dtype(np.int32)}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One document as tokens, and which of them carry loss as targets."""

    tokens: list[int]
    trained: list[bool]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.trained) or not self.tokens:
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.trained)} marks do not make a document")


class Store:
    """Documents that were written by ``write_store``. DataError when the files are not what was written."""

    def __init__(self, prefix: Path) -> None:
        with _with(prefix, ".idx").open("rb") as file:
            head = file.read(len(_MAGIC) + _HEADER.size)
            if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
                raise _damaged(prefix)
            version, code, documents, bounds = _HEADER.unpack(head[len(_MAGIC) :])
            size = len(head) + 12 * documents + 8 * bounds
            if version != _VERSION or code not in _CODES or _with(prefix, ".idx").stat().st_size != size:
                raise _damaged(prefix)
            self.lengths: NDArray[np.int32] = np.fromfile(file, np.int32, documents)
            offsets = np.fromfile(file, np.int64, documents)
        dtype = _CODES[code]
        self.starts: NDArray[np.int64] = offsets // dtype.itemsize
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self._tokens = _mapped(_with(prefix, ".bin"), dtype, self.num_tokens)
        self._trained = _mapped(_with(prefix, ".trained.bin"), np.dtype(np.bool_), self.num_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def num_trained(self) -> int:
        """Tokens that carry loss."""
        return int(self._trained.sum())

    def span(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens and marks of a stretch of the concatenated documents."""
        stop = start + length
        return self._tokens[start:stop].astype(np.int64), np.asarray(self._trained[start:stop])

    def document(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens and marks of one document."""
        return self.span(int(self.starts[number]), int(self.lengths[number]))


def write_store(prefix: Path, examples: Iterable[Example], vocabulary: int) -> int:
    """Write documents of tokens below ``vocabulary``; returns how many.

    The token type is the smallest that holds the vocabulary. ValueError for a token outside of it.
    """
    code = 8 if vocabulary <= 1 << 16 else 4
    dtype = _CODES[code]
    lengths: list[int] = []
    with _with(prefix, ".bin").open("wb") as tokens, _with(prefix, ".trained.bin").open("wb") as trained:
        for example in examples:
            if not 0 <= min(example.tokens) <= max(example.tokens) < vocabulary:
                raise ValueError(f"a token of document {len(lengths)} is outside a vocabulary of {vocabulary}")
            tokens.write(np.asarray(example.tokens, dtype).tobytes())
            trained.write(np.asarray(example.trained, np.bool_).tobytes())
            lengths.append(len(example.tokens))
    sizes = np.asarray(lengths, np.int32)
    stops = np.cumsum(sizes, dtype=np.int64)
    with _with(prefix, ".idx").open("wb") as index:
        index.write(_MAGIC + _HEADER.pack(_VERSION, code, len(lengths), len(lengths) + 1))
        index.write(sizes.tobytes() + ((stops - sizes) * dtype.itemsize).tobytes())
        index.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    return len(lengths)


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _damaged(prefix: Path) -> DataError:
    return DataError(f"{prefix.parent}: these tokenised documents are damaged; remove the folder, it is made anew")


def _mapped(path: Path, dtype: Any, size: int) -> NDArray[Any]:
    if path.stat().st_size != size * dtype.itemsize:
        raise _damaged(path)
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
