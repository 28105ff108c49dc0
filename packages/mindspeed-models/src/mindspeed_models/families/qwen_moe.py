"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: experts in some layers; Qwen2 has one besides that computes every token."""

from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, attention_biases, decoder_fields, decoder_rules, qwen_experts
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
        moe=qwen_experts(settings, fields["num_layers"], shared_ffn=shared, shared_gate=True),
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
        moe=qwen_experts(settings, fields["num_layers"]),
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with experts."""
    return decoder_rules(arch, Names(shared="shared_expert"))


QWEN2_MOE = Family(name="qwen2_moe", model_types=("qwen2_moe",), arch=qwen2, rules=rules)
QWEN3_MOE = Family(name="qwen3_moe", model_types=("qwen3_moe",), arch=qwen3, rules=rules)
