"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .table import Implementation, Operator


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., N) / sqrt(mean(x^2) + eps) * weight (N,), in x's dtype.

    The normalised value is computed in float32 and rounded to x's dtype before it meets the weight, as Llama does.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def _npu() -> Callable[..., Any]:
    from ..npu.norm import rms_norm as npu

    return npu


RMS_NORM = Operator(name="rms_norm", reference=rms_norm, faster={"npu": Implementation(load=_npu, kinds=("npu",))})
