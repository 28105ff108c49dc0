"""The trainer against one process, against transformers, against itself resumed; each proof with a fault that it must see."""

import dataclasses
import json
import math

import pytest
import training_ranks as ranks
from mindspeed_models.plan import make_plan
from mindspeed_models.testing import TINY, save_tiny, save_tiny_chat
from mindspeed_models.weights.source import open_source
from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.config import ConfigError, build_recipe
from mindspeed_train.prove import BOUND, DEFAULT_LAYOUTS, prove_layouts, prove_resume, with_layout

pytestmark = pytest.mark.dist

ROWS = [
    ("What is two and two?", "Four."),
    ("Say a long thing.", "It goes on and on, word after word, until it ends."),
    ("Hello!", "hello world"),
    ("Unicode?", "na\u00efve \u6f22\u5b57 \U0001f600"),
    ("Count.", "one two three four five six seven"),
    ("A question that is itself rather long, with many words in it?", "Yes."),
    ("Why?", "Because."),
    ("Name a color.", "Blue, or green, or red."),
    ("And then?", "Then nothing."),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    for name in (
        "qwen3",
        "llama-tied",
        "llama-5L",
        "glm4",
        "qwen2_moe",
        "glm4_moe",
        "deepseek_v3",
        "qwen3_next",
        "mamba2",
        "gpt_oss",
    ):
        save_tiny_chat(name, folder / name)
    # Without experts: how many rows a product has changes its rounding, and experts see those of all documents.
    save_tiny_chat("qwen3_next", folder / "qwen3_next-mlp", mlp_only_layers=[0, 1, 2, 3])
    # 12 tokens: the second document of packed_leak is longer, the first is not.
    save_tiny_chat("llama-dynamic", folder / "llama-dynamic", max_position_embeddings=12)
    rope = {**TINY["llama-longrope"]["rope_parameters"], "original_max_position_embeddings": 12}
    save_tiny_chat("llama-longrope", folder / "llama-longrope", rope_parameters=rope)
    with (folder / "rows.jsonl").open("w") as file:
        for question, answer in ROWS:
            roles = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": roles}) + "\n")
    return folder


def _recipe(made, name="qwen3", layout="tp1", **sections):
    base = {
        "model": {"path": str(made / name)},
        "data": {"train": [str(made / "rows.jsonl")], "format": "messages", "sequence": 96, "packing": True},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "training": {"steps": 4, "global_batch": 4, "precision": "fp32"},
        "checkpoint": {"folder": str(made / "out")},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return with_layout(build_recipe(base), parse_layout(layout))


def test_every_layout_equals_one_process(made, tmp_path):
    verdicts = prove_layouts(_recipe(made), DEFAULT_LAYOUTS, tmp_path)
    assert [verdict.layout for verdict in verdicts] == list(DEFAULT_LAYOUTS)
    for verdict in verdicts:
        assert verdict.holds, verdict
        assert {item.quantity for item in verdict.differences} == {"loss", "gradient norm", "gradient", "weight"}


def test_a_tied_model_equals_one_process_too(made, tmp_path):
    assert all(verdict.holds for verdict in prove_layouts(_recipe(made, "llama-tied"), ["tp2", "pp2", "dp2"], tmp_path))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("qwen2_moe", "tp2sp,pp2vpp2,dp2,ep2dp2,tp2ep2sp"),
        ("glm4_moe", "tp2sp,ep2dp2,tp2pp2sp,tp2ep2dp2sp"),
        ("deepseek_v3", "tp2sp,pp2vpp2,tp2ep2sp,ep2dp2"),
        ("qwen3_next", "tp2sp,pp2,ep2dp2"),
        ("gpt_oss", "tp2sp,ep2dp2"),
        ("mamba2", "tp2,tp2sp,pp2,dp2"),
    ],
)
def test_a_model_with_experts_latents_or_states_equals_one_process_in_every_layout(made, tmp_path, name, layouts):
    """Tokens without a label go through the experts as well; the fault of tensor ranks is planted further down."""
    verdicts = prove_layouts(_recipe(made, name), layouts.split(","), tmp_path)
    assert all(verdict.holds for verdict in verdicts), verdicts


@pytest.mark.parametrize(
    ("layout", "observe", "quantity"),
    [
        ("tp2sp", ranks.without_norm_reduction, "gradient"),
        ("dp2", ranks.without_data_reduction, "gradient"),
        ("dp2", ranks.with_a_batch_twice, "loss"),
    ],
)
def test_a_planted_fault_is_seen(made, tmp_path, layout, observe, quantity):
    (verdict,) = prove_layouts(_recipe(made), [layout], tmp_path, observe=observe)
    assert not verdict.holds
    assert next(item.value for item in verdict.differences if item.quantity == quantity) > 1e6 * BOUND


def test_training_equals_plain_pytorch_training_of_the_transformers_model(made, tmp_path, pool):
    recipe = _recipe(
        made,
        data={"packing": False, "padding": "longest"},
        optimizer={"lr": 1e-3, "clip": None, "decay_1d": True, "weight_decay": 0.1},
        training={"global_batch": 4, "micro_batch": 2},
    )
    (losses,) = pool.run(ranks.beside_transformers, recipe, tmp_path, 20, nproc=1)
    assert len(losses) == 20
    assert losses[0][0] > 1.5 * losses[-1][0]  # it did train
    for ours, theirs in losses:
        assert abs(ours - theirs) <= 1e-5 * theirs


@pytest.mark.parametrize(
    ("name", "layout", "precision", "sharded"),
    [
        ("qwen3", "tp1", "bf16", False),
        ("qwen3", "tp1", "fp32", True),
        ("qwen3", "tp2", "bf16", True),
        ("llama-tied", "pp2", "bf16", True),
        ("qwen3", "dp2", "bf16", True),
        ("llama-tied", "pp2dp2", "bf16", True),
        ("qwen3", "pp2vpp2", "fp32", True),
        ("qwen3", "tp2dp2", "fp32", True),
        ("glm4", "dp2", "bf16", True),
        ("qwen2_moe", "ep2dp2", "bf16", True),
        ("qwen2_moe", "tp2sp", "bf16", True),
        ("qwen2_moe", "tp2pp2sp", "fp32", False),
        ("glm4_moe", "tp2ep2dp2sp", "bf16", True),
        ("deepseek_v3", "tp2ep2sp", "bf16", True),
        ("qwen3_next", "tp2sp", "bf16", True),
        ("mamba2", "tp2dp2", "bf16", True),
        ("gpt_oss", "tp2ep2sp", "bf16", True),
    ],
)
def test_the_plan_is_exact_to_the_byte(made, tmp_path, pool, name, layout, precision, sharded):
    size = parse_layout(layout).ranks
    recipe = _recipe(made, name, layout, training={"precision": precision}, megatron={"distributed_optimizer": sharded})
    plan = make_plan(recipe, open_source(made / name).arch, size)
    measured = pool.run(ranks.measured, recipe, tmp_path, nproc=size)
    assert [(r.parameter_bytes, r.gradient_bytes, r.optimizer_bytes) for r in plan.ranks] == measured


@pytest.mark.parametrize(
    ("name", "layout", "sections", "text"),
    [
        ("qwen3", "tp4", {}, r"parallel.tensor=4: 2 kv heads do not divide by it; use one of 1, 2"),
        ("llama-5L", "pp2", {}, r"parallel.pipeline=2: 5 layers do not divide into 2 chunks"),
        ("qwen3", "ep2dp2", {}, r"parallel.expert=2: family qwen3 has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(made, name, layout, sections, text):
    with pytest.raises(ConfigError, match=text):
        make_plan(_recipe(made, name, layout, **sections), open_source(made / name).arch, parse_layout(layout).ranks)


def test_a_width_that_tp_does_not_divide_is_refused(tmp_path, made):
    save_tiny("llama-ffn97", tmp_path / "m")
    with pytest.raises(ConfigError, match="97 MLP columns do not divide by it"):
        make_plan(_recipe(made, layout="tp2"), open_source(tmp_path / "m").arch, 2)


def test_what_layers_add_is_dropped_alike_on_tensor_ranks_and_embeddings_are_not(tmp_path, made, pool):
    def loss(name, layout="tp1", **model):
        recipe = _recipe(made, layout=layout, model={"path": str(tmp_path / name), **model})
        return pool.run(ranks.one_loss, recipe, tmp_path, nproc=parse_layout(layout).ranks)[0][0]

    save_tiny_chat("seed_oss", tmp_path / "some", residual_dropout=0.3, attention_dropout=0.0)
    dropped = loss("some")
    assert loss("some", "tp2") == pytest.approx(dropped, rel=1e-12)
    assert abs(loss("some", dropout=0.0) - dropped) > 1e-3
    # All that layers add is dropped: what is left is a model whose layers add nothing.
    save_tiny_chat("seed_oss", tmp_path / "all", residual_dropout=1.0, attention_dropout=0.0)
    without = save_tiny_chat("seed_oss", tmp_path / "without")
    for layer in without.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    without.save_pretrained(tmp_path / "without")
    assert loss("all") == pytest.approx(loss("without", dropout=0.0), rel=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe", "deepseek_v3", "qwen3_next", "mamba2", "gpt_oss"])
def test_fresh_weights_know_nothing_yet_and_every_one_learns(made, tmp_path, pool, name):
    recipe = _recipe(made, name, model={"path": str(made / name), "init": "random", "init_std": 0.05})
    loss, dead = pool.run(ranks.first_gradients, recipe, tmp_path, nproc=1)[0]
    assert dead == []
    assert abs(loss - math.log(311)) < 0.3


def test_an_uneven_pipeline_keeps_every_layer(made, tmp_path, pool):
    recipe = _recipe(made, "llama-5L", "pp2")
    uneven = dataclasses.replace(recipe, megatron=dataclasses.replace(recipe.megatron, layers=(2, 3)))
    arch = open_source(made / "llama-5L").arch
    assert [rank.layers for rank in make_plan(uneven, arch, 2).ranks] == [((0, 1),), ((2, 3, 4),)]
    one = pool.run(ranks.one_loss, _recipe(made, "llama-5L"), tmp_path, nproc=1)[0]
    assert pool.run(ranks.one_loss, uneven, tmp_path, nproc=2)[0] == pytest.approx(one, rel=1e-12)
    for layers, text in (
        ((2, 2), "add up to 4, the model has 5"),
        ((0, 5), "at least one layer"),
        ((5,), "1 numbers for 2"),
    ):
        wrong = dataclasses.replace(recipe, megatron=dataclasses.replace(recipe.megatron, layers=layers))
        with pytest.raises(ConfigError, match=text):
            make_plan(wrong, arch, 2)


def test_experts_marked_as_megatron_core_marks_them_train_wrong_on_tensor_ranks(made, tmp_path):
    """Its own marks sum their gradients over data ranks alone where experts are not dealt to ranks."""
    observe = ranks.with_marks_of_megatron
    (one, two) = prove_layouts(_recipe(made, "qwen2_moe"), ["ep2dp2", "tp2sp"], tmp_path, observe=observe)
    assert one.holds
    assert not two.holds
    (gradient,) = [item for item in two.differences if item.quantity == "gradient"]
    assert gradient.value > 1e-3 and ".experts." in gradient.where


def test_keys_that_heads_share_need_a_gradient_from_all_tensor_ranks(made, tmp_path):
    """Of megatron-core's own layers, those without Transformer Engine gather them with a gradient that is only cut."""
    (verdict,) = prove_layouts(
        _recipe(made, "deepseek_v3"), ["tp2sp"], tmp_path, observe=ranks.with_shared_keys_of_each_rank
    )
    (gradient,) = [item for item in verdict.differences if item.quantity == "gradient"]
    assert gradient.value > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("qwen3", ("tp2dp2", "tp2", "dp4", "tp1", "pp2vpp2")),
        ("glm4_moe", ("tp2ep2dp2sp", "ep2dp2", "ep4dp4", "tp1", "tp2pp2sp")),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_continues_in_another_layout(made, tmp_path, pool, name, layouts, precision):
    changes = {"training": {"precision": precision}, "optimizer": {"lr": 1e-3}}
    start = _recipe(made, name, layouts[0], **changes)
    pool.run(ranks.steps_and_save, start, tmp_path, 2, tmp_path / "ck", nproc=4)
    (straight, *_) = pool.run(ranks.steps_and_save, start, tmp_path, 4, None, nproc=4)
    for layout in layouts:
        recipe, size = _recipe(made, name, layout, **changes), parse_layout(layout).ranks
        found = pool.run(ranks.load_and_step, recipe, tmp_path, 2, 4, tmp_path / "ck", nproc=size)[0]
        bound = 0.0 if layout == layouts[0] else (1e-5 if precision == "fp32" else 5e-3)
        assert found == pytest.approx(straight[2:], rel=bound, abs=0), layout


def test_resume_is_equal_in_every_byte_with_dropout_on(made, tmp_path):
    recipe = _recipe(made, layout="pp2", model={"dropout": 0.1}, training={"precision": "bf16"})
    verdict = prove_resume(recipe, tmp_path, num_ranks=2, steps=4, split=2)
    assert verdict.holds, verdict
    assert verdict.bytes > 1e6


@pytest.mark.slow
def test_the_resume_proof_sees_one_changed_byte(made, tmp_path):
    from mindspeed_train import prove

    recipe = _recipe(made, model={"dropout": 0.1})
    assert prove_resume(recipe, tmp_path, num_ranks=1, steps=3, split=1).holds
    other = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, seed=5))
    prove.run(prove._run_of(other, tmp_path / "other", 3, 3), num_ranks=1)
    verdict = prove._same_bytes(tmp_path / "straight", tmp_path / "other", steps=3, split=1, kills=0)
    assert not verdict.holds


@pytest.mark.parametrize(("layout", "who"), [("tp1", 0), ("dp2", 1), ("pp2", 0), ("tp2", 1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip_and_changes_nothing(
    made, tmp_path, pool, layout, who, value
):
    size = parse_layout(layout).ranks
    for skipped, unchanged, changed in pool.run(
        ranks.with_poison, _recipe(made, layout=layout), tmp_path, value, who, nproc=size
    ):
        assert skipped == [False, True, False]
        assert unchanged
        assert changed


def test_a_micro_batch_without_labels_adds_nothing(made, tmp_path, pool):
    same, zero, scale = pool.run(ranks.with_an_empty_batch, _recipe(made), tmp_path, nproc=1)[0]
    assert same < 1e-14 * scale
    assert zero == 0.0 < scale


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_rows_that_pad_the_vocabulary_stay_out_of_the_softmax(made, tmp_path, pool, layout):
    size = parse_layout(layout).ranks  # 311 tokens: 312 rows at tp2
    recipe = _recipe(made, layout=layout, data={"packing": False})  # logits are asked for without documents
    columns, difference = pool.run(ranks.vocabulary, recipe, tmp_path, 311, nproc=size)[0]
    assert columns == 311
    assert difference < 1e-12


def test_variable_length_is_padded_to_what_the_layout_needs_and_costs_nothing(made, tmp_path, pool):
    changes = {"data": {"packing": False, "padding": "longest", "sequence": 96}, "training": {"global_batch": 2}}
    alone, length = pool.run(ranks.one_loss, _recipe(made, **changes), tmp_path, nproc=1)[0]
    split, padded = pool.run(ranks.one_loss, _recipe(made, layout="tp2sp", **changes), tmp_path, nproc=2)[0]
    assert padded % 2 == 0 and 0 <= padded - length <= 1 and length < 96
    assert split == pytest.approx(alone, rel=1e-12)


def test_rotary_frequencies_stay_exact_in_a_bf16_model(made, pool):
    frequencies, weights = pool.run(ranks.rotary_dtype, _recipe(made, training={"precision": "bf16"}), nproc=1)[0]
    assert (frequencies, weights) == ("torch.float32", {"torch.bfloat16"})


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", "tp1"),
        ("qwen3", "tp2sp"),
        ("qwen3", "pp2"),
        ("llama-dynamic", "tp1"),
        ("llama-longrope", "pp2"),
        ("qwen3_next-mlp", "tp2sp"),
        ("mamba2", "pp2"),
    ],
)
def test_nothing_passes_between_packed_documents(made, pool, name, layout):
    """The rotary embeddings of llama depend on a length here, which is that of the document; some mixers have a state."""
    recipe = _recipe(made, name, layout)
    leak, leaks, apart = pool.run(ranks.packed_leak, recipe, nproc=parse_layout(layout).ranks)[0]
    assert leak == 0.0
    assert leaks > 1e-3  # without document numbers it does pass
    assert apart < 1e-13
