"""Rotary embedding on Ascend."""

import torch_npu  # pyright: ignore[reportMissingImports]  an extra, on Ascend alone
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``ops.rotary.rotary``. The operator wants four dimensions in cos and sin."""
    return torch_npu.npu_rotary_mul(x, cos, sin)
