"""GLM-4 (glm) and GLM-4-0414, Z1 (glm4): a share of each head turned in neighbouring pairs; glm4 norms what layers add."""

from functools import partial

from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings, *, family: str) -> Arch:
    """attention_bias puts a bias on q, k and v, never on o."""
    rope = settings.rope(partial=True, interleaved=True)
    return Arch(
        **decoder_fields(settings, family, rope=rope),
        qkv_bias=bool(settings.take("attention_bias")),
        post_norms=family == "glm4",
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with gate and up in one matrix."""
    return decoder_rules(arch, Names(gate_up=("gate_up_proj",)))


GLM = Family(name="glm", model_types=("glm",), arch=partial(arch, family="glm"), rules=rules)
GLM4 = Family(name="glm4", model_types=("glm4",), arch=partial(arch, family="glm4"), rules=rules)
