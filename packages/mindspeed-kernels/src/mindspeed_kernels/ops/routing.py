"""Choosing experts for tokens.   Letters: T tokens, E experts, K experts a token, G groups."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .table import Operator

_SMALLEST = 1e-20  # keeps a sum of sigmoids that have all vanished from dividing by 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How experts are chosen for a token, and what weight each has."""

    top_k: int  # experts a token
    score: Literal["softmax", "sigmoid"]  # of the logits
    normalised: bool  # the weights of the chosen ones add up to 1
    scale: float = 1.0  # of the weights, after that
    groups: int = 1  # experts are chosen within the best groups
    top_groups: int = 1
    group_score: Literal["top2", "best"] = "top2"  # the sum of its two best (DeepSeek-V3), or its best (DeepSeek-V2)


def routing(logits: Tensor, choice: Choice, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights (T, K), in the dtype of logits (T, E), and numbers (T, K) of the experts with the highest scores.

    ``bias`` (E,) is added to the scores in choosing, not in weighing (Wang et al., 2024).
    """
    wide = logits.float()
    scores = wide.softmax(-1) if choice.score == "softmax" else wide.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if choice.groups > 1:
        ranked = _within_best_groups(ranked, choice)
    chosen = ranked.topk(choice.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if choice.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + (_SMALLEST if choice.score == "sigmoid" else 0.0))
    return (weights * choice.scale).to(logits.dtype), chosen


def _within_best_groups(ranked: Tensor, choice: Choice) -> Tensor:
    """Scores (T, E) with minus infinity in all but the best groups."""
    grouped = ranked.unflatten(-1, (choice.groups, -1))
    worth = grouped.topk(2 if choice.group_score == "top2" else 1, dim=-1).values.sum(-1)  # (T, G)
    best = worth.topk(choice.top_groups, dim=-1).indices
    left_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(-2)


ROUTING = Operator(name="routing", reference=routing, faster={})
