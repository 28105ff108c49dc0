"""MiniCPM3: attention over latents; embeddings, what layers add, and what goes into the output layer are scaled."""

import math

from .arch import Arch
from .decoder import decoder_rules
from .deepseek import latent_fields
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """Null for a scale means none; transformers has put in what makes it one."""
    fields = latent_fields(settings, "minicpm3", interleaved=False)
    return Arch(
        **fields,
        mlp_bias=bool(settings.take("mlp_bias")),
        embedding_scale=settings.take("scale_emb"),
        residual_scale=settings.take("scale_depth") / math.sqrt(fields["num_layers"]),
        head_scale=settings.take("dim_model_base") / fields["hidden"],
    )


MINICPM3 = Family(name="minicpm3", model_types=("minicpm3",), arch=arch, rules=decoder_rules)
