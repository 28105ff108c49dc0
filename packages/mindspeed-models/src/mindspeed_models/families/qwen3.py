"""Qwen3, dense: every query and key head is normalised before the rotary embedding."""

from .arch import Arch
from .decoder import attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """attention_bias, off in the published models, puts a bias on q, k, v and o."""
    return Arch(
        **decoder_fields(settings, "qwen3"), **attention_biases(settings), qk_norm="head", windows=settings.windows()
    )


QWEN3 = Family(name="qwen3", model_types=("qwen3",), arch=arch, rules=decoder_rules)
