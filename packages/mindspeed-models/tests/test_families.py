"""Families: what transformers means by a configuration, or a refusal that names the key."""

import json
import math
from dataclasses import replace

import pytest
import torch
from mindspeed_kernels.errors import UserError
from mindspeed_kernels.ops.activation import clamped_swiglu
from mindspeed_kernels.ops.routing import routing
from mindspeed_models.errors import ModelError
from mindspeed_models.families import FAMILIES, Arch, Rope, describe, families
from mindspeed_models.families.settings import HARMLESS
from mindspeed_models.megatron.build import rotary
from mindspeed_models.testing import TINY, tiny_config, tiny_model
from torch.nn.functional import gelu, silu

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + n / 10 for n in range(8)],
    "long_factor": [2 + n for n in range(8)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _arch(**changes):
    return describe({**BASE, "model_type": "llama", **changes})[1]


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_description_is_what_transformers_builds(name):
    """Every size and switch is read off the modules of a real model, not off its configuration."""
    model = tiny_model(name)
    family, arch = describe(json.loads(model.config.to_json_string()))
    layers, embedding = model.base_model.layers, model.get_input_embeddings()
    assert family.name == model.config.model_type == arch.family
    assert (arch.vocab, arch.hidden) == tuple(embedding.weight.shape)
    assert arch.num_layers == len(layers)
    assert arch.tied == (model.lm_head.weight is embedding.weight)
    recurrent = {n: mixer for n, layer in enumerate(layers) if (mixer := _of(layer, "linear_attn", "mamba", "mixer"))}
    assert arch.recurrent == tuple(recurrent)
    for mixer in recurrent.values():
        (_check_ssm if arch.delta is None else _check_delta)(arch, mixer)
    mlps = [_of(layer, "mlp", "feed_forward") for layer in layers]
    experts = {number: mlp for number, mlp in enumerate(mlps) if hasattr(mlp, "experts")}
    assert arch.expert_layers == tuple(experts)
    for block in experts.values():
        _check_experts(arch.moe, block)
    mlp = next((mlp for mlp in mlps if mlp is not None and not hasattr(mlp, "experts")), None)
    assert mlp is None or arch.ffn == mlp.down_proj.in_features
    projections = [] if mlp is None else [m for n, m in mlp.named_children() if n.endswith("_proj")]
    assert all(arch.mlp_bias == (projection.bias is not None) for projection in projections)
    _check_norms(arch, layers[0])
    with_attention = [layer for layer in layers if hasattr(layer, "self_attn")]
    assert len(with_attention) == len(arch.attention_layers)
    if with_attention:
        _check_attention(arch, model, with_attention)
    _check_functions(arch, model, mlp or (mlps[0].experts if experts else layers[0].mixer))


def _of(module, *names):
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _check_attention(arch, model, layers):
    attention = layers[0].self_attn
    assert arch.residual_dropout == getattr(attention, "residual_dropout", 0.0)
    assert arch.attention_dropout == attention.attention_dropout
    assert arch.value_rows == attention.o_proj.in_features
    assert arch.num_heads // arch.num_kv_heads == attention.num_key_value_groups
    if arch.latent is not None:
        _check_latent(arch, attention)
    elif hasattr(attention, "qkv_proj"):
        assert arch.query_rows + 2 * arch.kv_rows == attention.qkv_proj.out_features
    else:
        assert arch.query_rows * (1 + arch.output_gate) == attention.q_proj.out_features
        assert arch.kv_rows == attention.k_proj.out_features == attention.v_proj.out_features
    assert arch.head_dim == getattr(attention, "head_dim", arch.head_dim)
    assert (arch.attention_scale or arch.head_dim**-0.5) == pytest.approx(attention.scaling, rel=1e-12)
    biases = {
        m.bias is not None for n, m in attention.named_children() if n in ("q_proj", "k_proj", "v_proj", "qkv_proj")
    }
    assert arch.latent is not None or {arch.qkv_bias} == biases
    assert arch.o_bias == (attention.o_proj.bias is not None)
    assert arch.has_sinks == hasattr(attention, "sinks")
    assert arch.attention_cap == getattr(attention, "attn_logit_softcapping", None)
    norms = {arch.head_dim: "head", arch.query_rows: "wide"}
    assert arch.qk_norm == (norms[attention.q_norm.weight.numel()] if hasattr(attention, "q_norm") else "none")
    turns = [getattr(layer.self_attn, "use_rope", True) for layer in layers]
    assert arch.unturned == tuple(number for number, is_turned in enumerate(turns) if not is_turned)
    _check_rotary(arch, model.model.rotary_emb)
    windows = arch.windows or (None,) * len(layers)
    by_mask = arch.family in ("mistral", "phi3", "mixtral", "qwen3_moe")  # and not by the layers
    everywhere = model.config.sliding_window if by_mask else None
    assert windows == tuple(getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers)


def _check_delta(arch, mixer):
    delta = arch.delta
    assert (delta.key_heads, delta.key_dim) == (mixer.num_k_heads, mixer.head_k_dim)
    assert (delta.value_heads, delta.value_dim) == (mixer.num_v_heads, mixer.norm.weight.numel())
    assert tuple(mixer.conv1d.weight.shape) == (mixer.conv_dim, 1, delta.conv)


def _check_ssm(arch, mixer):
    ssm = arch.ssm
    assert (ssm.heads, ssm.groups, ssm.state) == (mixer.A_log.numel(), mixer.n_groups, mixer.ssm_state_size)
    assert ssm.heads * ssm.head_dim == mixer.out_proj.in_features
    assert mixer.conv1d.weight.shape[-1] == ssm.conv
    assert (ssm.conv_bias, ssm.bias) == (mixer.conv1d.bias is not None, mixer.in_proj.bias is not None)
    assert ssm.step_limits == tuple(mixer.time_step_limit)


def _check_norms(arch, layer):
    names = {name for name, _ in layer.named_children()}
    assert arch.post_norms == bool(names & {"post_mlp_layernorm", "post_feedforward_layernorm"})
    assert arch.pre_norms == bool(names & {"input_layernorm", "norm"})
    assert arch.residual_scale == getattr(layer, "residual_scale", 1.0)


def _check_rotary(arch, rotary_emb):
    if arch.local_rope is None:
        assert arch.turned == 2 * rotary_emb.inv_freq.numel()
    else:
        for rope, theirs in ((arch.rope, "full_attention"), (arch.local_rope, "sliding_attention")):
            expected = getattr(rotary_emb, f"{theirs}_inv_freq")
            torch.testing.assert_close(torch.tensor(rope.inverse_frequencies(arch.turned)), expected)


def _check_latent(arch, attention):
    """Sizes are told apart by the matrices, whose widths are all different."""
    latent = arch.latent
    queries = [attention.q_proj] if not latent.q_rank else [attention.q_a_proj, attention.q_b_proj]
    matrices = (*queries, attention.kv_a_proj_with_mqa, attention.kv_b_proj)
    assert [(matrix.in_features, matrix.out_features) for matrix in matrices] == [
        *(
            [(arch.hidden, latent.q_rank), (latent.q_rank, arch.query_rows)]
            if latent.q_rank
            else [(arch.hidden, arch.query_rows)]
        ),
        (arch.hidden, latent.kv_rank + latent.turned),
        (latent.kv_rank, arch.num_heads * (latent.plain + latent.value)),
    ]
    assert (latent.plain, latent.value) == (attention.qk_nope_head_dim, attention.v_head_dim)
    assert latent.norm_eps == attention.kv_a_layernorm.variance_epsilon
    assert latent.bias == (attention.kv_a_proj_with_mqa.bias is not None)


def _check_functions(arch, model, acting):
    """Norm, activation and embedding, by what they compute."""
    norm, embedding = _of(model.base_model, "norm", "norm_f", "final_layernorm"), model.get_input_embeddings()
    assert arch.norm_eps == getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    one, two = torch.ones(1, arch.hidden), torch.full((1, arch.hidden), 2.0)
    norm.weight.data.fill_(0.5)
    assert torch.allclose(norm(one), one * (0.5 + arch.norm_offset), atol=1e-3)
    if arch.activation == "clamped_swiglu":
        halves = torch.randn(5, 2 * arch.ffn)
        turns = torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
        ours = clamped_swiglu(halves, **dict(arch.activation_options))
        torch.testing.assert_close(ours, acting._apply_gate(turns))
        return
    act = _of(acting, "act_fn", "activation_fn", "act")
    assert torch.equal(act(two), gelu(two, approximate="tanh") if arch.activation == "geglu" else silu(two))
    assert torch.allclose(embedding(torch.tensor([3])), embedding.weight[3] * arch.embedding_scale)


def _check_experts(moe, block):
    router = _of(block, "gate", "router")
    assert block.experts.gate_up_proj.shape[0] == moe.num_experts and 2 * moe.ffn in block.experts.gate_up_proj.shape
    assert moe.top_k == router.top_k
    assert moe.biased == (getattr(router, "bias", None) is not None) == hasattr(block.experts, "down_proj_bias")
    shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
    assert moe.shared_ffn == (0 if shared is None else shared.down_proj.in_features)
    assert moe.shared_gate == hasattr(block, "shared_expert_gate")
    assert moe.bias == hasattr(router, "e_score_correction_bias")
    x = torch.randn(7, router.weight.shape[1], generator=torch.Generator().manual_seed(2))
    logits, weights, chosen = router(x)
    ours = routing(logits, moe.choice(), router.e_score_correction_bias if moe.bias else None)
    order, ours_order = chosen.argsort(-1), ours[1].argsort(-1)
    assert torch.equal(chosen.gather(1, order), ours[1].gather(1, ours_order))
    torch.testing.assert_close(ours[0].gather(1, ours_order), weights.gather(1, order))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts_per_tok": 9}, "experts: 9 of 8 cannot be chosen for a token"),
        ({"n_group": 3}, "experts: 8 do not divide into 3 groups"),
        ({"n_group": 8, "topk_group": 4}, "experts: a group of 1 has no two best scores"),
        ({"n_group": 4, "topk_group": 1}, "experts: 3 of 2 cannot be chosen for a token"),
        ({"n_group": 2, "topk_group": 3}, "experts: the best 3 of 2 groups cannot be taken"),
        ({"num_experts_per_tok": 0}, "experts: top_k is 0; it must be at least 1"),
        ({"output_router_logits": True}, "output_router_logits=True is not supported for glm4_moe; only False"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, text):
    with pytest.raises(ModelError, match=text):
        describe(tiny_config("glm4_moe", **changes).to_dict())


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("deepseek_v3", {"kv_lora_rank": 0}, "Multi-head latent attention: kv_rank is 0; it must be at least 1"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported for deepseek_v3; only 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for deepseek_v3"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "Gated delta network: 3 value heads do not divide into 2 key heads",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "Gated delta network: conv is 0"),
        ("mamba2", {"n_groups": 3}, "State space of Mamba-2: 8 heads do not divide into 3 groups"),
        ("mamba2", {"rms_norm": False}, "rms_norm=False is not supported for mamba2; only None or True"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported for gemma3_text"),
        ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient=0.1 is not supported for bamba; only 0.0"),
    ],
)
def test_mixers_that_cannot_be_are_refused(name, changes, text):
    with pytest.raises(UserError, match=text):
        describe(tiny_config(name, **changes).to_dict())


def test_a_key_that_transformers_knows_by_two_names_is_read_by_either():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    for name in ("num_experts", "num_local_experts"):
        assert describe({**sizes, "model_type": "qwen3_moe", name: 12})[1].moe.num_experts == 12
        assert describe({**sizes, "model_type": "mixtral", name: 12})[1].moe.num_experts == 12


@pytest.mark.parametrize(
    ("spelling", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {**YARN, "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 0.5, "truncate": False}}, 1e4),
        ({"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}, 1e4),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, 1e4),
        ({"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": None}}, 1e4),
        ({"rope_parameters": {**YARN, "factor": 1.0}}, 1e4),
        ({"rope_parameters": {**YARN, "factor": None}}, 1e4),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 3}}, 1e4),
    ],
)
def test_every_spelling_of_the_rotary_embedding_gives_the_frequencies_of_transformers(spelling, theta):
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**BASE, "model_type": "llama", **spelling}
    rope = describe(raw)[1].rope
    assert rope.theta == theta
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).model.rotary_emb
    assert theirs.attention_scaling == pytest.approx(rope.attention_factor, rel=1e-12)
    ours = torch.tensor(rope.inverse_frequencies(16), dtype=torch.float64)
    torch.testing.assert_close(ours, theirs.inv_freq.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [3, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.5},
        {**LONGROPE, "original_max_position_embeddings": 64},
        {**LONGROPE, "original_max_position_embeddings": 16},
        {**LONGROPE, "original_max_position_embeddings": 64, "factor": 8.0},
        {**LONGROPE, "original_max_position_embeddings": 64, "attention_factor": 1.7},
    ],
)
def test_frequencies_that_depend_on_the_length_are_those_of_transformers(rope, length):
    """Also in a document that others share a row with: 5 tokens before it, and 70 after."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**BASE, "model_type": "llama", "max_position_embeddings": 64, "rope_parameters": {**rope, "rope_theta": 2e4}}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).model.rotary_emb
    expected = theirs(torch.zeros(1), torch.arange(length)[None])
    arch = describe(raw)[1]
    ours = rotary(arch, arch.rope)
    assert theirs.attention_scaling == pytest.approx(ours.attention_factor, rel=1e-12)
    alone = ours.turns(torch.arange(length)[None], torch.float32)
    packed = torch.cat([torch.arange(size) for size in (5, length, 70)])
    neighbours = ours.turns(torch.stack((packed, torch.arange(len(packed)))), torch.float32)
    for turn, packed_turn, wanted in zip(alone, neighbours, expected, strict=True):
        torch.testing.assert_close(turn[:, :, 0], wanted, rtol=0, atol=length * 2e-6)
        assert torch.equal(packed_turn[0, 5 : 5 + length], turn[0])


def test_frequencies_are_exact_in_double_precision():
    frequencies = Rope(theta=5e5).inverse_frequencies(128)
    assert frequencies == [math.pow(5e5, -pair / 64) for pair in range(64)]
    single = torch.tensor(5e5) ** -(torch.arange(64) / 64)  # what single precision would give
    assert max(abs(a / b - 1) for a, b in zip(frequencies, single.tolist(), strict=True)) > 1e-8


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type 'ntk'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "Missing required keys .* 'rope_type'='llama3'"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 2.0}}, "rope_parameters.attention_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {**YARN, "beta_fast": 0.5}}, r"beta_slow \(1\) <= beta_fast"),
        ({"rope_parameters": {**YARN, "short_factor": [1.0]}}, "rope_parameters.short_factor"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "theta 1 must be above 1"),
        ({"rope_parameters": {**YARN, "mscale": "a", "mscale_all_dim": 1.0}}, "mscale is 'a'; it must be a number"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; it must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor is None; it must be a number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim of at least 4, not 2"),
        ({"rope_parameters": {**LONGROPE, "short_factor": [1.0]}}, "short_factor has 1 values for 8 pairs"),
        ({"rope_parameters": {**LONGROPE, "long_factor": [1.0]}}, "long_factor has 1 values for 8 pairs"),
        ({"rope_parameters": {**LONGROPE, "long_factor": 1.0}}, "no len"),
        ({"rope_parameters": {**LONGROPE, "long_factor": ["a"] * 8}}, "long_factor is 'a'; it must be a number"),
        ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1}}, r"original context \(1\), at least 2"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta=1000000.0 contra"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_scaling contradict"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types="),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config says"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope=True"),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, "no sliding_window in force"),
        ({"model_type": "olmo"}, "model_type 'olmo' is not supported; there are bamba, "),
        ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act='relu'"),
        ({"model_type": "gemma", "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "phi3", "pad_token_id": 0, "resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ({"model_type": "glm", "pad_token_id": 0, "partial_rotary_factor": 0.01}, "1 of 128 dimensions of a head"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
    ],
)  # fmt: skip
def test_what_changes_the_maths_and_is_not_built_is_refused_by_name(changes, key):
    with pytest.raises(ModelError, match=key):
        _arch(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 kv heads"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab is -1"),
        ({"rms_norm_eps": 0.0}, "norm_eps 0.0 must be above 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"model_type": "mistral", "sliding_window": 0}, "less than one token"),
        ({"rope_theta": -1.0}, "theta -1"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(changes, text):
    with pytest.raises(ModelError, match=text) as caught:
        _arch(**changes)
    assert "\n" not in str(caught.value)


def test_absent_and_null_mean_what_the_class_means_by_them():
    assert _arch(num_key_value_heads=None).num_kv_heads == 4
    assert _arch(model_type="mistral").windows == (4096, 4096)
    assert _arch(model_type="mistral", sliding_window=None).windows == ()
    assert _arch(model_type="mistral", head_dim=None).head_dim == 16
    assert _arch(model_type="qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=1).windows == ()
    assert _arch(hidden_act="swish") == _arch()


def test_keys_that_say_nothing_about_the_layers_change_nothing():
    odd = {key: 1 for key in HARMLESS if key.endswith("_token_id")} | {
        "temperature": 0.3,
        "use_cache": False,
        "torch_dtype": "float16",
        "unsloth_fixed": True,
        "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"},
        "_name_or_path": "somewhere",
        "initializer_range": 0.7,
    }
    assert _arch(**odd) == _arch()
    assert _arch(model_type="qwen2", use_mrope=False) == _arch(model_type="qwen2")


def test_a_description_with_a_window_too_few_cannot_be_made():
    arch = _arch()
    assert isinstance(arch, Arch)
    with pytest.raises(ModelError, match="1 sliding windows for 2 layers"):
        replace(arch, windows=(8,))


def test_each_model_type_has_one_family():
    claimed = [model_type for family in FAMILIES for model_type in family.model_types]
    assert sorted(claimed) == sorted(set(claimed)) == sorted(families())


def test_a_plug_in_adds_a_family(tmp_path, monkeypatch):
    config = {**json.loads(tiny_config("llama").to_json_string()), "model_type": "olmo", "head_dim": 16}
    with pytest.raises(ModelError, match="model_type 'olmo' is not supported"):
        describe(config)
    (tmp_path / "plug.py").write_text(
        "import dataclasses\n"
        "from mindspeed_models.families.llama import LLAMA\n"
        "FAMILY = dataclasses.replace(LLAMA, name='seed', model_types=('olmo',))\n"
    )
    (tmp_path / "plug-1.dist-info").mkdir()
    (tmp_path / "plug-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    (tmp_path / "plug-1.dist-info" / "entry_points.txt").write_text("[mindspeed.families]\nseed = plug:FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "olmo" in families()
    own = {model_type for family in FAMILIES for model_type in family.model_types}
    assert set(families()) - {"olmo"} == own
