"""Attention of this project, in megatron-core's attention layer or in place of it.

Letters: S sequence, B batch, H heads of this rank, K kv heads of this rank, D head dim.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.nn import functional

from .config import DecoderConfig, PackedDocuments
from .cut import Cut
from .rotary import turned


class CoreAttention(Cut):
    """Rotary embedding and softmax attention of this rank's heads through the chosen kernels.

    megatron-core rotates by a function of its own that no spec reaches, so the decoder gives it no angles.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and config.kernels is not None
        assert pg_collection is not None
        super().__init__(pg_collection.tp)
        self.kernel, self.rotary = config.kernels.attention, config.kernels.rotary
        if config.attention_cap is not None:
            self.kernel = partial(config.kernels.capped_attention, cap=config.attention_cap)
        self.softmax_offset = None  # megatron-core's name of sinks
        if config.has_sinks:
            self.softmax_offset = self.part(config.num_attention_heads, dtype=config.params_dtype)
            self.kernel = config.kernels.sink_attention
        self.window = config.windows[layer_number - 1] if config.windows else None
        self.is_turned = layer_number - 1 not in config.unturned
        self.interleaved = config.interleaved
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query (S, B, H, D); key (S, B, K, D); value (S, B, K, Dv) -> (S, B, H * Dv). Without turns none is turned."""
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, PackedDocuments)
        documents, turns = packed_seq_params.documents, packed_seq_params.turns
        if self.window is not None and packed_seq_params.local_turns is not None:
            turns = packed_seq_params.local_turns
        dropout = self.dropout if self.training else 0.0
        # Each tensor rank drops other elements: its heads are its own.
        fork = tensor_parallel.get_cuda_rng_tracker().fork() if dropout > 0 else contextlib.nullcontext()  # pyright: ignore[reportOptionalMemberAccess]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if self.is_turned and turns is not None:
            q, k = (turned(x, *turns, kernel=self.rotary, interleaved=self.interleaved) for x in (q, k))
        sinks = {} if self.softmax_offset is None else {"sinks": self.softmax_offset}
        with fork:
            out = self.kernel(
                q, k, v, documents=documents, window=self.window, scale=self.scale, dropout=dropout, **sinks
            )
        return out.transpose(0, 1).flatten(2)


class Replicated(nn.Module):
    """A linear layer that every tensor rank holds whole, and applies to the tokens that it has."""

    def __init__(self, config: DecoderConfig, width: int, rows: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]  read by megatron-core

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., rows)."""
        return functional.linear(x, self.weight, self.bias)


@dataclass
class LatentSubmodules:
    """What attention over latents is built of."""

    column: Any  # a linear layer whose rows tensor ranks share out
    row: Any  # one whose columns they share out
    norm: Any
    core_attention: Any


class LatentAttention(MegatronModule):
    """Multi-head latent attention (DeepSeek-V2, 2024), as its equations have it.

    megatron-core's own, without Transformer Engine, does not sum the gradient of the keys that heads share over tensor
    ranks, and counts that of the norm of the queries twice without sequence parallelism. Here the projections to the
    latents are whole on every tensor rank, heads are shared out, and what heads share is copied to them with a gradient
    that is summed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert config.latent is not None and config.kernels is not None
        self.latent = latent = config.latent
        self.tp_group = pg_collection.tp
        self.rotary, self.interleaved = config.kernels.rotary, config.interleaved
        self.is_turned = layer_number - 1 not in config.unturned
        heads, width = config.num_attention_heads, config.hidden_size
        options = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": pg_collection.tp,
        }

        def column(columns: int, rows: int) -> Any:
            return build_module(submodules.column, columns, rows, gather_output=False, **options)

        queries = heads * (latent.plain + latent.turned)
        if latent.q_rank:
            self.linear_q_down_proj = Replicated(config, width, latent.q_rank, bias=latent.bias)
            self.q_norm = build_module(submodules.norm, config, latent.q_rank, eps=latent.norm_eps)
            self.linear_q_up_proj = column(latent.q_rank, queries)
        else:
            self.linear_q_proj = column(width, queries)
        self.linear_kv_down_proj = Replicated(config, width, latent.kv_rank + latent.turned, bias=latent.bias)
        self.kv_norm = build_module(submodules.norm, config, latent.kv_rank, eps=latent.norm_eps)
        self.linear_kv_up_proj = column(latent.kv_rank, heads * (latent.plain + latent.value))
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            submodules.row,
            heads * latent.value,
            width,
            input_is_parallel=True,
            is_expert=False,
            **{**options, "skip_bias_add": True},
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedDocuments, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S of this rank, B, hidden) -> the same shape, and the bias of the last projection."""
        latent = self.latent
        if latent.q_rank:
            query, _ = self.linear_q_up_proj(self.q_norm(self.linear_q_down_proj(hidden_states)))
        else:
            query, _ = self.linear_q_proj(hidden_states)
        query = query.unflatten(-1, (-1, latent.plain + latent.turned))  # (S, B, H, D)
        narrow, shared = self.linear_kv_down_proj(hidden_states).split((latent.kv_rank, latent.turned), dim=-1)
        both, _ = self.linear_kv_up_proj(self.kv_norm(narrow))
        key, value = both.unflatten(-1, (-1, latent.plain + latent.value)).split((latent.plain, latent.value), dim=-1)
        shared = self._on_all_heads(shared)[:, :, None]  # (S, B, 1, turned)
        query, turning = query.split((latent.plain, latent.turned), dim=-1)
        if self.is_turned:
            turning, shared = (self._turned(x, packed_seq_params) for x in (turning, shared))
        query = torch.cat((query, turning), dim=-1)
        key = torch.cat((key, shared.expand(-1, -1, key.shape[2], -1)), dim=-1)
        out = self._attention(query, key, value, replace(packed_seq_params, turns=None))
        return self.linear_proj(out)

    def _on_all_heads(self, x: Tensor) -> Tensor:
        """What the heads of all tensor ranks share: all tokens of it, with a gradient that is summed over the ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _turned(self, x: Tensor, packed: PackedDocuments) -> Tensor:
        """x (S, B, heads, turned)."""
        assert packed.turns is not None
        x = turned(x.transpose(0, 1), *packed.turns, kernel=self.rotary, interleaved=self.interleaved)
        return x.transpose(0, 1)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedDocuments) -> Tensor:
        def attend(*inputs: Tensor) -> Tensor:
            return self.core_attention(*inputs, None, packed_seq_params=packed)

        if self.training and self.config.recompute_granularity == "selective":
            return tensor_parallel.checkpoint(attend, False, query, key, value)
        return attend(query, key, value)
