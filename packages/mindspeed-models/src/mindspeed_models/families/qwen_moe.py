"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: experts in some layers; Qwen2 has one besides that computes every token."""

from typing import Any

from ..weights.rule import Rule
from .arch import Arch, Moe
from .decoder import Names, attention_biases, decoder_fields, decoder_rules, expert_settings
from .family import Family
from .settings import Settings


def qwen2(settings: Settings) -> Arch:
    """qkv_bias, on in the published models, is of q, k and v."""
    fields = decoder_fields(settings, "qwen2_moe")
    shared = settings.take("shared_expert_intermediate_size")
    return Arch(
        **fields,
        qkv_bias=bool(settings.take("qkv_bias")),
        windows=settings.windows(),
        moe=_experts(settings, fields["num_layers"], shared_ffn=shared, shared_gate=True),
    )


def qwen3(settings: Settings) -> Arch:
    """attention_bias, off in the published models, puts a bias on q, k, v and o."""
    settings.harmless("use_sliding_window", "max_window_layers")  # transformers has put the first into sliding_window
    fields = decoder_fields(settings, "qwen3_moe")
    return Arch(
        **fields,
        **attention_biases(settings),
        qk_norm="head",
        windows=settings.one_window(fields["num_layers"]),
        moe=_experts(settings, fields["num_layers"]),
    )


def _experts(settings: Settings, num_layers: int, **options: Any) -> Moe | None:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    expert_settings(settings)
    step, without = settings.take("decoder_sparse_step"), settings.take("mlp_only_layers")
    return Moe(
        layers=tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without),
        num_experts=settings.take("num_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=settings.take("moe_intermediate_size"),
        normalised=bool(settings.take("norm_topk_prob")),
        **options,
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with experts."""
    return decoder_rules(arch, Names(shared="shared_expert"))


QWEN2_MOE = Family(name="qwen2_moe", model_types=("qwen2_moe",), arch=qwen2, rules=rules)
QWEN3_MOE = Family(name="qwen3_moe", model_types=("qwen3_moe",), arch=qwen3, rules=rules)
