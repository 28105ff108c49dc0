"""SwiGLU on Ascend."""

import torch_npu  # pyright: ignore[reportMissingImports]  an extra, on Ascend alone
from torch import Tensor


def swiglu(x: Tensor) -> Tensor:
    """See ``ops.activation.swiglu``."""
    return torch_npu.npu_swiglu(x, dim=-1)
