"""Products of rows with the weights of their expert on Ascend.

``npu_grouped_matmul`` has no gradient of its own: without the function below, those of inputs and weights would be None.
"""

from typing import Any

import torch
import torch_npu  # pyright: ignore[reportMissingImports]  an extra, on Ascend alone
from torch import Tensor

_BY_ROWS, _BY_SUMMED = 0, 2  # group_type: which axis of x the groups share out
_COUNTS = 1  # group_list_type: group_list holds counts, not where each group ends


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """See ``ops.grouped.grouped_linear``."""
    return _GroupedLinear.apply(x, weight, counts.to(device=x.device, dtype=torch.int64))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _product(x, weight.transpose(1, 2), counts, _BY_ROWS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, counts = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        return _product(gradient, weight, counts, _BY_ROWS), _product(gradient.T, x, counts, _BY_SUMMED), None


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    """Groups of rows: x (T, N), weight (E, N, M) -> (T, M). Of what is summed over: (M, T), (T, N) -> (E, M, N)."""
    if 0 in (x.numel(), weight.numel()):  # no expert of this rank was chosen
        shape = (x.shape[0], weight.shape[2]) if group_type == _BY_ROWS else (len(counts), x.shape[0], weight.shape[1])
        return x.new_zeros(shape)
    options = {"split_item": 3, "group_type": group_type, "group_list_type": _COUNTS}  # 3: one tensor comes back
    return torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, **options)[0]
