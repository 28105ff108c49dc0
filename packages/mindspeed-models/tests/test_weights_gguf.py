"""GGUF files, written here by the library that defines the format: read to the bit, or refused by name."""

import numpy as np
import pytest
import torch
from mindspeed_models.errors import ModelError, WeightError
from mindspeed_models.testing import tiny_model, tiny_tokenizer
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.safetensors_files import SafetensorsFolder
from mindspeed_models.weights.source import open_source, read_config

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
# The names of the format's own table, written out: part of GGUF -> part of Hugging Face.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _interleaved(weight, heads):
    """llama.cpp pairs neighbouring rows for the rotary embedding, transformers the two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write(path, name, *, keys=(), tensors=(), leave_out=(), **changes):
    """Write a tiny random model of family ``name`` as GGUF; returns its Hugging Face tensors."""
    model = tiny_model(name, vocab_size=311, **changes)
    config, arch = model.config, model.config.model_type
    head_dim = model.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e5)
    writer.add_vocab_size(config.vocab_size)
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    _add_tokenizer(writer)
    for key, value in keys:
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key.replace("ARCH", arch), value)
    leave_out = {*leave_out, *(["lm_head.weight"] if config.tie_word_embeddings else [])}
    found = {key: value for key, value in model.state_dict().items() if key not in leave_out}
    for key, value in found.items():
        writer.add_tensor(*_gguf_tensor(key, value.numpy(), config))
    for key, value in tensors:
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def _gguf_tensor(key, array, config):
    stem, kind = key.rsplit(".", 1)
    top = {hf: ours for ours, hf in TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}", array
    _, _, layer, part = stem.split(".", 3)
    name = {hf: ours for ours, hf in LAYER.items()}[part]
    if config.model_type == "llama" and name in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
        array = np.ascontiguousarray(_interleaved(array, heads))
    return f"blk.{layer}.{name}.{kind}", array


def _add_tokenizer(writer):
    tokenizer = tiny_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    model = __import__("json").loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("llama", {}, "LlamaForCausalLM"),
        ("llama-6q3kv", {}, "LlamaForCausalLM"),
        ("llama-tied", {}, "LlamaForCausalLM"),
        ("qwen2", {}, "Qwen2ForCausalLM"),
        ("qwen3", {"head_dim": 128}, "Qwen3ForCausalLM"),
    ],
)
def test_a_gguf_file_becomes_a_checkpoint_and_a_folder_to_the_bit(tmp_path, name, changes, kind):
    tensors = _write(tmp_path / "m.gguf", name, **changes)
    to_megatron(open_source(tmp_path / "m.gguf"), tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "hf")
    files = SafetensorsFolder(tmp_path / "hf")
    assert files.entries.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(files.read(key), tensor), key

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == kind
    assert model.config.rope_parameters["rope_theta"] == 5e5
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("hello world").input_ids


def test_a_description_is_read_without_a_weight(tmp_path, monkeypatch):
    _write(tmp_path / "m.gguf", "llama")
    import transformers

    monkeypatch.delattr(transformers.AutoModelForCausalLM, "from_pretrained")
    source = open_source(tmp_path / "m.gguf")
    assert source.arch.rope.theta == 5e5
    assert read_config(tmp_path)["vocab_size"] == 311


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ARCH.rope.scaling.type", "linear"),
        ("ARCH.rope.scaling.factor", 4.0),
        ("ARCH.attention.sliding_window", 8),
        ("ARCH.attention.key_length", 24),
        ("ARCH.logit_scale", 0.5),
        ("ARCH.expert_count", 4),
    ],
)
def test_a_key_that_transformers_would_pass_over_is_refused_by_name(tmp_path, key, value):
    _write(tmp_path / "m.gguf", "llama", keys=[(key, value)])
    with pytest.raises(ModelError, match=key.removeprefix("ARCH.")):
        open_source(tmp_path / "m.gguf")


def test_a_head_width_that_transformers_does_not_read_is_refused_by_name(tmp_path):
    """transformers takes 128 for every Qwen3 file."""
    _write(tmp_path / "m.gguf", "qwen3", keys=[("ARCH.attention.key_length", 48)])
    with pytest.raises(ModelError, match=r"attention.key_length=48 is not read"):
        open_source(tmp_path / "m.gguf")


def test_keys_that_say_what_is_so_anyway_are_accepted(tmp_path):
    keys = [("ARCH.rope.scaling.type", "none"), ("ARCH.attention.key_length", 16), ("ARCH.attention.value_length", 16)]
    _write(tmp_path / "m.gguf", "llama", keys=keys)
    open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("tensor", "shape", "text"),
    [
        ("rope_freqs.weight", (8,), "holds rope_freqs.weight, which transformers does not read"),  # Llama 3.1
        ("blk.0.attn_q.bias", (64,), "q_proj.bias: in the weight files, and no part of the model"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "holds blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_tensor_that_transformers_would_pass_over_is_refused_by_name(tmp_path, tensor, shape, text):
    _write(tmp_path / "m.gguf", "llama", tensors=[(tensor, np.ones(shape, np.float32))])
    with pytest.raises(WeightError, match=text):
        open_source(tmp_path / "m.gguf")


def test_a_tensor_that_is_missing_is_named(tmp_path):
    _write(tmp_path / "m.gguf", "llama", leave_out=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(WeightError, match=r"model.layers.1.mlp.up_proj.weight: not in the weight files"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [0, 3, 40, 2000, -1])
def test_a_file_that_is_cut_or_no_gguf_is_refused(tmp_path, kept):
    _write(tmp_path / "m.gguf", "llama")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:kept] if kept != 3 else b"no GGUF file at all, but long enough to try")
    with pytest.raises(WeightError, match=r"m.gguf: not a GGUF file, or cut short"):
        open_source(tmp_path / "m.gguf")


def test_an_architecture_that_is_not_supported_is_said_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "notyet")
    writer.add_tensor("token_embd.weight", np.ones((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture notyet is not supported"):
        open_source(tmp_path / "m.gguf")


def test_two_files_in_one_folder_are_not_chosen_between(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one"):
        open_source(tmp_path)
