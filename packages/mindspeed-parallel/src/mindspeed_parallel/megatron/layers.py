"""Decoder layers that megatron-core builds by spec, and their parts.   Letters: S sequence, B batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from .attention import CoreAttention, LatentAttention, LatentSubmodules
from .config import DecoderConfig
from .cut import Cut
from .moe import moe
from .recurrent import DeltaNet, Mamba, RecurrentSubmodules


class Norm(nn.Module):
    """RMSNorm through the chosen kernel. Its weight is marked for the gradient sum that sequence parallelism needs."""

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm" and config.kernels is not None
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]  read by megatron-core
        self.eps = eps
        self.offset = config.norm_offset
        self.rounds_last = config.norm_rounds_last or bool(config.norm_offset)
        self.kernel = config.kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) -> the same shape."""
        if not self.rounds_last:
            return self.kernel(x, self.weight, self.eps)
        # Gemma multiplies before it rounds: 1 + weight in bfloat16 would lose most of the weight.
        return self.kernel(x.float(), self.offset + self.weight.float(), self.eps).to(x.dtype)


class WideNorm(Cut):
    """RMSNorm over all heads together (OLMo 2, 2024), of which each tensor rank has some.

    Stands where megatron-core norms each head alone.
    """

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float, *, heads: int, group: ProcessGroup) -> None:
        """``heads``: of the whole model, of width ``hidden_size`` each. ``group``: the tensor ranks that share them out."""
        super().__init__(group)
        self.width, self.eps = heads * hidden_size, eps
        self.weight = self.part(self.width, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (S, B, H, D) -> the same shape."""
        wide = x.flatten(2).float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=self.group)
        # What comes back from the heads of every rank is summed, too.
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normed * self.weight.float()).to(x.dtype).view_as(x)


class Add(nn.Module):
    """Adds what attention or the MLP computed to the residual stream: its norm, or a multiple of it.

    Stands where megatron-core has a function that does neither. Norms there are sandwich norms (Ding et al., 2021).
    """

    def __init__(self, config: DecoderConfig, *, has_norm: bool) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon) if has_norm else None
        self.scale = config.residual_scale

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that adds; megatron-core asks for it first."""
        return partial(self._added, training)

    def _added(self, training: bool, out: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        computed, bias = out
        computed = computed if bias is None else computed + bias
        if self.norm is not None:
            computed = self.norm(computed)
        if self.scale != 1:
            computed = computed * self.scale
        return residual + functional.dropout(computed, dropout, training)


class GatedActivation(MegatronModule):
    """The gated activation through the chosen kernel."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.kernels is not None
        self.kernel = partial(getattr(config.kernels, config.activation), **dict(config.activation_options))

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


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Of what a decoder layer is made."""

    mixer: Literal["attention", "latent", "delta", "mamba"] = "attention"  # what lets tokens see one another
    mixer_bias: bool = False  # of the projections of delta and mamba
    qk_norm: Literal["none", "head", "wide"] = "none"  # of queries and keys: each head alone, or all together
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp: Literal["mlp", "experts", "none"] = "mlp"
    pre_norms: bool = True  # norms before mixer and MLP
    post_norms: bool = False  # norms behind them


def decoder_layer(
    kind: LayerKind, config: DecoderConfig, pg: ProcessGroupCollection, provider: BackendSpecProvider | None = None
) -> ModuleSpec:
    """A decoder layer of ``kind`` in the groups ``pg``."""
    provider = provider or SpecProvider()
    norm = provider.layer_norm(rms_norm=True) if kind.pre_norms else IdentityOp
    add: Any = get_bias_dropout_add
    if kind.post_norms or config.residual_scale != 1:
        add = ModuleSpec(module=Add, params={"config": config, "has_norm": kind.post_norms})
    mixer, mixer_names = _mixer(kind, config, pg, provider)
    mlp, mlp_names = {"mlp": _mlp, "experts": _experts, "none": _nothing}[kind.mlp](kind, provider)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=mixer,
            self_attn_bda=add,
            pre_mlp_layernorm=IdentityOp if kind.mlp == "none" else norm,
            mlp=mlp,
            mlp_bda=IdentityFuncOp if kind.mlp == "none" else add,
            # The names that megatron-core's own layers have in checkpoints, where Transformer Engine fuses them.
            sharded_state_dict_keys_map={
                "self_attn_bda.norm.": "post_self_attn_layernorm.",
                "mlp_bda.norm.": "post_mlp_layernorm.",
                **mixer_names,
                **mlp_names,
            },
        ),
    )


_Part = tuple[Any, dict[str, str]]  # a part of a layer, and its names in checkpoints where they are others


def _mixer(kind: LayerKind, config: DecoderConfig, pg: ProcessGroupCollection, provider: BackendSpecProvider) -> _Part:
    if kind.mixer == "attention":
        return _attention(kind, config, pg, provider)
    if kind.mixer == "latent":
        return _latent_attention(kind, provider)
    submodules = RecurrentSubmodules(
        column=_biased(provider.column_parallel_linear(), kind.mixer_bias),
        row=_biased(provider.row_parallel_linear(), kind.mixer_bias),
    )
    module = DeltaNet if kind.mixer == "delta" else Mamba
    names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    return ModuleSpec(module=module, submodules=submodules), names


def _attention(
    kind: LayerKind, config: DecoderConfig, pg: ProcessGroupCollection, provider: BackendSpecProvider
) -> _Part:
    norms: list[Any] = [IdentityOp, IdentityOp]
    if kind.qk_norm == "head":
        norms = [provider.layer_norm(rms_norm=True, for_qk=True)] * 2
    if kind.qk_norm == "wide":
        heads = (config.num_attention_heads, config.num_query_groups)
        norms = [ModuleSpec(module=WideNorm, params={"heads": number, "group": pg.tp}) for number in heads]
    submodules = SelfAttentionSubmodules(
        linear_qkv=_biased(provider.column_parallel_linear(), kind.qkv_bias),
        core_attention=provider.core_attention(),
        linear_proj=_biased(provider.row_parallel_linear(), kind.o_bias),
        q_layernorm=norms[0],
        k_layernorm=norms[1],
    )
    spec = ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
    return spec, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _latent_attention(kind: LayerKind, provider: BackendSpecProvider) -> _Part:
    submodules = LatentSubmodules(
        column=_biased(provider.column_parallel_linear(), has_bias=False),
        row=_biased(provider.row_parallel_linear(), kind.o_bias),
        norm=provider.layer_norm(rms_norm=True),
        core_attention=provider.core_attention(),
    )
    names = {f"self_attention.{x}_norm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    return ModuleSpec(module=LatentAttention, submodules=submodules), names


def _mlp(kind: LayerKind, provider: BackendSpecProvider) -> _Part:
    submodules = MLPSubmodules(
        linear_fc1=_biased(provider.column_parallel_linear(), kind.mlp_bias),
        linear_fc2=_biased(provider.row_parallel_linear(), kind.mlp_bias),
        activation_func=provider.activation_func(),
    )
    return ModuleSpec(module=MLP, submodules=submodules), {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _nothing(kind: LayerKind, provider: BackendSpecProvider) -> _Part:
    return IdentityOp, {}


def _experts(kind: LayerKind, provider: BackendSpecProvider) -> _Part:
    return moe(provider, partial(_biased, has_bias=False)), {}


def _biased(linear: type, has_bias: bool) -> type:
    """``linear`` with or without a bias, whatever its layer asks: megatron-core has one switch for all of them."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": has_bias})

    Biased.__name__ = Biased.__qualname__ = linear.__name__
    return Biased
