"""Token mixers with a state: convolution, gated delta rule, selective scan. States start anew in every document.

Each is defined by its recurrence, token by token; ``chunked`` computes the same with a few products a chunk.

Letters: B batch, S tokens, C channels, W width of a convolution, H heads, K key heads, D dimensions of keys and queries,
V dimensions of values, N chunks, L tokens of a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .table import Implementation, Operator

_CHUNK = 64


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, documents: Tensor | None = None) -> Tensor:
    """Each channel over its last W tokens.   x (B, S, C), weight (C, 1, W), bias (C,) -> (B, S, C).

    ``documents`` (B, S): a token sees tokens of the same number alone.
    """
    out = x * weight[:, 0, -1]
    for back in range(1, min(weight.shape[-1], x.shape[1])):
        past = functional.pad(x[:, :-back], (0, 0, back, 0))
        if documents is not None:
            same = documents[:, back:] == documents[:, :-back]
            past = past * functional.pad(same, (back, 0))[..., None]
        out = out + past * weight[:, 0, -1 - back]
    return out if bias is None else out + bias


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, documents: Tensor | None = None
) -> Tensor:
    """Linear attention that overwrites what a key held (Yang et al., 2024: gated delta networks).

    q, k (B, S, K, D), v (B, S, H, V), H a multiple of K; decay (B, S, H), the logarithm of what a step keeps of the state,
    and beta (B, S, H), how much of the new value it takes. Returns (B, S, H, V) in v's dtype; computed in float32.
    """
    queries, keys, values, decays, betas = _by_head(q, k, v, decay, beta)
    keeps = decays.exp() * _continues(documents, decays)
    state = values.new_zeros(*values.shape[:2], keys.shape[-1], values.shape[-1])  # (B, H, D, V)
    out = []
    for at in range(values.shape[2]):
        key = keys[:, :, at, :, None]
        state = state * keeps[:, :, at, None, None]
        held = (state * key).sum(2, keepdim=True)
        new = (values[:, :, at, None] - held) * betas[:, :, at, None, None]
        state = state + key * new
        out.append((state * queries[:, :, at, :, None]).sum(2))
    return torch.stack(out, dim=1).to(v.dtype)


def selective_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, documents: Tensor | None = None) -> Tensor:
    """The state space of Mamba-2 (Dao and Gu, 2024), written as linear attention with decay.

    q and k are C and B of that paper, (B, S, K, D); v (B, S, H, V) is its x times the step; decay (B, S, H) is A times the
    step. Returns (B, S, H, V) in v's dtype; computed in float32.
    """
    queries, keys, values, decays = _by_head(q, k, v, decay)
    keeps = decays.exp() * _continues(documents, decays)
    state = values.new_zeros(*values.shape[:2], keys.shape[-1], values.shape[-1])
    out = []
    for at in range(values.shape[2]):
        state = state * keeps[:, :, at, None, None] + keys[:, :, at, :, None] * values[:, :, at, None]
        out.append((state * queries[:, :, at, :, None]).sum(2))
    return torch.stack(out, dim=1).to(v.dtype)


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, documents: Tensor | None = None
) -> Tensor:
    """``gated_delta_rule``: the updates of a chunk are one triangular system (the UT transform of that paper)."""
    queries, keys, values, decays, betas = _by_head(q, k, v, decay, beta)
    chunks = _Chunks.of(decays, documents)
    queries, keys, values = (chunks.cut(x) for x in (queries, keys, values))
    betas = chunks.cut(betas[..., None])
    weighted = keys * betas
    system = (weighted @ keys.mT) * chunks.between
    new, reading = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (values * betas, weighted * chunks.since_start)
    )
    return chunks.scan(queries, keys, new, reading).to(v.dtype)


def chunked_selective_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, documents: Tensor | None = None
) -> Tensor:
    """``selective_scan``, a chunk at a time."""
    queries, keys, values, decays = _by_head(q, k, v, decay)
    chunks = _Chunks.of(decays, documents)
    queries, keys, values = (chunks.cut(x) for x in (queries, keys, values))
    return chunks.scan(queries, keys, values, None).to(v.dtype)


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """What is left of a state from token to token, within chunks and across them; nothing passes between documents."""

    length: int  # tokens, without those that fill the last chunk
    size: int
    between: Tensor  # (B, H, N, L, L): of what the second token put in, at the first
    since_start: Tensor  # (B, H, N, L, 1): of the state before the chunk, at a token
    to_end: Tensor  # (B, H, N, L, 1): of what a token put in, after the chunk
    across: Tensor  # (B, H, N, 1, 1): of the state before the chunk, after it

    @classmethod
    def of(cls, decays: Tensor, documents: Tensor | None) -> "_Chunks":
        """decays (B, H, S), documents (B, S)."""
        length = decays.shape[-1]
        size = min(_CHUNK, length)
        filling = -length % size
        steps = functional.pad(decays, (0, filling)).unflatten(-1, (-1, size))
        sums = steps.cumsum(-1)
        # Sums of the steps between two tokens alone: differences of sums from the start of the chunk would round with
        # what stands before, which may be another document.
        later = torch.ones(size, size, dtype=torch.bool, device=decays.device).tril(-1)
        between = steps[..., :, None].expand(*steps.shape, size).masked_fill(~later, 0.0).cumsum(-2)
        between = between.exp().tril()
        since_start, to_end, across = sums.exp(), between[..., -1, :], sums[..., -1].exp()
        if documents is not None:
            numbers = functional.pad(documents, (0, filling), value=-1).unflatten(-1, (-1, size))[:, None]
            before = functional.pad(numbers[:, :, :-1, -1:], (0, 0, 1, 0), value=-1)  # of the token before the chunk
            last = numbers[..., -1:]
            between = between * (numbers[..., :, None] == numbers[..., None, :])
            since_start = since_start * (numbers == before)
            to_end = to_end * (numbers == last)
            across = across * (last == before)[..., 0]
        return cls(
            length=length,
            size=size,
            between=between,
            since_start=since_start[..., None],
            to_end=to_end[..., None],
            across=across[..., None, None],
        )

    def cut(self, x: Tensor) -> Tensor:
        """(B, H, S, D) -> (B, H, N, L, D)."""
        return functional.pad(x, (0, 0, 0, -self.length % self.size)).unflatten(2, (-1, self.size))

    def scan(self, queries: Tensor, keys: Tensor, values: Tensor, reading: Tensor | None) -> Tensor:
        """From chunk to chunk.   ``reading`` (B, H, N, L, D): keys by which what the state held is taken off the values."""
        within = (queries @ keys.mT) * self.between
        queries, keys = queries * self.since_start, keys * self.to_end
        state = values.new_zeros(*values.shape[:2], keys.shape[-1], values.shape[-1])
        out = []
        for n in range(values.shape[2]):
            new = values[:, :, n] if reading is None else values[:, :, n] - reading[:, :, n] @ state
            out.append(queries[:, :, n] @ state + within[:, :, n] @ new)
            state = state * self.across[:, :, n] + keys[:, :, n].mT @ new
        return torch.stack(out, dim=2).flatten(2, 3)[:, :, : self.length].transpose(1, 2)


def _by_head(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
    """All as (B, H, S, ...) in float32, keys and queries repeated for the heads that share them."""
    groups = v.shape[2] // k.shape[2]
    wide = (q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2), v, *others)
    return [x.float().transpose(1, 2) for x in wide]


def _continues(documents: Tensor | None, decays: Tensor) -> Tensor:
    """1 where a token stands in the document of the one before it, else 0.   documents (B, S) -> (B, 1, S)."""
    if documents is None:
        return torch.ones_like(decays[:, :1])
    same = documents[:, 1:] == documents[:, :-1]
    return functional.pad(same, (1, 0))[:, None].to(decays.dtype)


CAUSAL_CONV = Operator(name="causal_conv", reference=causal_conv, faster={})
GATED_DELTA_RULE = Operator(
    name="gated_delta_rule",
    reference=gated_delta_rule,
    faster={"chunked": Implementation(load=lambda: chunked_gated_delta_rule, kinds=("npu", "cuda", "cpu"))},
)
SELECTIVE_SCAN = Operator(
    name="selective_scan",
    reference=selective_scan,
    faster={"chunked": Implementation(load=lambda: chunked_selective_scan, kinds=("npu", "cuda", "cpu"))},
)
