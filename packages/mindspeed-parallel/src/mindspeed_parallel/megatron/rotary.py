"""Rotary position embedding (Su et al., 2021) in the layout of GPT-NeoX: angles for given frequencies and positions.

Letters: S sequence, B batch, D head dim.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Angles from given inverse frequencies. Stands where GPTModel keeps its own."""

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> None:
        """inverse_frequencies (D / 2,), radians a position. ``attention_factor`` scales what is rotated, as YaRN does."""
        super().__init__()
        # Not a buffer: those are cast with the model, and angles in bfloat16 are wrong from a few hundred tokens on.
        self.inverse_frequencies = inverse_frequencies
        self.attention_factor = attention_factor

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, S, 1, D) in ``dtype`` of the angles, which are in float32.

        positions (B, S): from 0 in every document.
        """
        angles = (positions[..., None] * self.frequencies(positions))[:, :, None]  # (B, S, 1, D / 2)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)

    def frequencies(self, positions: Tensor) -> Tensor:
        """Radians a position for each pair: (D / 2,), or (B, S, D / 2) where tokens differ."""
        return self.inverse_frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to another device, and not to another dtype."""
        super()._apply(fn, recurse)
        self.inverse_frequencies = self.inverse_frequencies.to(fn(self.inverse_frequencies[:0]).device)
        return self

    def get_rotary_seq_len(self, *_: Any) -> int:
        """GPTModel asks; positions say it already."""
        return 0

    def forward(self, *_: Any, **__: Any) -> None:
        """No angles for megatron-core to rotate by: attention does."""
        return


class NoRotary(nn.Module):
    """Stands where GPTModel keeps a rotary embedding, in models without one."""

    def turns(self, positions: Tensor, dtype: torch.dtype) -> None:
        """No angles."""
        return

    def get_rotary_seq_len(self, *_: Any) -> int:
        """GPTModel asks."""
        return 0

    def forward(self, *_: Any, **__: Any) -> None:
        """No angles for megatron-core to rotate by."""
        return


class DynamicRotary(Rotary):
    """Dynamic NTK scaling: the base grows with the length of the document beyond the original context."""

    def __init__(self, inverse_frequencies: Tensor, factor: float, original: int) -> None:
        """inverse_frequencies (D / 2,): within ``original`` tokens."""
        super().__init__(inverse_frequencies)
        self.factor, self.original = factor, original

    def frequencies(self, positions: Tensor) -> Tensor:
        length = document_lengths(positions).clamp(min=self.original)
        growth = self.factor * length / self.original - (self.factor - 1)
        pairs = self.inverse_frequencies.numel()
        # The base times growth ** (D / (D - 2)), to the power of -2 pair / D.
        powers = -torch.arange(pairs, device=growth.device) / (pairs - 1)
        return self.inverse_frequencies * growth[..., None] ** powers


class LongRotary(Rotary):
    """LongRoPE (Ding et al., 2024): one set of frequencies within the original context, another for longer documents."""

    def __init__(self, short: Tensor, long: Tensor, attention_factor: float, original: int) -> None:
        """short, long (D / 2,): inverse frequencies in documents of up to ``original`` tokens, and in longer ones."""
        super().__init__(torch.stack((short, long)), attention_factor)
        self.original = original

    def frequencies(self, positions: Tensor) -> Tensor:
        is_long = document_lengths(positions)[..., None] > self.original
        return torch.where(is_long, self.inverse_frequencies[1], self.inverse_frequencies[0])


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, kernel: Callable[..., Tensor], interleaved: bool) -> Tensor:
    """x (B, S, heads, D) with its first R dimensions turned through ``kernel``.   cos, sin (B, S, 1, R).

    ``interleaved``: pairs are neighbours. They come out as halves, queries and keys alike, so that products are the same.
    """
    width = cos.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    if interleaved:
        first = first.unflatten(-1, (width // 2, 2)).transpose(-1, -2).flatten(-2)
    first = kernel(first, cos, sin)
    return torch.cat((first, rest), dim=-1) if rest.shape[-1] else first


def document_lengths(positions: Tensor) -> Tensor:
    """Length of the document that each token stands in, found without waiting for the device.

    positions (B, S), from 0 in every document -> (B, S) of the same dtype. A frequency that depends on a length must
    depend on this one: that of a whole batch would pass from one document to its neighbours.
    """
    document = (positions == 0).cumsum(dim=1)
    counts = document.new_zeros(len(positions), positions.shape[1] + 1)
    counts.scatter_add_(1, document, torch.ones_like(document))
    return counts.gather(1, document).to(positions.dtype)
