"""Qwen1.5, Qwen2, Qwen2.5 and what shares their graph: QwQ, DeepSeek-R1-Distill-Qwen."""

from .arch import Arch
from .decoder import decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """q, k and v always have a bias, o never."""
    settings.expect("use_mrope", False)  # DeepSeek-R1-Distill-Qwen spells it out
    return Arch(**decoder_fields(settings, "qwen2"), qkv_bias=True, windows=settings.windows())


QWEN2 = Family(name="qwen2", model_types=("qwen2",), arch=arch, rules=decoder_rules)
