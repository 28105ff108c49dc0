"""Llama 1 to 3.3 and what shares its graph: Yi, CodeLlama, DeepSeek-R1-Distill-Llama, SmolLM2."""

from .arch import Arch
from .decoder import attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """attention_bias puts a bias on q, k, v and o; mlp_bias on gate, up and down."""
    settings.harmless("pretraining_tp")  # without effect in transformers 5
    settings.expect("rope_interleaved", False)
    return Arch(
        **decoder_fields(settings, "llama"),
        **attention_biases(settings),
        mlp_bias=bool(settings.take("mlp_bias")),
    )


LLAMA = Family(name="llama", model_types=("llama",), arch=arch, rules=decoder_rules)
