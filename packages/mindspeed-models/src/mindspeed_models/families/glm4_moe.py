"""GLM-4.5, GLM-4.6: experts chosen by sigmoid scores and a bias that balances them; a share of each head is turned."""

from .arch import Arch
from .decoder import decoder_fields, decoder_rules, deepseek_experts
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """attention_bias puts a bias on q, k and v, never on o."""
    fields = decoder_fields(settings, "glm4_moe", rope=settings.rope(partial=True))
    return Arch(
        **fields,
        qkv_bias=bool(settings.take("attention_bias")),
        qk_norm="head" if settings.take("use_qk_norm") else "none",
        moe=deepseek_experts(settings, fields["num_layers"]),
    )


GLM4_MOE = Family(name="glm4_moe", model_types=("glm4_moe",), arch=arch, rules=decoder_rules)
