"""Flash attention on Ascend.

In a mask of this operator True means hidden, the opposite of PyTorch's. Without a mask nothing is hidden, whatever
``sparse_mode`` says.
"""

import functools
import math

import torch
import torch_npu  # pyright: ignore[reportMissingImports]  an extra, on Ascend alone
from torch import Tensor
from torch.nn import functional

from ..ops.attention import visible

_COMPRESSED = 2048  # side of the triangular mask that the sparse modes want, whatever the length
_CAUSAL = 3  # sparse_mode: causal, aligned to the last key
_WHOLE_MASK = 1  # sparse_mode: the given mask is the whole mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """See ``ops.attention.attention``."""
    if documents is None and window is None:
        hidden, mode = _triangle(q.device), _CAUSAL
    else:
        seen = visible(q.shape[1], window, documents, q.device)
        hidden, mode = ~(seen if seen.dim() == 4 else seen[None, None]), _WHOLE_MASK
    width = v.shape[-1]
    if width < q.shape[-1]:  # the operator takes heads of one width
        v = functional.pad(v, (0, q.shape[-1] - width))
    out = torch_npu.npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        head_num=q.shape[2],
        input_layout="BSND",
        atten_mask=hidden,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        keep_prob=1.0 - dropout,
        sparse_mode=mode,
    )[0]
    return out[..., :width]


@functools.lru_cache(maxsize=8)
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)
