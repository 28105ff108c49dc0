"""Weight files: every way in which they are damaged is seen before a weight is read, and named."""

import json
import struct

import pytest
import torch
from mindspeed_models.errors import WeightError
from mindspeed_models.testing import save_tiny
from mindspeed_models.weights.safetensors_files import Planned, SafetensorsFolder, write_folder
from mindspeed_models.weights.source import open_source
from safetensors.torch import load_file, save_file


def _write(path, header, data=b"", *, text=None):
    text = json.dumps(header) if text is None else text
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def _item(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"a": _item(0, 24, [2, 3]), "b": _item(24, 28, [1])}


def test_a_sound_file_is_read(tmp_path):
    _write(tmp_path / "model.safetensors", GOOD, bytes(28))
    folder = SafetensorsFolder(tmp_path)
    assert {name: entry.shape for name, entry in folder.entries.items()} == {"a": (2, 3), "b": (1,)}
    assert torch.equal(folder.read("a"), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        (GOOD, bytes(27), "cut short or damaged, its size"),
        (GOOD, bytes(29), "cut short or damaged, its size"),
        ({"a": _item(0, 24, [2, 4]), "b": _item(24, 28, [1])}, bytes(28), "a is not where the header should say, or not"),
        ({"a": _item(0, 24, [2, 3]), "b": _item(20, 24, [1])}, bytes(24), "b is not where"),
        ({"a": _item(0, 24, [2, 3]), "b": _item(28, 32, [1])}, bytes(32), "b is not where"),
        ({"a": _item(0, 24, [2, 3], "F8_E4M3")}, bytes(24), "a has dtype F8_E4M3, which is not supported"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, bytes(24), "its header is damaged"),
        ({"a": 3}, bytes(24), "its header is damaged"),
        ([1, 2], bytes(24), "not a safetensors file"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, header, data, text):
    _write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(WeightError, match=f"model.safetensors: .*{text}|{text}"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a safetensors file"),
        (b"short", "not a safetensors file"),
        (struct.pack("<Q", 9) + b"{not json", "not a safetensors file"),
        (struct.pack("<Q", 900) + b"{}", "its header is not all there"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_what_is_no_safetensors_file_is_said_so(tmp_path, content, text):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match=text):
        SafetensorsFolder(tmp_path)


def test_a_tensor_that_a_header_names_twice_is_refused(tmp_path):
    text = '{"a":' + json.dumps(_item(0, 24, [2, 3])) + ',"a":' + json.dumps(_item(24, 48, [2, 3])) + "}"
    _write(tmp_path / "model.safetensors", None, bytes(48), text=text)
    with pytest.raises(WeightError, match="names a tensor twice"):
        SafetensorsFolder(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    save_tiny("llama", tmp_path / "plain").save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    return tmp_path / "hf"


def _index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def _set_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_tensor_in_two_shards_is_named(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors, name = load_file(second), min(load_file(first))
    save_file({**tensors, name: torch.zeros(3)}, second)
    with pytest.raises(WeightError, match=f"{second.name}: {name} stands in {first.name} too"):
        open_source(sharded)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded):
    index = _index(sharded)
    name = min(index["weight_map"])
    del index["weight_map"][name]
    _set_index(sharded, index)
    with pytest.raises(WeightError, match=f"does not list {name}"):
        open_source(sharded)


def test_a_tensor_that_the_index_puts_into_another_shard_is_named(sharded):
    index = _index(sharded)
    name, true = min(index["weight_map"].items())
    index["weight_map"][name] = next(file for file in index["weight_map"].values() if file != true)
    _set_index(sharded, index)
    with pytest.raises(WeightError, match=f"names {name} in model-.*, which does not hold it"):
        open_source(sharded)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "{}"])
def test_an_index_that_is_none_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightError, match=r"not a weight index|names no tensor"):
        open_source(sharded)


def test_an_index_does_not_reach_outside_its_folder(sharded):
    index = _index(sharded)
    index["weight_map"][min(index["weight_map"])] = "../plain/model.safetensors"
    _set_index(sharded, index)
    with pytest.raises(WeightError, match="which is not a file of this folder"):
        open_source(sharded)


def test_two_sets_of_weights_in_one_folder_are_refused(sharded):
    """transformers would take the single file, others the index."""
    save_file({"a": torch.zeros(3)}, sharded / "model.safetensors")
    with pytest.raises(WeightError, match=r"holds model.safetensors and model.safetensors.index.json"):
        open_source(sharded)


def test_pickled_files_beside_safetensors_are_not_touched(tmp_path):
    model = save_tiny("llama", tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    source = open_source(tmp_path / "hf")
    name = "decoder.final_layernorm.weight"
    assert torch.equal(source.read(source.whole(name)), model.state_dict()["model.norm.weight"])


def test_a_folder_without_weights_still_has_a_configuration(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert open_source(tmp_path / "hf", weights=False).arch.vocab == 131
    with pytest.raises(WeightError, match=r"no model.safetensors and no model.safetensors.index.json"):
        open_source(tmp_path / "hf")


def _planned(*names):
    return [Planned(name=name, shape=(2, 3), dtype=torch.float32) for name in names]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("a", torch.zeros(2, 3))], "b: planned as"),
        ([("b", torch.zeros(2, 3)), ("a", torch.zeros(2, 3))], "a: planned as .* got b"),
        ([("a", torch.zeros(3, 2)), ("b", torch.zeros(2, 3))], "a: planned as"),
        ([("a", torch.zeros(2, 3).bfloat16()), ("b", torch.zeros(2, 3))], "a: planned as"),
        ([(name, torch.zeros(2, 3)) for name in "abc"], "c: not planned"),
    ],
)
def test_tensors_that_are_not_those_planned_are_not_written_as_such(tmp_path, tensors, text):
    with pytest.raises(WeightError, match=text):
        write_folder(tmp_path, _planned("a", "b"), tensors, max_shard=10**6)


@pytest.mark.parametrize("max_shard", [1, 24, 47, 48, 10**6])
def test_what_is_written_is_what_safetensors_reads(tmp_path, max_shard):
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(4, 5).t(),
        "c": torch.randn(7).bfloat16(),
        "d": torch.tensor([[True, False]]),
        "e": torch.randn(3, 4)[1:, 2:],
    }
    planned = [Planned(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()]
    write_folder(tmp_path, planned, tensors.items(), max_shard=max_shard)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
        size = sum(tensor.nbytes for tensor in load_file(path).values())
        assert size <= max_shard or len(load_file(path)) == 1
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    assert SafetensorsFolder(tmp_path).entries.keys() == tensors.keys()
