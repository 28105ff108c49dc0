"""From a family's description of a model to megatron-core model chunks, and their first weights."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import Device
from mindspeed_parallel.megatron.config import DecoderConfig
from mindspeed_parallel.megatron.decoder import Decoder
from mindspeed_parallel.megatron.groups import Groups, communication_options
from mindspeed_parallel.megatron.layers import LayerKind, Norm, decoder_layer
from mindspeed_parallel.megatron.rotary import DynamicRotary, LongRotary, Rotary
from torch import Tensor
from torch.nn import functional

from ..families.arch import Arch, Moe, Rope
from ..weights.shards import Box
from ..weights.source import Source
from .geometry import VOCABULARY, local_pieces, unwrapped


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a recipe says about building a model."""

    dtype: torch.dtype
    recompute: Literal["none", "selective", "full"] = "none"
    dropout: float | None = None  # of attention, and of what layers add if the model has it; None: the model's own
    layers: tuple[int, ...] | None = None  # layers of each stage; None: evenly
    max_length: int = 0


# Fields of DecoderConfig that an Arch has under the same name.
_ALIKE = (
    *("windows", "unturned", "activation", "norm_offset", "norm_rounds_last"),
    *("embedding_scale", "residual_scale", "head_scale", "attention_cap", "logit_cap"),
    *("activation_options", "has_sinks", "latent", "delta", "ssm"),
)


def padded_vocabulary(num_tokens: int, tensor: int) -> int:
    """Rows of the embedding when it is cut ``tensor`` ways."""
    return -(-num_tokens // tensor) * tensor


def build(arch: Arch, *, groups: Groups, kernels: Kernels, device: Device, options: BuildOptions) -> list[Decoder]:
    """This rank's chunks of the model, on ``device``, their weights not yet filled."""
    config = decoder_config(arch, groups=groups, kernels=kernels, device=device, options=options)
    layout, pg = groups.layout, groups.pg
    chunks = []
    for stage in range(layout.virtual):
        vp_stage = stage if layout.virtual > 1 else None
        first = groups.is_first_stage and stage == 0
        last = groups.is_last_stage and stage == layout.virtual - 1
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=groups.pipeline_rank)
        offset = get_transformer_layer_offset(config, vp_stage, groups.pipeline_rank)
        block = TransformerBlockSubmodules(
            layer_specs=[_layer(arch, config, pg, layer) for layer in range(offset, offset + num_layers)],
            layer_norm=Norm,  # pyright: ignore[reportArgumentType]  a class does as well
        )
        chunk = Decoder(
            config,
            block,  # pyright: ignore[reportArgumentType]  a block's layers are a spec too
            vocab_size=padded_vocabulary(arch.vocab, layout.tensor),
            max_sequence_length=options.max_length or arch.max_positions,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=arch.tied,
            pg_collection=pg,
            vp_stage=vp_stage,
        )
        chunk.use_rotary(*(None if rope is None else rotary(arch, rope) for rope in (arch.rope, arch.local_rope)))
        if first:
            chunk.embedding.embedding_dropout.p = 0.0  # megatron-core drops embeddings with what layers add
        _mark_cuts(chunk)
        chunks.append(chunk.to(device.torch_device))
    return chunks


def _layer(arch: Arch, config: DecoderConfig, pg: ProcessGroupCollection, layer: int) -> ModuleSpec:
    kind = LayerKind(
        mixer=arch.mixer(layer),
        mixer_bias=arch.ssm is not None and arch.ssm.bias,
        qk_norm=arch.qk_norm,
        qkv_bias=arch.qkv_bias,
        o_bias=arch.o_bias,
        mlp_bias=arch.mlp_bias,
        pre_norms=arch.pre_norms,
        mlp="experts" if layer in arch.expert_layers else "mlp" if layer in arch.mlp_layers else "none",
        post_norms=arch.post_norms,
    )
    return decoder_layer(kind, config, pg)


def rotary(arch: Arch, rope: Rope) -> Rotary:
    """A rotary embedding of the model, on the CPU."""
    width = arch.turned
    short = torch.tensor(rope.inverse_frequencies(width), dtype=torch.float32)
    if rope.kind == "dynamic":
        return DynamicRotary(short, rope.factor, rope.original_max_positions)
    if rope.kind == "longrope":
        long = torch.tensor(rope.inverse_frequencies(width, long=True), dtype=torch.float32)
        return LongRotary(short, long, rope.attention_factor, rope.original_max_positions)
    return Rotary(short, rope.attention_factor)


def decoder_config(
    arch: Arch, *, groups: Groups, kernels: Kernels, device: Device, options: BuildOptions
) -> DecoderConfig:
    """megatron-core's configuration of the model in this layout."""
    layout = groups.layout
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[options.recompute]
    return DecoderConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden,
        # Without attention or MLPs, numbers that megatron-core accepts and nobody reads.
        num_attention_heads=arch.num_heads or layout.tensor,
        num_query_groups=arch.num_kv_heads or layout.tensor,
        kv_channels=arch.head_dim or 1,
        ffn_hidden_size=arch.ffn or 1,
        attention_output_gate=arch.output_gate,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,  # not asked: the spec has the activation
        add_bias_linear=False,  # each linear layer is told by the spec
        use_te_activation_func=True,  # take the activation from the spec
        qk_layernorm=arch.qk_norm == "head",  # sums the gradients of norms that tensor ranks hold alike
        attention_dropout=arch.attention_dropout if options.dropout is None else options.dropout,
        hidden_dropout=arch.residual_dropout
        if options.dropout is None or not arch.residual_dropout
        else options.dropout,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        pipeline_model_parallel_layout=None if options.layers is None else _stages(options.layers),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.sequence,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        kernels=kernels,
        softmax_scale=arch.attention_scale,
        **_own_fields(arch),
        **(_expert_fields(arch.moe) if arch.moe is not None and arch.expert_layers else {}),
        **communication_options(layout, device),
        **recompute,
    )


def _own_fields(arch: Arch) -> dict[str, Any]:
    """What megatron-core's configuration does not know, but for the experts."""
    return {
        "interleaved": arch.rope is not None and arch.rope.interleaved,
        **{name: getattr(arch, name) for name in _ALIKE},
        "num_tokens": arch.vocab,
    }


def _expert_fields(moe: Moe) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_router_topk": moe.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # not asked: the router is ours; another value is refused for one expert a token
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "choice": moe.choice(),
        "router_has_bias": moe.bias,
        "router_is_wide": moe.wide,
        "router_is_biased": moe.biased,
        "experts_are_biased": moe.biased,
    }


def load_hf(chunks: Sequence[torch.nn.Module], source: Source, *, num_tokens: int, pg: ProcessGroupCollection) -> None:
    """Fill this rank's weights from Hugging Face files or a checkpoint, reading no more than this rank needs."""
    _fill(chunks, source.read, num_tokens, pg)


def init_weights(
    chunks: Sequence[torch.nn.Module], *, std: float, seed: int, num_tokens: int, pg: ProcessGroupCollection
) -> None:
    """Random weights: normal with deviation ``std``, neutral norms, biases 0. The same whole model in every layout."""
    unit = 1.0 - unwrapped(chunks[0]).config.norm_offset  # pyright: ignore[reportAttributeAccessIssue]  of DecoderConfig

    def draw(box: Box) -> Tensor:
        if (known := _known(box)) is not None:
            return known
        if len(box.whole) == 1:
            return torch.full(box.shape, unit)
        if len(box.whole) == 2 or box.key.endswith(_CONVOLUTION):
            return drawn(box.key, box.whole)[_slices(box)]
        first, *rest = _slices(box)  # a stack: each of its matrices alone
        parts = [drawn(f"{box.key} {number}", box.whole[1:])[tuple(rest)] for number in range(first.start, first.stop)]
        return torch.stack(parts)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        deviation = (3 * shape[-1]) ** -0.5 if name.endswith(_CONVOLUTION) else std  # as PyTorch draws convolutions
        return torch.empty(shape, dtype=torch.float32).normal_(0.0, deviation, generator=generator)

    _fill(chunks, draw, num_tokens, pg)


_CONVOLUTION = "conv1d.weight"


def _known(box: Box) -> Tensor | None:
    """First values that are not drawn, and not those of a norm: of biases, and of the numbers of mixers with a state."""
    kind = box.key.rpartition(".")[2]
    if kind in ("A_log", "dt_bias"):  # Mamba (Gu and Dao, 2023): decays from 1 to 16, steps from 0.001 to 0.1
        share = (torch.arange(box.whole[0], dtype=torch.float32) + 0.5) / box.whole[0]
        step = 0.001 * 100**share
        values = (1 + 15 * share).log() if kind == "A_log" else step.expm1().log()  # the inverse of softplus
        return values[_slices(box)]
    if kind.endswith("bias") or kind == "softmax_offset":
        return torch.zeros(box.shape)
    return torch.ones(box.shape) if kind in ("D", "plain_weight") else None


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


def _mark_cuts(chunk: torch.nn.Module) -> None:
    """Say of every weight that tensor ranks share out that it is shared out.

    megatron-core does so while it draws initial weights, and not when drawing is switched off. Without the marks the
    gradient norm counts the weights of tensor rank 0 alone, and clipping is wrong, without an error.
    """
    for module in chunk.modules():
        axis = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}.get(_kind(module))
        if axis is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, axis, 1)


def _kind(module: torch.nn.Module) -> type | None:
    kinds = (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)
    return next((kind for kind in kinds if isinstance(module, kind)), None)


def _fill(chunks: Sequence[torch.nn.Module], read: object, num_tokens: int, pg: ProcessGroupCollection) -> None:
    with torch.no_grad():
        for parameter, pieces in local_pieces(chunks, num_tokens, pg).items():
            if not pieces or any(piece.box.key in VOCABULARY for piece in pieces):
                parameter.zero_()  # rows that pad the vocabulary
            for piece in pieces:
                piece.tensor.copy_(read(piece.box))  # type: ignore[operator]


def _stages(layers: tuple[int, ...]) -> list[list[str]]:
    stages = [["decoder"] * number for number in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
