"""Token mixers with a state, in place of attention: gated delta networks and Mamba-2.

Tensor ranks share out groups of heads. The rows of the first projection and of the convolution stand group by group, as
those of queries, keys and values do in megatron-core's attention, so that a plain cut gives each rank whole groups.
megatron-core's own layers of these kinds know no documents, and need CUDA kernels.

Letters: S sequence, B batch, G groups of this rank, H heads of this rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from .config import DecoderConfig, PackedDocuments
from .cut import Cut


@dataclass
class RecurrentSubmodules:
    """What such a mixer is built of."""

    column: Any  # a linear layer whose rows tensor ranks share out
    row: Any  # one whose columns they share out


class CausalConv(Cut):
    """A convolution over the last tokens of each channel, and SiLU."""

    def __init__(self, config: DecoderConfig, channels: int, width: int, *, bias: bool, group: ProcessGroup) -> None:
        super().__init__(group)
        assert config.kernels is not None
        self.weight = self.part(channels, 1, width, dtype=config.params_dtype)
        self.bias = self.part(channels, dtype=config.params_dtype) if bias else None
        self.kernel = config.kernels.causal_conv

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """x (B, S, channels of this rank) -> the same shape."""
        return functional.silu(self.kernel(x, self.weight, self.bias, documents=documents))


class Recurrent(Cut):
    """What the mixers share: projections, the convolution, and numbers for each head."""

    def __init__(
        self,
        config: DecoderConfig,
        submodules: RecurrentSubmodules,
        pg: ProcessGroupCollection,
        *,
        rows: int,
        channels: int,
        conv: tuple[int, bool],
        heads: int,
        width: int,
    ) -> None:
        """Sizes are of the whole model: ``width`` is that of what all heads give.

        ``rows`` are of the first projection, ``channels`` of the convolution; ``conv``: its width, whether it has a bias.
        """
        super().__init__(pg.tp)
        self.config = config
        options = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,  # the spec says which
            "skip_bias_add": False,
            "tp_group": pg.tp,
        }
        self.A_log, self.dt_bias = (self.part(heads, dtype=config.params_dtype) for _ in range(2))
        self.in_proj = build_module(submodules.column, config.hidden_size, rows, gather_output=False, **options)
        self.conv1d = CausalConv(config, channels, conv[0], bias=conv[1], group=pg.tp)
        self.out_proj = build_module(
            submodules.row,
            width,
            config.hidden_size,
            input_is_parallel=True,
            is_expert=False,
            **{**options, "skip_bias_add": True},
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedDocuments, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S of this rank, B, hidden) -> the same shape, and the bias of the last projection."""
        projected, _ = self.in_proj(hidden_states)
        mixed = self.mix(projected.transpose(0, 1), packed_seq_params.documents)
        return self.out_proj(mixed.transpose(0, 1).contiguous())

    def mix(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """projected (B, S, rows of this rank) -> what the heads of this rank give (B, S, ...)."""
        raise NotImplementedError

    def _convolved(self, parts: Sequence[Tensor], documents: Tensor | None) -> list[Tensor]:
        """The convolution of parts (B, S, G, ...), each flattened within its group."""
        flat = [part.flatten(3) for part in parts]
        sizes = [part.shape[3] for part in flat]
        groups = flat[0].shape[2]
        out = self.conv1d(torch.cat(flat, dim=3).flatten(2), documents).unflatten(2, (groups, -1))
        return list(out.split(sizes, dim=3))

    def _steps(self, step: Tensor) -> Tensor:
        """The positive step of each head.   (B, S, H) -> the same shape in float32."""
        return functional.softplus(step.float() + self.dt_bias.float())


class DeltaNet(Recurrent):
    """A gated delta network (Yang et al., 2024), as Qwen3-Next has it. A group is a key head with its value heads."""

    def __init__(
        self,
        config: DecoderConfig,
        submodules: RecurrentSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        assert config.delta is not None and config.kernels is not None
        self.delta = delta = config.delta
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        super().__init__(
            config,
            submodules,
            pg_collection,
            rows=2 * keys + 2 * values + 2 * delta.value_heads,
            channels=2 * keys + values,
            conv=(delta.conv, False),
            heads=delta.value_heads,
            width=values,
        )
        self.kernel = config.kernels.gated_delta_rule
        self.out_norm = GatedNorm(config, delta.value_dim, pg_collection.tp)

    def mix(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        delta = self.delta
        each = delta.value_heads // delta.key_heads  # value heads of a group
        sizes = (*(delta.key_dim,) * 2, *(each * delta.value_dim,) * 2, each, each)
        grouped = projected.unflatten(2, (-1, sum(sizes)))
        q, k, v, gate, beta, step = grouped.split(sizes, dim=3)
        q, k, v = self._convolved((q, k, v), documents)
        v, gate = (x.unflatten(3, (each, -1)).flatten(2, 3) for x in (v, gate))  # (B, S, H, value_dim)
        beta, step = beta.flatten(2), step.flatten(2)  # (B, S, H)
        q, k = _unit(q) / math.sqrt(delta.key_dim), _unit(k)
        decay = -self.A_log.float().exp() * self._steps(step)
        out = self.kernel(q, k, v, decay, beta.sigmoid(), documents=documents)
        return self.out_norm(out, gate).flatten(2)


class GatedNorm(nn.Module):
    """RMSNorm of each head, times SiLU of a gate. All heads of all tensor ranks share its weight."""

    def __init__(self, config: DecoderConfig, width: int, group: ProcessGroup) -> None:
        super().__init__()
        assert config.kernels is not None
        # Not around 1 + weight, whatever the other norms are: another name, so that no program takes it for one that is.
        self.plain_weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.eps, self.group, self.kernel = config.layernorm_epsilon, group, config.kernels.rms_norm

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate (..., width) -> the same shape."""
        weight = copy_to_tensor_model_parallel_region(self.plain_weight, group=self.group)  # sums its gradient
        return (self.kernel(x, weight, self.eps) * functional.silu(gate.float())).to(x.dtype)


class Mamba(Recurrent):
    """Mamba-2 (Dao and Gu, 2024). A group is heads that share B and C."""

    def __init__(
        self,
        config: DecoderConfig,
        submodules: RecurrentSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        assert config.ssm is not None and config.kernels is not None
        self.ssm = ssm = config.ssm
        width = ssm.heads * ssm.head_dim
        super().__init__(
            config,
            submodules,
            pg_collection,
            rows=2 * width + 2 * ssm.groups * ssm.state + ssm.heads,
            channels=width + 2 * ssm.groups * ssm.state,
            conv=(ssm.conv, ssm.conv_bias),
            heads=ssm.heads,
            width=width,
        )
        self.kernel = config.kernels.selective_scan
        self.D = self.part(ssm.heads, dtype=config.params_dtype)
        self.norm = GroupNorm(config, width, ssm.groups, pg_collection.tp)

    def mix(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        ssm = self.ssm
        each = ssm.heads // ssm.groups
        sizes = (*(each * ssm.head_dim,) * 2, *(ssm.state,) * 2, each)
        gate, x, k, q, step = projected.unflatten(2, (-1, sum(sizes))).split(sizes, dim=3)
        x, k, q = self._convolved((x, k, q), documents)
        x = x.unflatten(3, (each, -1)).flatten(2, 3)  # (B, S, H, head_dim)
        steps = self._steps(step.flatten(2)).clamp(*ssm.step_limits)
        decay = -self.A_log.float().exp() * steps
        out = self.kernel(q, k, x.float() * steps[..., None], decay, documents=documents)
        out = out + self.D.float()[:, None] * x.float()
        return self.norm(out.to(x.dtype).flatten(2), gate.flatten(2))


class GroupNorm(Cut):
    """RMSNorm of each group, after a gate through SiLU."""

    def __init__(self, config: DecoderConfig, width: int, groups: int, group: ProcessGroup) -> None:
        super().__init__(group)
        self.weight = self.part(width, dtype=config.params_dtype)
        self.size, self.eps = width // groups, config.layernorm_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate (B, S, width of this rank) -> the same shape."""
        gated = (x.float() * functional.silu(gate.float())).unflatten(2, (-1, self.size))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(2).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """x (..., D) in float32, of length 1."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
