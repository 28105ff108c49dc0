"""Gemma, Gemma 2 and the text of Gemma 3: norms around 1 + weight, GeGLU, embeddings scaled by the root of their width.

Gemma 2 norms what layers add, too, bounds scores and logits, and has a window in every other layer. Gemma 3 norms queries
and keys in place of the bounds, and turns layers with a window by another base.
"""

import math
from typing import Any

from ..weights.rule import Rule
from .arch import Arch, Rope
from .decoder import Names, attention_biases, decoder_fields, decoder_rules
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


def second(settings: Settings) -> Arch:
    """query_pre_attn_scalar stands where others have the width of a head."""
    return Arch(
        **_later_fields(settings, "gemma2", rope=settings.rope()),
        attention_cap=settings.take("attn_logit_softcapping"),
        logit_cap=settings.take("final_logit_softcapping"),
    )


def third(settings: Settings) -> Arch:
    """The model type of the text alone; multimodal configurations are refused by theirs."""
    settings.harmless("sliding_window_pattern")  # transformers has put it into layer_types
    settings.expect("attn_logit_softcapping", None)
    rope, local = settings.ropes()
    return Arch(
        **_later_fields(settings, "gemma3_text", rope=rope),
        qk_norm="head",
        local_rope=local,
        logit_cap=settings.take("final_logit_softcapping"),
    )


def _later_fields(settings: Settings, family: str, *, rope: Rope) -> dict[str, Any]:
    settings.expect("use_bidirectional_attention", None, False)
    settings.expect("hidden_act", None, _TANH)  # beside hidden_activation
    key = "hidden_activation"
    fields = decoder_fields(settings, family, rope=rope, activation=(_TANH,), activation_key=key)
    return {
        **fields,
        **attention_biases(settings),
        "activation": "geglu",
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(fields["hidden"]),
        "post_norms": True,
        "windows": settings.windows(),
        "attention_scale": settings.take("query_pre_attn_scalar") ** -0.5,
    }


def later_rules(arch: Arch) -> tuple[Rule, ...]:
    """post_attention_layernorm is the norm behind attention here, not the one before the MLP."""
    names = Names(
        pre_mlp="pre_feedforward_layernorm",
        post_attention="post_attention_layernorm",
        post_mlp="post_feedforward_layernorm",
    )
    return decoder_rules(arch, names)


GEMMA = Family(name="gemma", model_types=("gemma",), arch=arch, rules=decoder_rules)
GEMMA2 = Family(name="gemma2", model_types=("gemma2",), arch=second, rules=later_rules)
GEMMA3 = Family(name="gemma3_text", model_types=("gemma3_text",), arch=third, rules=later_rules)
