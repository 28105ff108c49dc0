"""Mixtral: Mistral with experts in every layer (Jiang et al., 2024)."""

from ..weights.rule import Rule
from .arch import Arch, Moe
from .decoder import Names, decoder_fields, decoder_rules, expert_settings
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """intermediate_size is the width of an expert; there is no other MLP."""
    fields = decoder_fields(settings, "mixtral")
    settings.expect("router_jitter_noise", 0.0)  # only drawn in training
    expert_settings(settings)
    moe = Moe(
        layers=tuple(range(fields["num_layers"])),
        num_experts=settings.take("num_local_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=fields["ffn"],
    )
    return Arch(**fields, windows=settings.one_window(fields["num_layers"]), moe=moe)


def rules(arch: Arch) -> tuple[Rule, ...]:
    """w1 is the gate, w3 what it multiplies, w2 leads back."""
    return decoder_rules(arch, Names(mlp="block_sparse_moe", expert=("w1", "w3", "w2")))


MIXTRAL = Family(name="mixtral", model_types=("mixtral",), arch=arch, rules=rules)
