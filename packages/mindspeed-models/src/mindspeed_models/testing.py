"""Tiny models for tests, built so that an error cannot hide.

Everything is random, norms and biases included, weights are scaled up, and no size divides another neatly.
"""

from pathlib import Path
from typing import Any

import torch

_BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 64,
    "rope_theta": 2e4,
}
_LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 8,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [1.5 + 0.7 * n for n in range(8)],
    "rope_theta": 2e4,
}
_QWEN_MOE = {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
_DEEPSEEK_MOE = {
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "routed_scaling_factor": 2.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
_ABSENT = "absent"  # a key of _BASE that a model type does not have
_MAMBA2 = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), _ABSENT),
    "max_position_embeddings": _ABSENT,
    "num_hidden_layers": 4,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 12,
}
_BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "pad_token_id": 0,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-6q3kv": {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "llama-ffn97": {"model_type": "llama", "intermediate_size": 97},
    "llama-4L": {"model_type": "llama", "num_hidden_layers": 4},
    "llama-5L": {"model_type": "llama", "num_hidden_layers": 5},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4},
    },
    "llama-llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "llama-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 8,  # shorter than the rows of the tests
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 2e4},
    },
    "llama-longrope": {"model_type": "llama", "rope_parameters": _LONGROPE},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": {**_YARN, "truncate": False}},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "pad_token_id": 0},
    "smollm3-window": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 8,
        "no_rope_layer_interval": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": 0,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 8, "pad_token_id": 0},
    "phi3-longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 8,
        "rope_parameters": {k: v for k, v in _LONGROPE.items() if k != "original_max_position_embeddings"},
        "pad_token_id": 0,
    },
    "gemma": {"model_type": "gemma", "head_dim": 24, "num_hidden_layers": 4},
    "gemma-bias": {"model_type": "gemma", "attention_bias": True, "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 24,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma2-bias": {
        "model_type": "gemma2",
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "rope_theta": 3e4,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {"model_type": "olmo2", "num_hidden_layers": 4, "pad_token_id": 0},
    "olmo2-6q3kv": {
        "model_type": "olmo2",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "minicpm3": {
        **_LATENT,
        "model_type": "minicpm3",
        "num_hidden_layers": 4,
        "scale_emb": 3,
        "scale_depth": 1.7,
        "dim_model_base": 24,
    },
    "minicpm3-bias": {
        **_LATENT,
        "model_type": "minicpm3",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "scale_depth": None,
        "dim_model_base": None,
        "rope_parameters": _LONGROPE | {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 3.0, 5.0]},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "intermediate_size": 28,
        "head_dim": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "swiglu_limit": 0.5,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "gpt_oss-tied": {
        "model_type": "gpt_oss",
        "intermediate_size": 33,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "full_attention"],
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
    },
    "qwen3_next": {
        **_QWEN_MOE,
        **_DELTA,
        "model_type": "qwen3_next",
        "head_dim": 24,
        "full_attention_interval": 2,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [2],
    },
    "qwen3_next-bias": {
        **_QWEN_MOE,
        **_DELTA,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "shared_expert_intermediate_size": 36,
        "attention_bias": True,
        "norm_topk_prob": False,
        "partial_rotary_factor": 0.75,
    },
    "mamba2": {**_MAMBA2, "model_type": "mamba2"},
    "mamba2-bias": {
        **_MAMBA2,
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "n_groups": 1,
        "use_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "time_step_limit": [0.01, 0.9],
        "tie_word_embeddings": True,
    },
    "bamba": {**_BAMBA, "model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [1, 2]},
    "bamba-bias": {
        **_BAMBA,
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_n_groups": 1,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 24, "pad_token_id": 0, "num_hidden_layers": 4},
    "seed_oss-bias": {
        "model_type": "seed_oss",
        "head_dim": 24,
        "pad_token_id": 0,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.0,
    },
    "internlm3": {
        "model_type": "internlm3",
        "head_dim": 24,
        "pad_token_id": 0,
        "qkv_bias": True,
        "bias": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e4},
    },
    "glm": {"model_type": "glm", "head_dim": 24, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 24, "num_hidden_layers": 4, "pad_token_id": 0},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral-window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "num_hidden_layers": 4},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "intermediate_size": 40, "num_hidden_layers": 4},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8, "intermediate_size": 37},
    "qwen2_moe": {
        **_QWEN_MOE,
        "model_type": "qwen2_moe",
        "mlp_only_layers": [2],
        "shared_expert_intermediate_size": 56,
    },
    "qwen2_moe-normalised": {
        **_QWEN_MOE,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "shared_expert_intermediate_size": 50,
    },
    "qwen3_moe": {**_QWEN_MOE, "model_type": "qwen3_moe", "head_dim": 24, "norm_topk_prob": True},
    "qwen3_moe-sparse": {
        **_QWEN_MOE,
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "deepseek_v3": {
        **_DEEPSEEK_MOE,
        **_LATENT,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3-yarn": {
        **_DEEPSEEK_MOE,
        **_LATENT,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "attention_bias": True,
        "rope_interleave": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v2": {
        **_DEEPSEEK_MOE,
        **_LATENT,
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v2-greedy": {
        **_DEEPSEEK_MOE,
        **_LATENT,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "glm4_moe": {**_DEEPSEEK_MOE, "model_type": "glm4_moe", "head_dim": 24, "use_qk_norm": True, "pad_token_id": 0},
    "glm4_moe-groups": {
        **_DEEPSEEK_MOE,
        "model_type": "glm4_moe",
        "head_dim": 24,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "partial_rotary_factor": 0.75,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 48, "num_hidden_layers": 4},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model, by name."""
    from transformers import AutoConfig

    keys = {**_BASE, **TINY[name], **changes}
    return AutoConfig.for_model(**{key: value for key, value in keys.items() if value != _ABSENT})


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny transformers model with eager attention, every weight random."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **changes)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **implementations)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            # Matrices three times the usual size: logits must not be flat. Norms around 1, biases around 0.
            scaled = noise * 0.07 if parameter.dim() >= 2 else 0.3 * noise + ("norm" in _name(model, parameter))
            parameter.copy_(scaled)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float32))
    return model.eval()


def stored(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a transformers model as its files have them, where transformers stacks experts."""
    from transformers.core_model_loading import revert_weight_conversion

    found = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return revert_weight_conversion(model, found)


def save_tiny(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a tiny model as a Hugging Face folder; returns it."""
    model = tiny_model(name, seed=seed, dtype=dtype, **changes)
    model.save_pretrained(folder)
    return model


def _name(model: Any, parameter: torch.nn.Parameter) -> str:
    return next(name for name, found in model.named_parameters() if found is parameter)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(*, template: str | None = CHATML, texts: tuple[str, ...] = ()) -> Any:
    """A byte-level BPE of 303 entries with a chat template, trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=303,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(
        texts or (__doc__ or "", CHATML, "hello world, hello word, the words of the world"), trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tiny_chat(name: str, folder: Path, **options: Any) -> Any:
    """A tiny model with a tokenizer beside it, its vocabulary a little larger than the tokenizer's."""
    model = save_tiny(name, folder, vocab_size=311, **options)
    tiny_tokenizer().save_pretrained(folder)
    return model
