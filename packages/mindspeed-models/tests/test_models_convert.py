"""Conversion: bit-equal both ways, nothing half-written, damaged files refused before anything is."""

import json
import multiprocessing
import os
import signal

import pytest
import torch
from mindspeed_kernels.errors import UserError
from mindspeed_models.errors import ModelError, WeightError
from mindspeed_models.testing import TINY, save_tiny, save_tiny_chat
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.safetensors_files import SafetensorsFolder
from mindspeed_models.weights.shards import Box, Piece, ShardError, Shards, load_pieces, save_pieces
from mindspeed_models.weights.source import open_source
from mindspeed_runtime.rundir import read_manifest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def _tensors(folder):
    files = SafetensorsFolder(folder)
    return {name: files.read(name) for name in files.entries}


@pytest.mark.parametrize("name", sorted(TINY))
def test_there_and_back_is_bit_equal(name, tmp_path):
    save_tiny(name, tmp_path / "hf", dtype=torch.bfloat16 if "tied" in name else torch.float32)
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    read_manifest(tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    before, after = _tensors(tmp_path / "hf"), _tensors(tmp_path / "back")
    assert set(before) == set(after)
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.config.vocab_size == 131


def test_tokenizer_and_generation_settings_travel(tmp_path):
    model = save_tiny_chat("llama", tmp_path / "hf")
    GenerationConfig(eos_token_id=2, temperature=0.5, do_sample=True).save_pretrained(tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert AutoConfig.from_pretrained(tmp_path / "back").rope_parameters == model.config.rope_parameters


def test_small_shards_load_in_transformers(tmp_path):
    model = save_tiny("qwen2", tmp_path / "hf")
    to_hf(open_source(tmp_path / "hf"), tmp_path / "back", max_shard=60_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


def test_a_tied_model_may_store_its_embedding_twice_but_not_two(tmp_path):
    save_tiny("llama-tied", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, path, metadata={"format": "pt"})
    open_source(tmp_path / "hf")
    twice["lm_head.weight"][5, 5] += 1
    save_file(twice, path, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_source(tmp_path / "hf")


@pytest.fixture
def sharded(tmp_path):
    model = save_tiny("llama", tmp_path / "plain")
    model.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    return tmp_path / "hf"


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[2]
    victim.unlink()
    with pytest.raises(WeightError, match=f"{victim.name}: missing"):
        open_source(sharded)


def test_a_cut_shard_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    os.truncate(victim, victim.stat().st_size // 2)
    with pytest.raises(WeightError, match=f"{victim.name}: cut short or damaged"):
        open_source(sharded)


def test_a_tensor_that_the_index_only_promises_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    tensors = load_file(victim)
    dropped = min(tensors)
    del tensors[dropped]
    save_file(tensors, victim, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=f"names {dropped} in {victim.name}, which does not hold it"):
        open_source(sharded)


def test_pickled_weights_are_refused_and_do_not_run(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pickled \.bin files, which can run code"):
        open_source(tmp_path / "hf")


def test_what_is_not_a_model_is_said_so(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder"):
        open_source(tmp_path / "absent")
    with pytest.raises(ModelError, match="neither a Hugging Face folder"):
        open_source(tmp_path)
    save_tiny("llama", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
    with pytest.raises(ModelError, match="model_type 'mamba9' is not supported"):
        open_source(tmp_path / "hf")


def test_an_output_that_is_there_is_replaced_only_on_request_and_then_whole(tmp_path):
    save_tiny("qwen3", tmp_path / "large")
    save_tiny("llama", tmp_path / "small")
    to_hf(open_source(tmp_path / "large"), tmp_path / "out", max_shard=60_000)
    with pytest.raises(UserError, match="exists and is not empty"):
        to_hf(open_source(tmp_path / "small"), tmp_path / "out")
    to_hf(open_source(tmp_path / "small"), tmp_path / "out", force=True)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors*")) == ["model.safetensors"]
    assert _tensors(tmp_path / "out").keys() == _tensors(tmp_path / "small").keys()


def _convert_and_die(source, out, after):
    seen = []

    def progress(name, _):
        seen.append(name)
        if len(seen) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    to_hf(open_source(source), out, max_shard=60_000, progress=progress)


@pytest.mark.parametrize("after", [1, 9])
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_a_rerun_is_clean(tmp_path, after):
    save_tiny("qwen3", tmp_path / "hf")
    process = multiprocessing.get_context("spawn").Process(
        target=_convert_and_die, args=(tmp_path / "hf", tmp_path / "out", after)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    for out in ("out", "clean"):
        to_hf(open_source(tmp_path / "hf"), tmp_path / out, max_shard=60_000)
    files = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert not list(tmp_path.glob(".out*"))  # the leftovers of the killed run are gone


def _box(key, whole, offset, shape):
    return Box(key=key, whole=whole, offset=offset, shape=shape)


def test_boxes_of_any_cut_read_back_as_any_other(tmp_path):
    whole = torch.randn(7, 5)
    cuts = [((0, 0), (3, 5)), ((3, 0), (1, 2)), ((3, 2), (1, 3)), ((4, 0), (3, 5))]
    pieces = [
        Piece(box=_box("w", (7, 5), o, s), dtype=torch.float32, fill=whole[o[0] : o[0] + s[0], o[1] : o[1] + s[1]])
        for o, s in cuts
    ]
    save_pieces(tmp_path, pieces)
    assert tuple(Shards(tmp_path).tensors["w"].size) == (7, 5)
    target = torch.zeros(4, 4)
    load_pieces(tmp_path, [(_box("w", (7, 5), (2, 1), (4, 4)), target)])
    assert torch.equal(target, whole[2:6, 1:])
    with pytest.raises(ShardError, match="the checkpoint has no such tensor"):
        load_pieces(tmp_path, [(_box("v", (7, 5), (0, 0), (7, 5)), torch.zeros(7, 5))])
    with pytest.raises(ShardError, match=r"stored as \(7, 5\), the model wants \(8, 5\)"):
        load_pieces(tmp_path, [(_box("w", (8, 5), (0, 0), (8, 5)), torch.zeros(8, 5))])


def test_pieces_that_leave_a_hole_are_not_written_as_a_tensor(tmp_path):
    piece = Piece(box=_box("w", (7, 5), (0, 0), (3, 5)), dtype=torch.float32, fill=torch.zeros(3, 5))
    with pytest.raises(ShardError, match="do not tile"):
        save_pieces(tmp_path, [piece])
