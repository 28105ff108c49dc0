"""What a decoder is made of, in numbers and switches: all that building, converting and planning need to know."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and how it is stretched to longer contexts."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 0  # llama3

    def inverse_frequencies(self, dim: int) -> list[float]:
        """Radians a position for each of the ``dim / 2`` pairs."""
        plain = [self.theta ** -(2 * pair / dim) for pair in range(dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        return [self._llama3(frequency) for frequency in plain] if self.kind == "llama3" else plain

    def _llama3(self, frequency: float) -> float:
        """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_positions / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_positions / self.low_freq_factor:
            return frequency / self.factor
        kept = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A pre-norm decoder with grouped-query attention, rotary embedding, RMSNorm and a SwiGLU MLP."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # true size, without padding
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool  # the output layer is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, itself counted; empty: no layer has one
    attention_dropout: float = 0.0

    @property
    def query_rows(self) -> int:
        """Width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_dim
