"""Products of rows with the weights of their expert.   Letters: T tokens, E experts, N columns, M rows of a weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .table import Implementation, Operator


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x (T, N), the first ``counts[0]`` rows times ``weight[0]`` and so on; weight (E, M, N), counts (E,) -> (T, M).

    The counts add up to T; an expert may have no rows.
    """
    parts = x.split(counts.tolist())
    products = [functional.linear(part, own) for part, own in zip(parts, weight.unbind(0), strict=True)]
    return torch.cat(products)


def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``grouped_linear`` through PyTorch's grouped product. Rows of x and weight take a multiple of 16 bytes."""
    ends = counts.cumsum(0).to(device=x.device, dtype=torch.int32)
    out = torch._grouped_mm(x, weight.transpose(-1, -2), offs=ends)
    if out.requires_grad:
        out.register_hook(Tensor.contiguous)  # it refuses a gradient that was expanded
    return out


def _npu() -> Callable[..., Any]:
    from ..npu.grouped import grouped_linear as npu

    return npu


GROUPED_LINEAR = Operator(
    name="grouped_linear",
    reference=grouped_linear,
    faster={
        "npu": Implementation(load=_npu, kinds=("npu",)),
        # Only by name: it refuses float64, and widths that are no multiple of 16 bytes.
        "grouped_mm": Implementation(load=lambda: grouped_mm, kinds=("cuda", "cpu"), auto=False),
    },
)
