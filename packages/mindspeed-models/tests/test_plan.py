"""The plan in integers. That it equals what is allocated, to the byte, is shown where models are trained."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from mindspeed_models.cli import plan_command
from mindspeed_models.families import describe
from mindspeed_models.plan import check_plan, make_plan
from mindspeed_models.testing import TINY, save_tiny, tiny_config, tiny_model
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.recipe import (
    DataConfig,
    MegatronConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainingConfig,
)


def _recipe(*, tensor=1, pipeline=1, precision="bf16", global_batch=8, **megatron):
    return Recipe(
        model=ModelConfig(path="m"),
        data=DataConfig(train=("d",)),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        megatron=MegatronConfig(**megatron),
        training=TrainingConfig(steps=1, global_batch=global_batch, precision=precision),
    )


def _arch(name):
    return describe(tiny_config(name).to_dict())[1]


@pytest.mark.parametrize("name", sorted(TINY))
def test_one_rank_holds_the_parameters_of_the_model(name):
    count = sum(parameter.numel() for parameter in tiny_model(name).parameters())
    plan = make_plan(_recipe(distributed_optimizer=False), _arch(name), 1)
    (rank,) = plan.ranks
    assert plan.model_parameters == rank.parameters == count
    assert (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes) == (2 * count, 4 * count, 12 * count)
    (rank,) = make_plan(_recipe(distributed_optimizer=False, precision="fp32"), _arch(name), 1).ranks
    assert (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes) == (4 * count, 4 * count, 8 * count)


def test_stages_and_tensor_ranks_share_the_parameters_out():
    arch = _arch("qwen2")  # untied, 131 tokens: one row of padding in embedding and output at tp2
    whole = make_plan(_recipe(), arch, 1).model_parameters
    plan = make_plan(_recipe(tensor=2, pipeline=2), arch, 4)
    assert [(r.tensor_rank, r.pipeline_rank) for r in plan.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    replicated = 2 * arch.num_layers * arch.hidden + arch.hidden  # norms, held by both tensor ranks
    padding = 2 * arch.hidden
    assert sum(rank.parameters for rank in plan.ranks) == whole + replicated + padding


def test_a_tied_model_has_its_embedding_on_both_ends_of_a_pipeline():
    arch = _arch("llama-tied")
    whole = make_plan(_recipe(), arch, 1).model_parameters
    ranks = make_plan(_recipe(pipeline=2), arch, 2).ranks
    assert sum(rank.parameters for rank in ranks) == whole + arch.vocab * arch.hidden


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_distributed_optimizer_shares_its_state_out_and_nothing_is_lost(size):
    arch = _arch("llama")
    count = make_plan(_recipe(), arch, 1).model_parameters
    ranks = make_plan(_recipe(global_batch=24), arch, size).ranks
    assert sum(rank.optimizer_bytes for rank in ranks) == 12 * count
    assert max(rank.optimizer_bytes for rank in ranks) < 12 * count / size * 1.05
    assert {rank.gradient_bytes for rank in ranks} == {ranks[0].gradient_bytes}
    assert (
        0 <= ranks[0].gradient_bytes - 4 * count < 4 * (64 * 40 + 128 * size)
    )  # padding of each parameter, of the end


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "expected"),
    [
        (None, 2, 1, [((0, 1),), ((2, 3),)]),
        (None, 2, 2, [((0,), (2,)), ((1,), (3,))]),
        ((1, 3), 2, 1, [((0,),), ((1, 2, 3),)]),
        ((1, 1, 1, 1), 2, 2, [((0,), (2,)), ((1,), (3,))]),
    ],
)
def test_layers_are_dealt_to_chunks(layers, pipeline, virtual, expected):
    plan = make_plan(_recipe(pipeline=pipeline, virtual=virtual, layers=layers), _arch("llama-4L"), pipeline)
    assert [rank.layers for rank in plan.ranks] == expected


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "text"),
    [
        ("llama", {"tensor": 3}, 3, r"parallel.tensor=3: 4 heads do not divide by it; use one of 1, 2"),
        ("llama", {"tensor": 4}, 4, r"parallel.tensor=4: 2 kv heads do not divide by it; use one of 1, 2"),
        ("llama-ffn97", {"tensor": 2}, 2, r"parallel.tensor=2: 97 MLP columns do not divide by it; use one of 1$"),
        (
            "llama-5L",
            {"pipeline": 2},
            2,
            r"parallel.pipeline=2: 5 layers do not divide into 2 chunks .* pipeline of 1, 5",
        ),
        ("llama-4L", {"pipeline": 2, "virtual": 4}, 2, "4 layers do not divide into 8 chunks"),
        ("llama-5L", {"pipeline": 2, "layers": (2, 2)}, 2, "add up to 4, the model has 5 layers"),
        ("llama-5L", {"pipeline": 2, "layers": (5, 0)}, 2, "every chunk needs at least one layer"),
        ("llama-5L", {"pipeline": 2, "layers": (1, 2, 2)}, 2, "3 numbers for 2 chunks"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would_do(name, changes, ranks, text):
    with pytest.raises(ConfigError, match=text):
        check_plan(_recipe(**changes), _arch(name), ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "axes", "text"),
    [
        ("llama", 2, {"context": 2}, "parallel.context=2: not supported for family llama; use 1"),
        ("llama", 2, {"expert": 2}, "parallel.expert=2: family llama has no experts; use 1"),
        ("qwen3_moe", 4, {"expert": 4}, "parallel.expert=4: 6 experts do not divide by it; use one of 1, 2$"),
        ("qwen3_moe", 4, {"expert": 3}, "expert=3: 4 ranks of a pipeline stage do not divide by it; use one of 1, 2$"),
        (
            "qwen3_moe",
            2,
            {"expert": 2, "pipeline": 2},
            "1 ranks of a pipeline stage do not divide by it; use one of 1$",
        ),
        ("qwen3_moe", 2, {"tensor": 2}, "parallel.tensor=2: .* share out the tokens; set parallel.sequence to true"),
        ("qwen2_moe", 2, {"context": 2}, "parallel.context=2: not supported for family qwen2_moe"),
    ],
)
def test_axes_that_a_model_lacks_or_does_not_divide_are_refused(name, ranks, axes, text):
    with pytest.raises(ConfigError, match=text):
        check_plan(replace(_recipe(), parallel=ParallelConfig(**axes)), _arch(name), ranks)


@pytest.mark.parametrize(("expert", "tensor"), [(1, 1), (2, 1), (2, 2), (6, 1)])
def test_experts_are_dealt_to_ranks_and_their_state_to_the_copies(expert, tensor):
    arch, size = _arch("qwen3_moe"), 6 * tensor
    parallel = ParallelConfig(expert=expert, tensor=tensor, sequence=tensor > 1)
    plan = make_plan(replace(_recipe(global_batch=6), parallel=parallel), arch, size)
    experts = len(arch.moe.layers) * arch.moe.num_experts * 3 * arch.moe.ffn * arch.hidden
    others = make_plan(_recipe(tensor=1), arch, 1).model_parameters - experts
    assert plan.model_parameters == others + experts
    alike = [rank for rank in plan.ranks if rank.tensor_rank == 0]
    assert {rank.parameters for rank in alike} == {plan.ranks[0].parameters}
    if tensor == 1:
        assert plan.ranks[0].parameters == others + experts // expert
        assert sum(rank.optimizer_bytes for rank in plan.ranks) == 12 * (others + experts)


def test_the_command_prints_what_the_function_says(tmp_path):
    save_tiny("qwen3", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()  # a plan needs no weights
    (tmp_path / "r.yaml").write_text(
        "stage: pretrain\nmodel: {path: m}\ndata: {train: [d.txt]}\nparallel: {pipeline: 2}\n"
        "training: {steps: 1, global_batch: 8}\n"
    )
    (tmp_path / "d.txt").write_text("text")
    done = CliRunner().invoke(
        plan_command, [str(tmp_path / "r.yaml"), "--nproc", "2", "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    expected = make_plan(_recipe(pipeline=2), _arch("qwen3"), 2)
    assert found["model_parameters"] == expected.model_parameters
    assert [rank["optimizer_bytes"] for rank in found["ranks"]] == [rank.optimizer_bytes for rank in expected.ranks]
    assert found["microbatches"] == 8
    table = CliRunner().invoke(plan_command, [str(tmp_path / "r.yaml"), "--nproc", "2"], catch_exceptions=False)
    assert f"{expected.model_parameters:,} parameters on 2 ranks" in table.stdout
