"""Weight rules: exact in both directions, strict about what they cover."""

import dataclasses
import random

import pytest
import torch
from mindspeed_models.errors import ModelError, WeightError
from mindspeed_models.families import describe
from mindspeed_models.families.arch import Rope
from mindspeed_models.testing import TINY, stored, tiny_config, tiny_model
from mindspeed_models.weights.rule import Rule, Segment, cover, expanded, stacked

NAMES = sorted(TINY)


def _rules(name):
    config = tiny_config(name).to_dict()
    family, arch = describe(config)
    return arch, expanded(family.rules(arch), arch.num_layers)


@pytest.mark.parametrize("name", NAMES)
def test_rules_cover_a_model_exactly_and_unpack_what_they_pack(name):
    _, rules = _rules(name)
    tensors = stored(tiny_model(name))
    cover(rules, {key: tensor.shape for key, tensor in tensors.items()})
    rebuilt = {}
    for rule in rules.values():
        whole = rule.pack(lambda key, part: tensors[key][part], (0,) * len(rule.shape), rule.shape)
        assert tuple(whole.shape) == rule.shape
        rebuilt |= dict(zip(rule.hf, rule.unpack(whole), strict=True))
    assert set(rebuilt) == set(tensors)
    assert all(torch.equal(rebuilt[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", ["llama-6q3kv", "qwen2_moe", "gpt_oss", "qwen3_next", "mamba2"])
def test_any_box_of_a_packed_tensor_is_made_from_its_sources_alone(name):
    _, rules = _rules(name)
    tensors = stored(tiny_model(name))
    chance = random.Random(3)
    for rule in rules.values():
        whole = rule.pack(lambda key, part: tensors[key][part], (0,) * len(rule.shape), rule.shape)
        for _ in range(20):
            offset = [chance.randrange(size) for size in rule.shape]
            shape = [chance.randint(1, size - start) for size, start in zip(rule.shape, offset, strict=True)]
            part = rule.pack(lambda key, part: tensors[key][part], offset, shape)
            assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])


def test_a_stack_is_its_blocks_each_made_of_its_own_sources():
    _, rules = _rules("qwen2_moe")
    rule = rules["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert rule.shape == (6, 56, 64) and rule.hf_shape(11) == (28, 64)
    assert rule.hf[4:6] == tuple(f"model.layers.1.mlp.experts.2.{name}_proj.weight" for name in ("gate", "up"))
    read = []
    rule.pack(lambda key, part: read.append(key) or torch.zeros(28, 64)[part], (2, 20, 0), (1, 20, 64))
    assert tuple(read) == rule.hf[4:6]
    assert [block.hf for block in rule.blocks()] == [rule.hf[n : n + 2] for n in range(0, 12, 2)]
    with pytest.raises(WeightError, match="11 sources for 6 x 2"):
        dataclasses.replace(rule, hf=rule.hf[:-1])


def test_layers_have_the_rules_that_are_theirs():
    _, rules = _rules("qwen2_moe")  # layer 2 has one MLP
    for layer in range(4):
        has_experts = f"decoder.layers.{layer}.mlp.router.weight" in rules
        assert has_experts == (layer != 2) != (f"decoder.layers.{layer}.mlp.linear_fc1.weight" in rules)


def test_query_groups_are_packed_by_kv_head():
    arch, rules = _rules("llama-6q3kv")
    rule = rules["decoder.layers.1.self_attention.linear_qkv.weight"]
    marks = {key: torch.arange(rows).float()[:, None].expand(rows, rule.width) + 1000 * number
             for number, (key, rows) in enumerate(zip(rule.hf, rule.rows, strict=True))}  # fmt: skip
    packed = rule.pack(lambda key, part: marks[key][part], (0, 0), rule.shape)[:, 0]
    dim, group = arch.head_dim, arch.num_heads // arch.num_kv_heads
    for head in range(arch.num_kv_heads):
        block = packed[head * (group + 2) * dim :][: (group + 2) * dim]
        queries = torch.arange(head * group * dim, (head + 1) * group * dim)
        keys = torch.arange(head * dim, (head + 1) * dim)
        assert torch.equal(block, torch.cat((queries, keys + 1000, keys + 2000)).float())


_GATE_BIAS = "model.layers.0.mlp.gate_proj.bias"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda shapes: shapes.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight: not in the weight files"),
        (lambda shapes: shapes.update({_GATE_BIAS: (96,)}), "gate_proj.bias: in the weight files, and no part"),
        (lambda shapes: shapes.update({"model.norm.weight": (63,)}), r"model.norm.weight: has shape \(63,\)"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(change, text):
    _, rules = _rules("llama")
    shapes = {key: tensor.shape for key, tensor in tiny_model("llama").state_dict().items()}
    change(shapes)
    with pytest.raises(WeightError, match=text):
        cover(rules, shapes)


def test_a_rule_that_uses_a_row_twice_or_never_cannot_be_written():
    fields = {"ours": "a", "hf": ("b",), "rows": (4,), "width": 2, "cut": None}
    Rule(**fields, order=stacked(4))
    for start, stop in ((0, 3), (1, 4)):
        with pytest.raises(WeightError, match="does not use every row of b exactly once"):
            Rule(**fields, order=(Segment(source=0, start=start, stop=stop),))


def test_sources_of_different_dtypes_are_refused():
    _, rules = _rules("llama")
    tensors = dict(tiny_model("llama").state_dict())
    key = "model.layers.0.self_attn.k_proj.weight"
    tensors[key] = tensors[key].bfloat16()
    rule = rules["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(WeightError, match="its sources have different dtypes"):
        rule.pack(lambda name, part: tensors[name][part], (0, 0), rule.shape)


def test_head_width_is_what_transformers_gives():
    base = {"vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    widths = {
        kind: describe({**base, "model_type": kind})[1].head_dim for kind in ("llama", "mistral", "qwen2", "qwen3")
    }
    assert widths == {"llama": 16, "mistral": 16, "qwen2": 16, "qwen3": 128}
    assert describe({**base, "model_type": "llama", "head_dim": None})[1].head_dim == 16
    assert describe({**base, "model_type": "qwen3", "head_dim": 48})[1].head_dim == 48


def test_both_spellings_of_the_rotary_base_are_read():
    base = {"model_type": "llama", "vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4}
    old = describe({**base, "rope_theta": 500000.0, "rope_scaling": None})[1]
    new = describe({**base, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})[1]
    assert old == new
    assert old.rope == Rope(theta=500000.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; there are bamba, "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama; only 'silu'"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is not known to family llama"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}, "rope_theta": 1e4}, "'ntk'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
    ],
)  # fmt: skip
def test_a_key_that_changes_the_maths_is_refused_by_name(change, text):
    config = {"model_type": "llama", "vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4, **change}
    with pytest.raises(ModelError, match=text):
        describe(config)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-llama3"])
def test_rotary_frequencies_are_those_of_transformers(name):
    model = tiny_model(name)
    _, arch = describe(tiny_config(name).to_dict())
    ours = torch.tensor(arch.rope.inverse_frequencies(arch.head_dim), dtype=torch.float32)
    torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_sliding_windows_follow_the_layer():
    assert describe(tiny_config("qwen2-window").to_dict())[1].windows == (None, 8)
    assert describe(tiny_config("mistral-window").to_dict())[1].windows == (8, 8)
    assert describe(tiny_config("qwen2").to_dict())[1].windows == ()


def test_arch_is_hashable_and_frozen():
    arch = describe(tiny_config("llama").to_dict())[1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        arch.hidden = 1
