"""Which row is the n-th of a run: a pure function of the seed and n.

Each epoch is a full permutation of the rows, another one every time. It is computed, not stored: a Feistel network
keyed by (seed, epoch, number of rows) permutes a power of four that holds all rows, and values past the end are walked
along their cycle until they fall inside. So any position is found at once, and ranks, layouts and restarts cannot
enter. The numbers are part of what a checkpoint relies on: they never change.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_TABLE_HALF = 7
_WORD = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # multipliers of splitmix64's finaliser


@dataclass(frozen=True, kw_only=True)
class Order:
    """An endless sequence of row numbers below ``num_rows``."""

    num_rows: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError("an order needs at least one row")

    def __getitem__(self, n: int) -> int:
        """The n-th row of the run."""
        return self.at(*divmod(n, self.num_rows))

    def at(self, epoch: int, position: int) -> int:
        """The row at a position of an epoch."""
        return permuted(position, self.num_rows, self.seed, epoch) if self.shuffle else position

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """All rows of an epoch in their order."""
        if self.shuffle:
            return permutation(self.num_rows, self.seed, epoch)
        return np.arange(self.num_rows, dtype=np.int64)


def permuted(position: int, size: int, seed: int, epoch: int) -> int:
    """Where ``position`` goes in the permutation of ``size`` that (seed, epoch) names."""
    keys, half = _keys(seed, epoch, size), _half(size)
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for key in keys:
            mixed = (right + key) & _WORD
            mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _WORD
            mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        value = left << half | right
        if value < size:
            return value


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """``permuted`` of all positions at once."""
    keys, half = _keys(seed, epoch, size), _half(size)
    values = _network(np.arange(size, dtype=np.uint64), keys, half)
    # Small networks are cheaper to look up than to compute again at every step of a walk.
    table = _network(np.arange(1 << 2 * half, dtype=np.uint64), keys, half) if half <= _TABLE_HALF else None
    while len(outside := np.flatnonzero(values >= size)):
        here = values[outside]
        values[outside] = _network(here, keys, half) if table is None else table[here]
    return values.astype(np.int64)


def _network(values: NDArray[np.uint64], keys: tuple[int, ...], half: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = right + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return left << shift | right


def _half(size: int) -> int:
    # At least 64 places: in a smaller network some permutations of a handful of rows are far more frequent than others.
    return max(3, ((size - 1).bit_length() + 1) // 2)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    def key(turn: int) -> int:
        text = f"{seed} {epoch} {size} {turn}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    return tuple(key(turn) for turn in range(_ROUNDS))
