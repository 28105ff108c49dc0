"""InternLM3: Llama's graph, its biases under two names of their own."""

from .arch import Arch
from .decoder import attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """One switch for all biases; transformers refuses configurations in which the two differ."""
    settings.harmless("qkv_bias", "bias")  # transformers has put them into attention_bias and mlp_bias
    return Arch(
        **decoder_fields(settings, "internlm3"),
        **attention_biases(settings),
        mlp_bias=bool(settings.take("mlp_bias")),
    )


INTERNLM3 = Family(name="internlm3", model_types=("internlm3",), arch=arch, rules=decoder_rules)
