"""The verifier itself: it accepts what is right in every layout, and names what is planted."""

import json
import math
import re
import shutil

import pytest
import torch
from mindspeed_kernels.errors import UserError
from mindspeed_models.testing import save_tiny, save_tiny_chat
from mindspeed_models.weights.convert import to_megatron
from mindspeed_models.weights.shards import Piece, save_pieces
from mindspeed_models.weights.source import open_source
from mindspeed_tools import verify as verify_module
from mindspeed_tools.verify import verify
from safetensors.torch import load_file

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama-bias", "tp1,tp2,pp2,tp2pp2"),
        ("llama-6q3kv", "tp1,tp3"),
        ("llama-llama3", "tp2sp"),
        ("llama-tied", "tp1,tp2,pp2"),
        ("llama-yarn", "tp1,tp2"),
        ("llama-dynamic", "tp1,pp2"),
        ("llama-longrope", "tp2"),
        ("qwen2-yarn", "pp2"),
        ("mistral-window", "tp1,tp2"),
        ("phi3", "tp2"),
        ("phi3-longrope", "tp1"),
        ("smollm3", "pp2vpp2"),
        ("smollm3-window", "tp2,pp2"),
        ("seed_oss", "tp2"),
        ("seed_oss-bias", "tp2,pp2"),
        ("internlm3", "tp2"),
        ("gemma", "tp2sp,pp2"),
        ("gemma-bias", "tp2"),
        ("gemma2", "tp1,tp2sp,pp2"),
        ("gemma2-bias", "tp2"),
        ("gemma3_text", "tp1,tp2sp,pp2"),
        ("olmo2", "tp1,tp2sp,pp2"),
        ("olmo2-6q3kv", "tp3"),
        ("minicpm3", "tp1,tp2,pp2"),
        ("minicpm3-bias", "tp2sp"),
        ("glm", "tp1,tp2"),
        ("glm4", "tp2sp,pp2"),
        ("mixtral", "tp1,ep2dp2"),
        ("mixtral-window", "tp2sp"),
        ("qwen2_moe", "tp1,tp2ep2sp"),
        ("qwen2_moe-normalised", "tp2sp,pp2"),
        ("qwen3_moe", "tp1,ep2dp2"),
        ("qwen3_moe-sparse", "pp2vpp2"),
        ("glm4_moe", "tp1,tp2sp,ep2dp2"),
        ("glm4_moe-groups", "tp1"),
        ("deepseek_v3", "tp1,tp2sp,pp2"),
        ("deepseek_v3-yarn", "tp2ep2sp"),
        ("deepseek_v2", "tp1,ep2dp2"),
        ("deepseek_v2-greedy", "tp2sp"),
        ("qwen3_next", "tp1,tp2sp,ep2dp2"),
        ("qwen3_next-bias", "tp2sp,pp2"),
        ("gpt_oss", "tp1,tp2sp,ep2dp2"),
        ("gpt_oss-tied", "tp2sp,pp2"),
        ("mamba2", "tp1,tp2,pp2"),
        ("mamba2-bias", "tp1"),
        ("bamba", "tp2sp,pp2"),
        ("bamba-bias", "tp1"),
        pytest.param("qwen3_next", "auto", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "auto", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "auto", marks=pytest.mark.slow),
        pytest.param("glm4", "auto", marks=pytest.mark.slow),
        pytest.param("qwen2", "auto", marks=pytest.mark.slow),
        ("qwen2-window", "tp1,pp2"),
        ("qwen3", "auto"),
        ("qwen3-bias", "tp2"),
    ],
)
def test_a_true_conversion_is_verified_in_every_layout(tmp_path, name, layouts):
    save_tiny(name, tmp_path / "hf")
    report = verify(tmp_path / "hf", None, layouts=layouts, gradients=True)
    assert report.holds, report
    assert all(0 < item.gradients <= 1e-10 for item in report.layouts)
    if layouts == "auto":
        usual = ["tp1", "tp2", "pp2", "tp2pp2", "pp2vpp2"]
        with_experts = ["tp1", "tp2sp", "pp2", "ep2dp2", "tp2ep2sp", "tp2pp2sp", "pp2vpp2"]
        assert [item.layout for item in report.layouts] == (
            with_experts if name in ("glm4_moe", "deepseek_v3", "qwen3_next") else usual
        )


def test_a_model_type_of_code_that_travels_with_the_weights_is_proved_against_the_class_of_the_same_graph(tmp_path):
    save_tiny("deepseek_v3", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    report = verify(tmp_path / "hf", None, layouts="tp1")
    assert report.holds and report.layouts[0].logits < 1e-12
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    assert json.loads((tmp_path / "ck" / "hf" / "config.json").read_text())["model_type"] == "kimi_k2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
            "internlm3",
            "llama",
            "minicpm3",
            "mistral",
            "olmo2",
            "phi3",
        ),
        *("qwen2", "qwen3", "seed_oss", "smollm3", "bamba", "mamba2", "qwen3_next"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"),
    ],
)
def test_every_family_holds_its_bound_in_fp32_in_every_layout(tmp_path, name):
    save_tiny(name, tmp_path / "hf")
    report = verify(tmp_path / "hf", None, precision="fp32")
    assert report.holds and len(report.layouts) >= 4, report
    assert all(item.tolerance == 1e-4 and item.logits > 1e-9 for item in report.layouts)


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3", "fp32"), ("qwen3", "bf16"), ("gemma2", "bf16"), ("olmo2", "bf16")]
)
def test_narrower_precisions_hold_their_own_bounds(tmp_path, name, precision):
    save_tiny(name, tmp_path / "hf")
    report = verify(tmp_path / "hf", None, layouts="tp1,tp2", precision=precision)
    assert report.holds, report
    assert all(item.logits > 1e-9 for item in report.layouts)  # it was not fp64


def test_a_gradient_that_is_not_summed_over_ranks_is_named(tmp_path, monkeypatch):
    save_tiny("qwen3", tmp_path / "hf")
    monkeypatch.setattr(verify_module, "_GRADIENTS", "verify_faults:without_norm_reduction")
    report = verify(tmp_path / "hf", None, layouts="tp2sp", gradients=True)
    assert not report.holds
    assert re.fullmatch(r"layout tp2sp: the gradient of model\.\S*norm\.weight differs by .*", report.first_failure)
    assert report.layouts[0].logits < 1e-10


def test_a_gradient_that_one_side_alone_has_is_named(converted):
    """Weights stand for gradients here: both are compared by the same names."""
    source, theirs = open_source(converted / "hf"), converted / "gradients.pt"
    whole = {name: tensor.double() for name, tensor in load_file(converted / "hf" / "model.safetensors").items()}
    compare = verify_module._compare_gradients
    torch.save(whole, theirs)
    assert compare(source, converted / "ck" / "model", theirs) == (0.0, "")
    torch.save({**whole, "model.extra.weight": torch.ones(3)}, theirs)
    assert compare(source, converted / "ck" / "model", theirs) == (
        math.inf,
        "model.extra.weight (of transformers alone)",
    )
    del whole["model.norm.weight"]
    torch.save(whole, theirs)
    assert compare(source, converted / "ck" / "model", theirs) == (math.inf, "model.norm.weight (ours alone)")


def test_gradients_are_a_matter_of_fp64(tmp_path):
    save_tiny("qwen3", tmp_path / "hf")
    with pytest.raises(UserError, match="--gradients: they are compared in fp64"):
        verify(tmp_path / "hf", None, gradients=True, precision="bf16")


def test_a_layout_that_the_model_does_not_allow_is_refused(tmp_path):
    save_tiny("llama", tmp_path / "hf")
    with pytest.raises(
        UserError, match=r"--layouts tp3: parallel.tensor=3: 4 heads do not divide by it; use one of 1, 2"
    ):
        verify(tmp_path / "hf", None, layouts="tp3")


@pytest.fixture
def converted(tmp_path):
    save_tiny_chat("qwen3", tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    return tmp_path


def _change_config(checkpoint, **changes):
    path = checkpoint / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _rewrite(checkpoint, change):
    """Write the weights of a checkpoint anew, after ``change`` of the tensors by name."""
    source = open_source(checkpoint)
    tensors = {name: source.read(source.whole(name)) for name in source.rules}
    change(tensors)
    boxes = {name: source.whole(name) for name in tensors}
    shutil.rmtree(checkpoint / "model")
    (checkpoint / "model").mkdir()
    save_pieces(checkpoint / "model", [Piece(box=boxes[n], dtype=t.dtype, fill=t) for n, t in tensors.items()])


def test_a_norm_weight_that_was_nudged_is_named(converted):
    def nudge(tensors):
        tensors["decoder.layers.2.mlp.linear_fc1.layer_norm_weight"][7] += 1e-3

    _rewrite(converted / "ck", nudge)
    report = verify(converted / "hf", converted / "ck", layouts="tp1")
    assert not report.holds
    assert report.first_failure.startswith("tensor model.layers.2.post_attention_layernorm.weight")
    assert report.layouts[0].first == "layers.2.pre_mlp_layernorm"


def test_a_wrong_rotary_base_in_the_checkpoint_is_named(converted):
    _change_config(converted / "ck", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    report = verify(converted / "hf", converted / "ck", layouts="tp1")
    assert report.first_failure.startswith("configuration key rope_parameters: ")


def test_a_flipped_tie_is_named(converted):
    _change_config(converted / "ck", tie_word_embeddings=True)
    report = verify(converted / "hf", converted / "ck", layouts="tp1")
    assert report.first_failure == "configuration key tie_word_embeddings: False in the model, True in the checkpoint"


PLUGIN = """
import dataclasses

from mindspeed_models.families.family import Family
from mindspeed_models.families.qwen3 import arch, decoder_rules
from mindspeed_models.weights.rule import Segment


def rules(found):
    return tuple(changed(rule) for rule in decoder_rules(found))


def changed(rule):
    {change}
    return rule


def other_arch(settings):
    found = arch(settings)
    {arch}
    return found


FAMILY = Family(name="qwen3", model_types=("qwen3",), arch=other_arch, rules=rules)
"""
SWAPPED = """if "linear_fc1.weight" in rule.ours:
        return dataclasses.replace(rule, order=rule.order[::-1])"""
PERMUTED = """if "linear_qkv.weight" in rule.ours:
        order = list(rule.order)
        order[0], order[3] = order[3], order[0]
        order[1], order[4] = order[4], order[1]
        return dataclasses.replace(rule, order=tuple(order))"""
BASE = """found = dataclasses.replace(found, rope=dataclasses.replace(found.rope, theta=found.rope.theta * 1.001))"""


@pytest.mark.parametrize(
    ("change", "arch", "first"),
    [
        (SWAPPED, "", "layers.0.mlp"),
        (PERMUTED, "", "layers.0.self_attention"),
        ("", BASE, "layers.0.self_attention"),
        ("", "found = dataclasses.replace(found, norm_eps=2e-6)", "layers.0.input_layernorm"),
    ],
    ids=["gate and up swapped", "query and key rows permuted", "rotary base", "norm epsilon"],
)
def test_a_fault_that_keeps_every_tensor_is_found_by_what_is_computed(converted, monkeypatch, change, arch, first):
    """Both directions of the rules share the fault, so the round trip is bit-equal: only the maths shows it."""
    site = converted / "site"
    (site / "wrong-1.dist-info").mkdir(parents=True)
    (site / "wrong_family.py").write_text(PLUGIN.format(change=change or "pass", arch=arch or "pass"))
    (site / "wrong-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1\n")
    entry = "[mindspeed.families]\nqwen3 = wrong_family:FAMILY\n"
    (site / "wrong-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(site)
    report = verify(converted / "hf", None, layouts="tp1,tp2")
    assert not report.differing_tensors
    assert [item.holds for item in report.layouts] == [False, False]
    assert {item.first for item in report.layouts} == {first}
    assert report.first_failure.startswith("layout tp1: differs by")
    import sys

    sys.modules.pop("wrong_family", None)


def test_a_checkpoint_with_padded_rows_is_refused_by_name(converted):
    source = open_source(converted / "ck")
    pieces = []
    for name in source.rules:
        tensor, box = source.read(source.whole(name)), source.whole(name)
        if name == "output_layer.weight":
            tensor = torch.cat((tensor, torch.ones(1, tensor.shape[1])))
            box = type(box)(key=name, whole=tuple(tensor.shape), offset=(0, 0), shape=tuple(tensor.shape))
        pieces.append(Piece(box=box, dtype=tensor.dtype, fill=tensor))
    shutil.rmtree(converted / "ck" / "model")
    (converted / "ck" / "model").mkdir()
    save_pieces(converted / "ck" / "model", pieces)
    with pytest.raises(UserError, match=r"output_layer.weight has shape \(312, 64\), hf/config.json means \(311, 64\)"):
        verify(converted / "hf", converted / "ck", layouts="tp1")


def test_a_padded_row_in_the_softmax_shows_in_the_loss_and_not_in_the_logits(converted, monkeypatch):
    """The planted fault is a decoder, of another distribution, that forgets that rows are padding."""
    site = converted / "leak"
    site.mkdir()
    (site / "sitecustomize_leak.py").write_text(
        "from mindspeed_parallel.megatron.decoder import Decoder\n"
        "Decoder._without_padding = lambda self, logits: logits\n"
        "from mindspeed_models.families.qwen3 import QWEN3 as FAMILY\n"
    )
    (site / "leak-1.dist-info").mkdir()
    (site / "leak-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: leak\nVersion: 1\n")
    entry = "[mindspeed.families]\nqwen3 = sitecustomize_leak:FAMILY\n"
    (site / "leak-1.dist-info" / "entry_points.txt").write_text(entry)
    from mindspeed_parallel.megatron.decoder import Decoder

    kept = Decoder._without_padding
    monkeypatch.syspath_prepend(site)
    try:
        report = verify(converted / "hf", None, layouts="tp1,tp2")
    finally:
        Decoder._without_padding = kept
    one, two = report.layouts
    assert one.holds  # 311 rows need no padding there
    assert two.logits < 1e-12
    assert two.loss > 1e-4
    assert two.first == "loss"
