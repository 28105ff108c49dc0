"""A complete recipe for a named model on given devices: the least cut layout whose weights, gradients and state fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_runtime.config import ConfigError, check_recipe
from mindspeed_runtime.recipe import (
    DataConfig,
    MegatronConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    ScheduleConfig,
    TrainingConfig,
)

from .catalog import CatalogModel
from .families import Arch, describe
from .plan import cut_sizes, divisors, heaviest_rank, num_parameters

GIB = 2**30
SHARE = 0.7  # of a device's memory for what is held from step to step; the rest is for activations
_LONGEST = 4096  # tokens a row, where the model's context is longer
_MOST_TENSOR = 8  # tensor ranks talk most: within a node


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A recipe, and what its heaviest rank holds from step to step."""

    recipe: Recipe
    num_bytes: int


def fit(model: CatalogModel, *, stage: Literal["pretrain", "sft"], devices: int, memory_gib: float) -> Fit:
    """The recipe with the fewest cuts that fits. ConfigError, with what would be needed, where none does."""
    _, arch = describe(model.config)
    room = SHARE * memory_gib * GIB
    least = float("inf")
    for parallel in sorted(_layouts(arch, devices), key=_cuts):
        recipe = _recipe(model, arch, parallel, stage, devices)
        try:
            check_recipe(recipe, devices)
            held = heaviest_rank(recipe, arch, devices).total_bytes
        except ConfigError:
            continue  # a combination that does not divide
        if held <= room:
            return Fit(recipe=recipe, num_bytes=held)
        least = min(least, held)
    if least == float("inf"):
        raise ConfigError(f"--devices {devices}: no layout of {model.name} takes so many; try a multiple of 8")
    raise ConfigError(
        f"{model.name} does not fit on {devices} devices of {memory_gib:g} GiB: in the layout that takes least, a device "
        f"holds {least / GIB:.1f} GiB from step to step, and {SHARE * memory_gib:.1f} GiB is what activations leave; take "
        "more devices, or larger ones"
    )


def write(model: CatalogModel, found: Fit, *, devices: int, memory_gib: float) -> str:
    """The recipe as YAML, with comments."""
    recipe, name = found.recipe, model.name
    parallel = {key: getattr(recipe.parallel, key) for key in ("tensor", "pipeline", "expert")}
    degrees = [f"{key}: {value}" for key, value in parallel.items() if value > 1]
    degrees += ["sequence: true"] if recipe.parallel.sequence else []
    data = "{train: [train.jsonl], format: messages, packing: true, sequence: "
    if recipe.stage == "pretrain":
        data = "{train: [corpus], format: text, packing: true, sequence: "
    length = f"epochs: {recipe.training.epochs:g}" if recipe.training.epochs else f"steps: {recipe.training.steps}"
    lines = [
        f"# {recipe.stage} of {name} on {devices} devices of {memory_gib:g} GiB, made by",
        f"# mindspeed-train recipe {name} --stage {recipe.stage} --devices {devices} --memory {memory_gib:g}",
        f"# Model: {num_parameters(describe(model.config)[1]):,} parameters, https://huggingface.co/{model.hf}",
        f"# ({model.licence}). Weights, gradients and optimizer state take at most {found.num_bytes / GIB:.1f} GiB of a device.",
        f"# Each process drives one device: mindspeed-train run {name}.yaml --nproc PROCESSES, or by torchrun on many machines.",
        f"stage: {recipe.stage}",
        f"model: {{path: {name}}}  # the Hugging Face folder; with init: random, its config.json alone",
        f"data: {data}{recipe.data.sequence}}}  # put your own files here",
        *([f"parallel: {{{', '.join(degrees)}}}"] if degrees else []),
        *(
            [f"megatron: {{layers: [{', '.join(map(str, recipe.megatron.layers))}]}}  # of each stage"]
            if recipe.megatron.layers
            else []
        ),
        f"optimizer: {{lr: {_number(recipe.optimizer.lr)}, weight_decay: {_number(recipe.optimizer.weight_decay)}}}",
        f"schedule: {{kind: cosine, warmup_steps: {recipe.schedule.warmup_steps}}}",
        f"training: {{{length}, global_batch: {recipe.training.global_batch}, micro_batch: 1, precision: bf16}}",
        "memory: {recompute: full}  # layers are computed again in the backward pass; none is faster, where it fits",
        f"checkpoint: {{folder: out/{name}, every: 500}}",
    ]
    return "\n".join(lines) + "\n"


def _recipe(model: CatalogModel, arch: Arch, parallel: ParallelConfig, stage: str, devices: int) -> Recipe:
    data_size = devices // (parallel.tensor * parallel.pipeline)
    length = min(model.context, _LONGEST)
    pretrain = stage == "pretrain"
    # A pipeline of p stages wants several times p micro-batches, and a step wants a few rows.
    batches = data_size * max(4 * parallel.pipeline if parallel.pipeline > 1 else 1, -(-8 // data_size))
    return Recipe(
        stage="pretrain" if pretrain else "sft",
        model=ModelConfig(path=model.name),
        data=DataConfig(
            train=("corpus" if pretrain else "train.jsonl",),
            format="text" if pretrain else "messages",
            packing=True,
            sequence=length,
        ),
        parallel=parallel,
        megatron=MegatronConfig(layers=_even(arch.num_layers, parallel.pipeline)),
        optimizer=OptimizerConfig(lr=3e-4 if pretrain else 1e-5, weight_decay=0.1 if pretrain else 0.0),
        schedule=ScheduleConfig(warmup_steps=500 if pretrain else 20),
        training=TrainingConfig(
            steps=10000 if pretrain else None, epochs=None if pretrain else 2.0, global_batch=batches
        ),
        memory=MemoryConfig(recompute="full"),
    )


def _layouts(arch: Arch, devices: int) -> Iterator[ParallelConfig]:
    sizes = list(cut_sizes(arch).values())
    for tensor in (t for t in divisors(devices) if t <= _MOST_TENSOR and all(size % t == 0 for size in sizes)):
        for pipeline in (p for p in divisors(devices // tensor) if p <= arch.num_layers):
            one = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=tensor > 1)
            if arch.moe is None or not arch.expert_layers:
                yield one
                continue
            stage = devices // pipeline
            yield from (replace(one, expert=e) for e in divisors(stage) if arch.moe.num_experts % e == 0)


def _cuts(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tensor * parallel.pipeline, parallel.pipeline, parallel.expert


def _even(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where they do not divide: the first and the last, which hold the vocabulary, get fewer."""
    if layers % stages == 0:
        return None
    least, more = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    return tuple(least + (stage in middle_first[:more]) for stage in range(stages))


def _number(value: float) -> str:
    text = f"{value:g}"
    return text if "." in text else text.replace("e", ".0e") if "e" in text else f"{text}.0"
