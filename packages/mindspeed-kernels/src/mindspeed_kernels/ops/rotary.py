"""Rotary position embedding (Su et al., 2021), half-split as in GPT-NeoX."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .table import Implementation, Operator


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) of x (B, S, H, D) by the angles of cos and sin, broadcastable to (B, S, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _npu() -> Callable[..., Any]:
    from ..npu.rotary import rotary as npu

    return npu


ROTARY = Operator(name="rotary", reference=rotary, faster={"npu": Implementation(load=_npu, kinds=("npu",))})
