"""Layers that megatron-core builds by spec, and a decoder that knows documents and positions.

Letters: S sequence, B batch, H heads of this rank, K kv heads of this rank, D head dim.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.ops.routing import Choice
from torch import Tensor, nn
from torch.nn import functional

from .moe import moe
from .rotary import Rotary


@dataclass
class DecoderConfig(TransformerConfig):
    """megatron-core's configuration and what our layers need besides."""

    kernels: Kernels | None = None
    windows: tuple[
        int | None, ...
    ] = ()  # sliding window of every layer of the whole model, itself counted; empty: none
    unturned: tuple[int, ...] = ()  # layers of the whole model without rotary embedding
    interleaved: bool = False  # rotary pairs are neighbours (2 i, 2 i + 1), not halves (i, i + D / 2)
    activation: Literal["swiglu", "geglu"] = "swiglu"  # of the gated MLP
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0  # what the embedding of a token is multiplied by
    choice: Choice | None = None  # how experts are chosen, where there are any
    router_has_bias: bool = False  # a number for each expert is added to its score in choosing alone
    router_is_wide: bool = False  # the router computes in float32 at least
    num_tokens: int = 0  # true size of the vocabulary, without the rows that pad it


@dataclass
class PackedDocuments(PackedSeqParams):
    """What attention must know of each token, in the form in which megatron-core hands such things to it.

    ``documents`` (B, S): attention stays inside equal numbers. None: causal attention is enough.
    ``turns``: cosines and sines (B, S, 1, R) of the rotary angles, the first R <= D of each head; the decoder adds them.
    """

    documents: Tensor | None = None
    turns: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, documents: Tensor | None, length: int) -> "PackedDocuments | None":
        """None where nothing has to be kept apart."""
        if documents is None:
            return None
        return cls(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, documents=documents)


class Norm(nn.Module):
    """RMSNorm through the chosen kernel. Its weight is marked for the gradient sum that sequence parallelism needs."""

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm" and config.kernels is not None
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]  read by megatron-core
        self.eps = eps
        self.offset = config.norm_offset
        self.kernel = config.kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) -> the same shape."""
        if not self.offset:
            return self.kernel(x, self.weight, self.eps)
        # Gemma multiplies before it rounds: 1 + weight in bfloat16 would lose most of the weight.
        return self.kernel(x.float(), self.offset + self.weight.float(), self.eps).to(x.dtype)


class CoreAttention(nn.Module):
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
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and config.kernels is not None
        self.kernel, self.rotary = config.kernels.attention, config.kernels.rotary
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
        """query (S, B, H, D); key, value (S, B, K, D) -> (S, B, H * D)."""
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, PackedDocuments) and packed_seq_params.turns is not None
        documents, turns = packed_seq_params.documents, packed_seq_params.turns
        dropout = self.dropout if self.training else 0.0
        # Each tensor rank drops other elements: its heads are its own.
        fork = tensor_parallel.get_cuda_rng_tracker().fork() if dropout > 0 else contextlib.nullcontext()  # pyright: ignore[reportOptionalMemberAccess]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if self.is_turned:
            q, k = self._turned(q, *turns), self._turned(k, *turns)
        with fork:
            out = self.kernel(q, k, v, documents=documents, window=self.window, scale=self.scale, dropout=dropout)
        return out.transpose(0, 1).flatten(2)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, S, heads, D) with its first R dimensions turned.   cos, sin (B, S, 1, R).

        Neighbouring pairs come out as halves: queries and keys alike, so that their products are the same.
        """
        width = cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        if self.interleaved:
            turned = turned.unflatten(-1, (width // 2, 2)).transpose(-1, -2).flatten(-2)
        turned = self.rotary(turned, cos, sin)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class NormedAdd(nn.Module):
    """Adds the norm of what attention or the MLP computed to the residual stream (Ding et al., 2021: sandwich norm).

    Stands where megatron-core has a function that adds without a norm.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that adds; megatron-core asks for it first."""
        return partial(self._added, training)

    def _added(self, training: bool, out: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        computed, bias = out
        normed = self.norm(computed if bias is None else computed + bias)
        return residual + functional.dropout(normed, dropout, training)


class GatedActivation(MegatronModule):
    """The gated activation through the chosen kernel."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.kernels is not None
        self.kernel = getattr(config.kernels, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., 2 N), the gate first -> (..., N)."""
        return self.kernel(x)


class SpecProvider(LocalSpecProvider):
    """The layers of this project, where megatron-core lets a backend choose."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return CoreAttention

    def activation_func(self) -> type:
        return GatedActivation


def decoder_layer(
    *,
    qk_norm: bool,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    has_experts: bool = False,
    post_norms: DecoderConfig | None = None,
    provider: BackendSpecProvider | None = None,
) -> ModuleSpec:
    """A pre-norm decoder layer with a gated MLP, or with experts.

    ``post_norms``: the configuration of norms behind attention and MLP.
    """
    provider = provider or SpecProvider()
    norm = provider.layer_norm(rms_norm=True)
    head_norm = provider.layer_norm(rms_norm=True, for_qk=True) if qk_norm else IdentityOp
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    attention = SelfAttentionSubmodules(
        linear_qkv=_biased(column, qkv_bias),
        core_attention=provider.core_attention(),
        linear_proj=_biased(row, o_bias),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    add: Any = get_bias_dropout_add
    if post_norms is not None:
        add = ModuleSpec(module=NormedAdd, params={"config": post_norms})
    # The names that megatron-core's own layers have in checkpoints, fused with Transformer Engine or not.
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "self_attn_bda.norm.": "post_self_attn_layernorm.",
        "mlp_bda.norm.": "post_mlp_layernorm.",
    }
    if has_experts:
        mlp = moe(provider, partial(_biased, has_bias=False))
    else:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        submodules = MLPSubmodules(
            linear_fc1=_biased(column, mlp_bias),
            linear_fc2=_biased(row, mlp_bias),
            activation_func=provider.activation_func(),
        )
        mlp = ModuleSpec(module=MLP, submodules=submodules)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _biased(linear: type, has_bias: bool) -> type:
    """``linear`` with or without a bias, whatever its layer asks: megatron-core has one switch for all of them."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": has_bias})

    Biased.__name__ = Biased.__qualname__ = linear.__name__
    return Biased


class Decoder(GPTModel):
    """GPTModel with explicit positions and a vocabulary whose padding stays out of the softmax."""

    def __init__(self, config: DecoderConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if self.pre_process and config.embedding_scale != 1:
            # GPTModel makes its embedding itself, by name.
            self.embedding.register_forward_hook(partial(_scaled, config.embedding_scale))

    def use_rotary(self, rotary: Rotary) -> None:
        """Take the angles from ``rotary``."""
        self.rotary_pos_emb = rotary

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        *arguments: Any,
        packed_seq_params: PackedDocuments | None = None,
        **options: Any,
    ) -> Tensor:
        """Losses (B, S) when ``labels`` are given, else logits (B, S, V of this rank).

        input_ids, position_ids (B, S). Stages of a pipeline other than the last return hidden states.
        """
        packed = PackedDocuments(
            qkv_format="sbhd",
            documents=None if packed_seq_params is None else packed_seq_params.documents,
            turns=self.rotary_pos_emb.turns(position_ids, self.config.params_dtype),
        )
        return super().forward(input_ids, position_ids, attention_mask, *arguments, packed_seq_params=packed, **options)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of every token.   labels (B, S), logits (S, B, V of this rank) -> (B, S)."""
        return super().compute_language_model_loss(labels.clamp(min=0), self._without_padding(logits))

    def _without_padding(self, logits: Tensor) -> Tensor:
        local = logits.shape[-1]
        true = self.config.num_tokens - local * self.pg_collection.tp.rank()  # pyright: ignore[reportAttributeAccessIssue]  of DecoderConfig
        if true >= local:
            return logits
        padding = torch.arange(local, device=logits.device) >= true
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _scaled(scale: float, module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
    """What the embedding gives, times ``scale`` as a number of its dtype."""
    return embedded * torch.tensor(scale, dtype=embedded.dtype).item()
