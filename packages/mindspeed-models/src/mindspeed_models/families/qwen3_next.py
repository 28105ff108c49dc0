"""Qwen3-Next: gated delta networks in three of four layers, gated attention in the others, experts behind both."""

from mindspeed_parallel.mixers import Delta

from ..errors import ModelError
from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, attention_biases, decoder_fields, decoder_rules, qwen_experts
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """Norms are around 1 + weight, but for the one behind a delta network."""
    settings.harmless("full_attention_interval")  # transformers has put it into layer_types
    fields = decoder_fields(settings, "qwen3_next", rope=settings.rope(partial=True))
    kinds = settings.take("layer_types")
    if strange := set(kinds) - {"full_attention", "linear_attention"}:
        raise ModelError(f"config.json: layer_types has {min(strange)!r}; only full_attention and linear_attention")
    shared = settings.take("shared_expert_intermediate_size")
    return Arch(
        **fields,
        **attention_biases(settings),
        qk_norm="head",
        norm_offset=1.0,
        output_gate=True,
        recurrent=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        delta=Delta(
            key_heads=settings.take("linear_num_key_heads"),
            value_heads=settings.take("linear_num_value_heads"),
            key_dim=settings.take("linear_key_head_dim"),
            value_dim=settings.take("linear_value_head_dim"),
            conv=settings.take("linear_conv_kernel_dim"),
        ),
        moe=qwen_experts(settings, fields["num_layers"], shared_ffn=shared, shared_gate=True),
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """The expert that computes every token is alone."""
    return decoder_rules(arch, Names(shared="shared_expert"))


QWEN3_NEXT = Family(name="qwen3_next", model_types=("qwen3_next",), arch=arch, rules=rules)
