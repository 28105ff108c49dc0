"""Recipes: read strictly, with the origin of every value."""

import dataclasses

import pytest
from mindspeed_runtime.config import ConfigError, build_recipe, check_recipe, describe, dump_recipe, load_recipe
from mindspeed_runtime.recipe import Recipe

TEXT = """\
stage: sft
model: {path: model}
data:
  train: [rows.jsonl]
  format: messages
optimizer:
  lr: 1e-5
training: {steps: 3}
"""


@pytest.fixture
def recipe_file(tmp_path):
    def write(text=TEXT):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def test_a_recipe_round_trips_and_knows_its_origins(recipe_file, tmp_path):
    (tmp_path / "model").mkdir()
    loaded = load_recipe(recipe_file(), ["optimizer.clip=null", "data.packing=true", "kernels.attention=sdpa"])
    recipe = loaded.recipe
    assert recipe.optimizer.lr == 1e-5 and recipe.optimizer.clip is None and recipe.data.packing is True
    assert recipe.data.train == (str(tmp_path / "rows.jsonl"),) and recipe.model.path == str(tmp_path / "model")
    assert recipe.kernels == {"attention": "sdpa"}
    assert loaded.origins["optimizer.lr"] == "recipe.yaml:7" and loaded.origins["data.packing"] == "--set"
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again).recipe == recipe


def test_the_description_shows_value_and_origin_of_every_key(recipe_file):
    text = describe(load_recipe(recipe_file(), ["training.seed=7"]))
    lines = {line.split("#")[0].strip(): line.partition("#")[2].strip() for line in text.splitlines()}
    assert lines["lr: 1.0e-05"] == "recipe.yaml:7"
    assert lines["seed: 7"] == "--set"
    assert lines["weight_decay: 0.1"] == "default"
    assert lines["fsdp2:"] == "not used: backend is megatron"
    for section in dataclasses.fields(Recipe):
        assert any(key.startswith(section.name + ":") for key in lines)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            ("lr: 1e-5", "learning_rate: 1e-5"),
            "recipe.yaml:7: optimizer.learning_rate: no such key; there are name, lr",
        ),
        (("lr: 1e-5", "weight_decy: 1e-5"), r"optimizer.weight_decy: no such key; did you mean weight_decay\?"),
        (("optimizer:", "optimiser:"), r"recipe.yaml:6: optimiser: no such key; did you mean optimizer\?"),
        (("lr: 1e-5", "lr: fast"), 'recipe.yaml:7: optimizer.lr: input should be a valid number, got "fast"'),
        (("lr: 1e-5", "lr: '1e-5'"), "optimizer.lr: input should be a valid number"),
        (("stage: sft", "stage: rl"), "recipe.yaml:1: stage: input should be 'pretrain' or 'sft'"),
        (("training: {steps: 3}", "training: {steps: 2.5}"), "training.steps: input should be a valid integer"),
        (("training: {steps: 3}", "training: {steps: true}"), "training.steps: input should be a valid integer"),
        (
            ("  format: messages", "  format: messages\n  format: text"),
            "recipe.yaml:6: format stands in line 5 already",
        ),
        (("model: {path: model}", ""), "recipe: model is missing"),
        (("stage: sft", "stage: [sft"), "recipe.yaml:2: not YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(recipe_file, change, text):
    with pytest.raises(ConfigError, match=text):
        load_recipe(recipe_file(TEXT.replace(*change)))


def test_overrides_are_as_strict_as_the_file(recipe_file):
    with pytest.raises(ConfigError, match=r"--set: optimizer.lrr: no such key; did you mean lr\?"):
        load_recipe(recipe_file(), ["optimizer.lrr=1"])
    with pytest.raises(ConfigError, match=r"--set lr: write it as section\.key=value"):
        load_recipe(recipe_file(), ["lr"])
    with pytest.raises(ConfigError, match="no such recipe file"):
        load_recipe(recipe_file().parent / "absent.yaml")


BASE = {"model": {"path": "m"}, "data": {"train": ["d"], "format": "messages"}, "training": {"steps": 1}}


def _recipe(**sections):
    return build_recipe({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}})


@pytest.mark.parametrize(
    ("sections", "ranks", "text"),
    [
        ({"parallel": {"tensor": 2}}, 3, "tensor x pipeline x context = 2 does not divide 3 processes"),
        ({"training": {"global_batch": 7, "micro_batch": 2}}, 1, "training.global_batch=7: .* use 8"),
        ({"training": {"epochs": 1}}, 1, "both are given"),
        ({"training": {"steps": None}}, 1, "neither is given"),
        ({"training": {"steps": 0}}, 1, "training.steps=0: must be positive"),
        (
            {"parallel": {"tensor": 2, "sequence": True}, "data": {"sequence": 61}},
            2,
            "data.sequence=61: this layout cuts rows into 2 parts; the nearest length that divides is 6[02]",
        ),
        ({"parallel": {"sequence": True}}, 1, "set parallel.tensor to 2 or more"),
        ({"megatron": {"virtual": 2}}, 1, "set parallel.pipeline to 2 or more"),
        (
            {"megatron": {"virtual": 2}, "parallel": {"pipeline": 2}, "training": {"global_batch": 3}},
            2,
            "training.global_batch=3: 3 micro-batches a data rank.*use 4",
        ),
        ({"training": {"validate_every": 5}}, 1, "there are no validation rows"),
        ({"training": {"generate_every": 5}}, 1, "there is nothing to generate"),
        ({"parallel": {"tensor": 0}}, 1, "parallel.tensor=0: a degree is at least 1"),
        ({"data": {"format": "text"}}, 1, "stage=sft with data.format=text: .* say data.format: messages, or alpaca"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_what_would_do(sections, ranks, text):
    with pytest.raises(ConfigError, match=text):
        check_recipe(_recipe(**sections), ranks)


def test_chat_rows_are_not_pretrained_on():
    recipe = dataclasses.replace(_recipe(), stage="pretrain")
    with pytest.raises(ConfigError, match=r"stage=pretrain with data.format=messages: .* say data.format: text"):
        check_recipe(recipe, 1)
    check_recipe(dataclasses.replace(_recipe(data={"format": "text"}), stage="pretrain"), 1)


def test_a_recipe_that_fits_is_accepted():
    check_recipe(_recipe(parallel={"tensor": 2, "sequence": True}, data={"sequence": 62}), 4)
