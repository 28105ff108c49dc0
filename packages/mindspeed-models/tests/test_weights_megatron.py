"""Checkpoints in megatron-core's own hands, and in every layout."""

from functools import partial

import pytest
import torch
import weights_ranks as ranks
from mindspeed_models.testing import save_tiny
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.safetensors_files import SafetensorsFolder
from mindspeed_models.weights.source import open_source
from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.rundir import write_manifest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.dist


def _size(layout):
    return parse_layout(layout).ranks


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-bias", "tp2"),
        ("qwen3", "pp2vpp2"),
        ("llama-tied", "tp2pp2"),
        ("llama-6q3kv", "tp3"),
        ("qwen2_moe", "ep2dp2"),
        ("glm4_moe", "tp2pp2sp"),
    ],
)
def test_megatron_core_reads_a_converted_checkpoint_itself(tmp_path, pool, name, layout):
    """131 tokens: on two and on three tensor ranks some rows of the vocabulary are padding."""
    save_tiny(name, tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    for theirs, ours in pool.run(ranks.loaded_by_megatron, layout, tmp_path / "ck", nproc=_size(layout)):
        for found in ours.values():
            assert found.keys() == theirs.keys()
            for key, value in found.items():
                same = value == theirs[key]
                if "word_embeddings" in key or "output_layer" in key:
                    same |= value.eq(0).all(-1, keepdim=True)  # padding: zero here, untouched there
                assert same.all(), key


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", "tp1"), ("qwen3", "tp2"), ("llama-tied", "tp2"), ("mixtral", "tp1"), ("mixtral", "ep2dp2")],
)
def test_stock_megatron_computes_with_a_converted_checkpoint(tmp_path, pool, name, layout):
    model = save_tiny(name, tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    tokens = torch.randint(0, model.config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(3))
    expected = model(tokens, use_cache=False).logits.detach()
    options = {"qk_norm": name == "qwen3", "tied": name == "llama-tied"}
    ask = partial(ranks.stock_logits, **options)
    for logits in pool.run(ask, layout, tmp_path / "ck", tokens, nproc=_size(layout)):
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("llama-6q3kv", ("tp3", "tp1")), ("qwen2", ("tp2pp2", "pp2vpp2")), ("glm4_moe", ("ep2dp2", "tp2sp", "tp2pp2sp"))],
)
def test_a_checkpoint_that_went_through_layouts_exports_the_same_bits(tmp_path, pool, name, layouts):
    save_tiny(name, tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck0")
    for number, layout in enumerate(layouts):
        folder = tmp_path / f"ck{number + 1}"
        (folder / "model").mkdir(parents=True)
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_bytes((tmp_path / "ck0" / "hf" / "config.json").read_bytes())
        pool.run(ranks.saved_again, layout, tmp_path / f"ck{number}", folder / "model", nproc=_size(layout))
        write_manifest(folder, "weights")
    to_hf(open_source(tmp_path / f"ck{len(layouts)}"), tmp_path / "back")
    before, after = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "back")
    assert before.entries.keys() == after.entries.keys()
    assert all(torch.equal(before.read(key), after.read(key)) for key in before.entries)
    assert after.entries["model.embed_tokens.weight"].shape[0] == 131


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "tp2pp2"), ("llama-6q3kv", "tp3"), ("glm4_moe", "tp2ep2dp2sp")])
def test_each_rank_reads_the_bytes_that_it_holds_and_no_others(tmp_path, pool, name, layout):
    save_tiny(name, tmp_path / "hf")
    for read, held in pool.run(ranks.bytes_read, layout, tmp_path / "hf", nproc=_size(layout)):
        assert read == held
