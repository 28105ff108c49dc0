"""Conversion: dtypes kept, equal bytes for equal input, little memory, nothing usable after a failure."""

import gc
import json
import multiprocessing
import os
import signal
import weakref

import pytest
import torch
from mindspeed_models.errors import WeightError
from mindspeed_models.families import describe
from mindspeed_models.testing import save_tiny, save_tiny_chat, tiny_model
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.rule import Rule
from mindspeed_models.weights.safetensors_files import SafetensorsFolder
from mindspeed_models.weights.source import HuggingFaceSource, open_source
from mindspeed_runtime.rundir import CheckpointError
from safetensors.torch import load_file, save_file


def _files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _tensors(folder):
    files = SafetensorsFolder(folder)
    return {name: files.read(name) for name in files.entries}


def _mixed(folder):
    """bf16 with fp32 norms, as some published models are stored."""
    save_tiny("qwen3", folder, dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    mixed = {name: t.float() + 2**-20 if "norm" in name else t for name, t in load_file(path).items()}
    save_file(mixed, path, metadata={"format": "pt"})
    return mixed


@pytest.mark.parametrize("says", ["dtype", "torch_dtype", None])
def test_mixed_dtypes_keep_every_bit_and_the_configuration_states_what_is_stored(tmp_path, says):
    mixed = _mixed(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config | ({} if says is None else {says: "bfloat16"}), indent=2))
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    back = _tensors(tmp_path / "back")
    assert back.keys() == mixed.keys()
    for name, tensor in mixed.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    stated = json.loads((tmp_path / "back" / "config.json").read_text())
    assert stated.get("dtype", stated.get("torch_dtype")) == "bfloat16"


def test_a_configuration_that_names_another_dtype_is_put_right(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    to_hf(open_source(tmp_path / "hf"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def test_values_that_are_not_numbers_keep_their_bits(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    tensors["model.norm.weight"][5] = -0.0
    save_file(tensors, path)
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    back = _tensors(tmp_path / "back")
    assert all(torch.equal(back[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in tensors.items())


def _convert_and_die(source, out, after):
    seen = []

    def progress(name, _):
        seen.append(name)
        if len(seen) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    to_megatron(open_source(source), out, progress=progress)


def test_equal_input_gives_equal_bytes_after_a_kill_too(tmp_path):
    save_tiny_chat("qwen3", tmp_path / "hf")
    process = multiprocessing.get_context("fork").Process(
        target=_convert_and_die, args=(tmp_path / "hf", tmp_path / "killed", 11)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    (tmp_path / "elsewhere").mkdir()
    for out in (tmp_path / "killed", tmp_path / "elsewhere" / "clean"):
        to_megatron(open_source(tmp_path / "hf"), out)
    assert _files(tmp_path / "killed") == _files(tmp_path / "elsewhere" / "clean")
    assert not list(tmp_path.glob(".killed*"))


def test_nothing_of_the_place_of_writing_is_stored(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    assert not [name for name, content in _files(tmp_path / "ck").items() if str(tmp_path).encode() in content]


class _Watched(HuggingFaceSource):
    """Counts the tensors that a conversion still holds whenever it asks for the next."""

    most = 0

    def read(self, box, *, ledger=None):
        array = super().read(box, ledger=ledger).clone().numpy()  # lives as long as any view of it
        alive = [kept for kept in self.__dict__.setdefault("handed", []) if kept() is not None]
        self.handed = [*alive, weakref.ref(array)]
        self.most = max(self.most, len(self.handed))
        return torch.from_numpy(array)


@pytest.mark.parametrize("convert", [to_megatron, to_hf])
def test_a_conversion_holds_one_tensor_at_a_time_whatever_the_size_of_the_model(tmp_path, convert):
    save_tiny("llama-5L", tmp_path / "hf")
    source = _Watched(tmp_path / "hf")
    gc.disable()  # what only a collection would free counts as held
    try:
        convert(source, tmp_path / "out")
    finally:
        gc.enable()
    assert len(source.rules) > 30
    assert source.most == 1


def test_sources_that_no_tensor_can_hold_together_are_refused_before_a_folder_stands(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_proj.weight"] = tensors["model.layers.1.self_attn.v_proj.weight"].bfloat16()
    save_file(tensors, path)
    with pytest.raises(WeightError, match=r"linear_qkv.weight: its sources have different dtypes .*v_proj.weight"):
        to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["hf"]


def test_files_that_describe_a_model_travel_and_others_do_not(tmp_path):
    save_tiny_chat("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tekken.json").write_text("{}")
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for stray in ("optimizer.pt", "pytorch_model.bin", "notes.txt"):
        (tmp_path / "hf" / stray).write_text("x")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    before, after = _files(tmp_path / "hf"), _files(tmp_path / "back")
    assert set(before) - set(after) == {"optimizer.pt", "pytorch_model.bin", "notes.txt"}
    assert {name for name in after if after[name] != before.get(name)} <= {"model.safetensors"}  # another order


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_checkpoint_without_its_manifest_or_with_a_cut_file_is_no_source(tmp_path, name):
    save_tiny(name, tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    config = tmp_path / "ck" / "hf" / "config.json"
    text = config.read_text()
    config.write_text(text + "\n")
    with pytest.raises(CheckpointError, match=r"config.json: has \d+ bytes, the manifest says"):
        open_source(tmp_path / "ck")
    config.write_text(text)
    open_source(tmp_path / "ck")
    (tmp_path / "ck" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        open_source(tmp_path / "ck")


@pytest.mark.parametrize("swapped", ["gate_up", "qkv"])
def test_a_rule_in_another_order_does_not_give_the_same_bytes(tmp_path, monkeypatch, swapped):
    """The control of every bit-equal round trip: a fault in one direction only is seen in the bytes."""
    save_tiny("llama", tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    true_unpack = Rule.unpack

    def exchanged(self, whole):
        found = true_unpack(self, whole)
        if swapped == "gate_up" and "linear_fc1.weight" in self.ours:
            return found[::-1]
        if swapped == "qkv" and "linear_qkv.weight" in self.ours:
            return [found[0], found[2], found[1]]
        return found

    monkeypatch.setattr(Rule, "unpack", exchanged)
    to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    before, after = _tensors(tmp_path / "hf"), _tensors(tmp_path / "back")
    differing = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert differing == ({"gate_proj", "up_proj"} if swapped == "gate_up" else {"k_proj", "v_proj"})


def test_both_spellings_of_a_configuration_give_one_checkpoint(tmp_path):
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    for name in ("old", "new"):
        model.save_pretrained(tmp_path / name)
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": 500000.0, "rope_scaling": None}))
    for name in ("old", "new"):
        to_megatron(open_source(tmp_path / name), tmp_path / f"{name}-ck")
    old, new = (_files(tmp_path / f"{name}-ck" / "model") for name in ("old", "new"))
    assert old == new
    to_hf(open_source(tmp_path / "old-ck"), tmp_path / "back")
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path / "back").rope_parameters["rope_theta"] == 5e5
    assert describe(json.loads((tmp_path / "back" / "config.json").read_text()))[1].rope.theta == 5e5
