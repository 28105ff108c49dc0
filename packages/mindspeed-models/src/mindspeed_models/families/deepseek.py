"""DeepSeek-V2, DeepSeek-V3, R1 and Kimi-K2: attention over latents, and experts with shared ones beside them."""

import math
from typing import Any

from mindspeed_parallel.mixers import Latent

from .arch import Arch, Moe
from .decoder import decoder_fields, decoder_rules, deepseek_experts, expert_settings
from .family import Family
from .settings import Settings

_NORM_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says


def v3(settings: Settings) -> Arch:
    """attention_bias, off in the published models, puts a bias on o and on the ways to the latents."""
    settings.expect("ep_size", None, 1)
    settings.expect("scoring_func", None, "sigmoid")
    settings.expect("topk_method", None, "noaux_tc")
    settings.expect("moe_layer_freq", None, 1)
    fields = latent_fields(settings, "deepseek_v3", interleaved=bool(settings.take("rope_interleave")))
    return Arch(**fields, moe=deepseek_experts(settings, fields["num_layers"]))


def v2(settings: Settings) -> Arch:
    """Softmax scores that are not normalised, and groups that are worth their best score."""
    settings.expect("scoring_func", None, "softmax")
    settings.expect("moe_layer_freq", None, 1)
    settings.expect("norm_topk_prob", None, False)  # transformers does not read it
    fields = latent_fields(settings, "deepseek_v2", interleaved=True)
    expert_settings(settings)
    settings.harmless("aux_loss_alpha", "seq_aux", "ep_size")  # of training by other code
    ffn = settings.take("moe_intermediate_size")
    grouped = settings.expect("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups = {"groups": settings.take("n_group"), "top_groups": settings.take("topk_group")}
    moe = Moe(
        layers=tuple(range(settings.take("first_k_dense_replace"), fields["num_layers"])),
        num_experts=settings.take("n_routed_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * settings.take("n_shared_experts"),
        normalised=False,
        scale=settings.take("routed_scaling_factor"),
        group_score="best",
        wide=True,
        **(groups if grouped else {}),
    )
    settings.expect("mlp_bias", False)
    return Arch(**fields, moe=moe)


def latent_fields(settings: Settings, family: str, *, interleaved: bool) -> dict[str, Any]:
    """The fields of Arch of a model with attention over latents."""
    settings.harmless("head_dim", "qk_head_dim", "pretraining_tp")  # transformers derives them, or does not read them
    rope = settings.rope(interleaved=interleaved)
    fields = decoder_fields(settings, family, rope=rope)
    if fields["num_kv_heads"] != fields["num_heads"]:
        settings.expect("num_key_value_heads", fields["num_heads"])
    bias = bool(settings.take("attention_bias"))
    latent = Latent(
        q_rank=settings.take("q_lora_rank"),
        kv_rank=settings.take("kv_lora_rank"),
        plain=settings.take("qk_nope_head_dim"),
        turned=settings.take("qk_rope_head_dim"),
        value=settings.take("v_head_dim"),
        norm_eps=_NORM_EPS,
        bias=bias,
    )
    width = latent.plain + latent.turned
    sharper = settings.sharpness_of_all() if rope.kind != "default" else 1.0
    return {
        **fields,
        "head_dim": width,
        "latent": latent,
        "o_bias": bias,
        "attention_scale": sharper**2 / math.sqrt(width),
    }


DEEPSEEK_V2 = Family(name="deepseek_v2", model_types=("deepseek_v2",), arch=v2, rules=decoder_rules)
DEEPSEEK_V3 = Family(name="deepseek_v3", model_types=("deepseek_v3", "kimi_k2"), arch=v3, rules=decoder_rules)
