"""Softmax attention.   Letters: B batch, S query tokens, T key tokens, H query heads, K kv heads, D head dim."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .table import Implementation, Operator


def attention(  # noqa: PLR0913  one option for each thing that some attention has
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention with grouped heads.

    q (B, S, H, D); k (B, S, K, D), v (B, S, K, Dv), H a multiple of K. Returns (B, S, H, Dv) in q's dtype; the softmax
    runs in float32. ``documents`` (B, S): tokens see only tokens of the same number. ``window``: a token sees itself
    and the ``window - 1`` tokens before it. ``dropout``: probability of dropping a weight, from the current generator.
    ``cap``: scores s become cap * tanh(s / cap) (Gemma 2, 2024). ``sinks`` (H,): the score of a key of each head that has
    no value, so that weights may add up to less than 1 (gpt-oss, 2025).
    """
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, S, D)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    hidden = ~visible(q.shape[2], window, documents, q.device)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1].to(q.dtype)
    else:
        weights = scores.softmax(-1).to(q.dtype)
    return (functional.dropout(weights, dropout) @ v).transpose(1, 2)


def visible(length: int, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which key each query sees: bool, (S, S), or (B, 1, S, S) with documents (B, S)."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if documents is None:
        return seen
    return seen & (documents[:, None, :, None] == documents[:, None, None, :])


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``attention`` through PyTorch's scaled_dot_product_attention; a mask is built only where one is needed."""
    plain = documents is None and window is None
    mask = None if plain else visible(q.shape[1], window, documents, q.device)
    out = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=plain,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _npu() -> Callable[..., Any]:
    from ..npu.attention import attention as npu

    return npu


# Operators of their own, because faster implementations of attention have no cap, and no sinks.
CAPPED_ATTENTION = Operator(name="capped_attention", reference=attention, faster={})
SINK_ATTENTION = Operator(name="sink_attention", reference=attention, faster={})
ATTENTION = Operator(
    name="attention",
    reference=attention,
    faster={
        "npu": Implementation(load=_npu, kinds=("npu",)),
        "sdpa": Implementation(load=lambda: sdpa, kinds=("cuda", "cpu")),
    },
)
