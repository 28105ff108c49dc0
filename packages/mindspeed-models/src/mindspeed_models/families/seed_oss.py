"""Seed-OSS: biases on q, k and v, and what the layers add is dropped in part."""

from .arch import Arch
from .decoder import decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """attention_bias is of q, k and v alone; o has a key of its own."""
    settings.harmless("pretraining_tp")  # without effect in transformers 5
    return Arch(
        **decoder_fields(settings, "seed_oss"),
        qkv_bias=bool(settings.take("attention_bias")),
        o_bias=bool(settings.take("attention_out_bias")),
        mlp_bias=bool(settings.take("mlp_bias")),
        residual_dropout=settings.take("residual_dropout"),
    )


SEED_OSS = Family(name="seed_oss", model_types=("seed_oss",), arch=arch, rules=decoder_rules)
