"""The catalog's numbers against what is published, and a recipe that fits for every model."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from mindspeed_models.catalog import catalog, named
from mindspeed_models.cli import models_command, recipe_command
from mindspeed_models.errors import ModelError
from mindspeed_models.families import FAMILIES, describe
from mindspeed_models.plan import check_plan, make_plan, num_parameters
from mindspeed_models.recipes import GIB, SHARE, fit, write
from mindspeed_runtime.config import ConfigError, build_recipe, check_recipe

MODELS = catalog()
EXAMPLES = Path(__file__).parents[3] / "examples" / "megatron"


def test_there_are_as_many_named_models_as_are_promised_of_many_families():
    assert len(MODELS) >= 110
    assert len({model.hf for model in MODELS.values()}) == len(MODELS)
    assert {model.family for model in MODELS.values()} <= {family.name for family in FAMILIES}
    assert len({model.family for model in MODELS.values()}) >= 20


@pytest.mark.parametrize("name", list(MODELS))
def test_the_computed_number_of_parameters_is_the_published_one(name):
    model = MODELS[name]
    family, arch = describe(model.config)
    assert family.name == model.family
    assert abs(num_parameters(arch) - model.published) <= model.tolerance
    assert re.fullmatch(r"\d+(\.\d+)?[MBT]", model.parameters) and model.count and "/" in model.hf
    assert model.tokenizer in ("bpe", "sentencepiece", "tekken") and model.licence and model.context >= 2048


def test_a_size_that_is_off_would_be_seen():
    model = named("qwen3-8b")
    for change in ({"intermediate_size": 12800}, {"num_key_value_heads": 16}, {"num_hidden_layers": 35}):
        _, arch = describe({**model.config, **change})
        assert abs(num_parameters(arch) - model.published) > model.tolerance


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_has_a_recipe_that_fits_and_is_read_back_as_it_is(name, stage):
    model, memory = MODELS[name], 64.0
    for devices in (1, 8, 64, 512, 1024):
        try:
            found = fit(model, stage=stage, devices=devices, memory_gib=memory)
        except ConfigError:
            continue
        break
    text = write(model, found, devices=devices, memory_gib=memory)
    recipe = build_recipe(yaml.safe_load(text))
    assert (recipe.parallel, recipe.training, recipe.data.sequence) == (
        found.recipe.parallel,
        found.recipe.training,
        found.recipe.data.sequence,
    )
    _, arch = describe(model.config)
    check_recipe(recipe, devices)
    check_plan(recipe, arch, devices)
    assert found.num_bytes <= SHARE * memory * GIB
    if devices <= 64:
        plan = make_plan(recipe, arch, devices)
        assert max(rank.total_bytes for rank in plan.ranks) <= found.num_bytes * 1.01


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_what_the_command_writes(path):
    made = re.search(r"^# mindspeed-train (recipe .*)$", path.read_text(), flags=re.MULTILINE)
    if made is None:
        assert path.stem == "smollm2-sft"  # written by hand
        return
    done = CliRunner().invoke(recipe_command, made[1].split()[1:], catch_exceptions=False)
    assert done.stdout == path.read_text()


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes():
    with pytest.raises(
        ConfigError, match=r"qwen3-32b does not fit on 2 devices of 64 GiB: .* a device holds \d+\.\d GiB"
    ):
        fit(named("qwen3-32b"), stage="sft", devices=2, memory_gib=64)
    with pytest.raises(ModelError, match="'qwen3-9b' is not in the catalog; did you mean qwen3-"):
        named("qwen3-9b")


def test_the_list_is_printed_and_filtered():
    done = CliRunner().invoke(models_command, ["--family", "gpt_oss", "--json"], catch_exceptions=False)
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["gpt-oss-20b", "gpt-oss-120b"]
    assert rows[0]["computed"] == 20914757184 and rows[0]["config_source"].endswith("openai/gpt-oss-20b")
    table = CliRunner().invoke(models_command, [], catch_exceptions=False).stdout
    assert f"{len(MODELS)} models" in table and "qwen3-next-80b-a3b" in table
    with pytest.raises(ModelError, match="--family bert: the catalog has no model of it; there are bamba"):
        CliRunner().invoke(models_command, ["--family", "bert"], catch_exceptions=False)
