"""gpt-oss: attention with sinks and a window in every other layer, experts with biases and a clamped activation."""

from ..weights.rule import Rule
from .arch import Arch, Moe
from .decoder import Names, attention_biases, decoder_fields, decoder_rules, expert_settings
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """intermediate_size is the width of an expert; there is no other MLP."""
    settings.harmless("experts_per_token", "initial_context_length")  # what num_experts_per_tok and rope_parameters say
    fields = decoder_fields(settings, "gpt_oss")
    expert_settings(settings)
    moe = Moe(
        layers=tuple(range(fields["num_layers"])),
        num_experts=settings.take("num_local_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=fields["ffn"],
        biased=True,
    )
    options = (("limit", settings.take("swiglu_limit")), ("slope", settings.take("swiglu_alpha")))
    return Arch(
        **fields,
        **attention_biases(settings),
        activation="clamped_swiglu",
        activation_options=options,
        norm_rounds_last=True,
        has_sinks=True,
        windows=settings.windows(),
        moe=moe,
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """All experts of a layer stand in one tensor."""
    return decoder_rules(arch, Names(router="router", expert=None))


GPT_OSS = Family(name="gpt_oss", model_types=("gpt_oss",), arch=arch, rules=rules)
