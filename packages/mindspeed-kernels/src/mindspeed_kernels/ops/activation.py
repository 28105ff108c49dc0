"""Gated activations."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from .table import Implementation, Operator


def swiglu(x: Tensor) -> Tensor:
    """silu(a) * b of x (..., 2 N) = (a, b) (Shazeer, 2020). Returns (..., N)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """gelu(a) * b of x (..., 2 N) = (a, b) (Shazeer, 2020), gelu by its approximation with tanh. Returns (..., N)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: Tensor, *, slope: float, limit: float) -> Tensor:
    """(b + 1) * a * sigmoid(slope * a) of x (..., 2 N) = (a, b), a at most ``limit``, b within it (gpt-oss, 2025)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (gate * slope).sigmoid())


def _npu() -> Callable[..., Any]:
    from ..npu.activation import swiglu as npu

    return npu


SWIGLU = Operator(name="swiglu", reference=swiglu, faster={"npu": Implementation(load=_npu, kinds=("npu",))})
GEGLU = Operator(name="geglu", reference=geglu, faster={})
CLAMPED_SWIGLU = Operator(name="clamped_swiglu", reference=clamped_swiglu, faster={})
