"""Gemma: norms around 1 + weight, GeGLU, embeddings scaled by the root of their width."""

import math

from .arch import Arch
from .decoder import attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings

_TANH = "gelu_pytorch_tanh"


def arch(settings: Settings) -> Arch:
    """attention_bias, off in the published models, puts a bias on q, k, v and o."""
    settings.expect("hidden_activation", None, _TANH)  # what the first configurations said beside hidden_act
    settings.expect("use_bidirectional_attention", None, False)
    fields = decoder_fields(settings, "gemma", activation=(_TANH,))
    return Arch(
        **fields,
        **attention_biases(settings),
        activation="geglu",
        norm_offset=1.0,
        embedding_scale=math.sqrt(fields["hidden"]),
    )


GEMMA = Family(name="gemma", model_types=("gemma",), arch=arch, rules=decoder_rules)
