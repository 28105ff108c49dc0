"""Which row is the n-th of a run: a pure function of the seed and n.

Each epoch is a full permutation of the rows, another one every time. It is computed, not stored: a Feistel network
keyed by (seed, epoch) permutes the smallest even power of two that holds all rows, and values past the end are walked
along their cycle until they fall inside. So any position is found at once, and ranks, layouts and restarts cannot
enter.
"""

import hashlib
from dataclasses import dataclass

_ROUNDS = 6


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
        epoch, position = divmod(n, self.num_rows)
        return permuted(position, self.num_rows, self.seed, epoch) if self.shuffle else position


def permuted(position: int, size: int, seed: int, epoch: int) -> int:
    """Where ``position`` goes in the permutation of ``size`` that (seed, epoch) names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, half, seed, epoch)
        if value < size:
            return value


def _feistel(value: int, half: int, seed: int, epoch: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        text = f"{seed} {epoch} {half} {turn} {right}".encode()
        mixed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        left, right = right, left ^ (mixed & mask)
    return left << half | right
