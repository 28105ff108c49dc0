"""The recipe by which verification builds a model."""

from dataclasses import replace
from pathlib import Path

from mindspeed_parallel.layout import Layout
from mindspeed_runtime.recipe import DataConfig, MegatronConfig, ModelConfig, ParallelConfig, Recipe, TrainingConfig
from mindspeed_train.prove import with_layout

LENGTH = 100  # tokens a row: more than a chunk of the mixers with a state


def recipe_of(checkpoint: Path | str, layout: Layout, precision: str) -> Recipe:
    """The recipe of a run that only computes, or takes one gradient that every rank is to hold whole."""
    recipe = Recipe(
        model=ModelConfig(path=str(checkpoint), dropout=0.0),
        data=DataConfig(train=("",), sequence=LENGTH),
        training=TrainingConfig(steps=1, precision="bf16" if precision == "bf16" else "fp32"),
        parallel=ParallelConfig(),
        megatron=MegatronConfig(distributed_optimizer=False),
    )
    return replace(with_layout(recipe, layout), stage="pretrain")
