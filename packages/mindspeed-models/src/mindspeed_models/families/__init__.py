"""Model families: one file an architecture."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ..errors import ModelError
from .arch import Arch, Moe, Rope
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .glm4 import GLM, GLM4
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .internlm3 import INTERNLM3
from .llama import LLAMA
from .mamba import BAMBA, MAMBA2
from .minicpm3 import MINICPM3
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_next import QWEN3_NEXT
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .seed_oss import SEED_OSS
from .settings import Settings
from .smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    *(
        GEMMA,
        GEMMA2,
        GEMMA3,
        GLM,
        GLM4,
        INTERNLM3,
        LLAMA,
        MINICPM3,
        MISTRAL,
        OLMO2,
        PHI3,
        QWEN2,
        QWEN3,
        SEED_OSS,
        SMOLLM3,
    ),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE),
    *(BAMBA, MAMBA2, QWEN3_NEXT),
)

__all__ = ["FAMILIES", "Arch", "Family", "Moe", "Rope", "Settings", "describe", "families"]


def families() -> dict[str, Family]:
    """Every family by model type: ours, and those of other distributions (entry points ``mindspeed.families``)."""
    found = (*FAMILIES, *(point.load() for point in entry_points(group="mindspeed.families")))
    return {model_type: family for family in found for model_type in family.model_types}


def describe(config: Mapping[str, Any]) -> tuple[Family, Arch]:
    """Family and sizes of a Hugging Face configuration. ModelError for what is not supported, by name."""
    table = families()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in table:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not supported; there are {', '.join(sorted(table))}"
        )
    family = table[model_type]
    settings = Settings(config)
    arch = family.arch(settings)
    settings.finish()
    return family, arch
