"""RMSNorm on Ascend."""

import torch_npu  # pyright: ignore[reportMissingImports]  an extra, on Ascend alone
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``ops.norm.rms_norm``."""
    return torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
