"""Everything that a rank holds while it trains: device, groups, model, engine.

``open_session`` builds it in the order in which a run needs it and takes it down again, so that training, proofs and
checks of a checkpoint all stand on the same ground.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import Device, open_device
from mindspeed_kernels.reference import fp64
from mindspeed_models.families.arch import Arch
from mindspeed_models.megatron.build import BuildOptions, build, init_weights, load_hf
from mindspeed_models.weights.source import Source, open_source
from mindspeed_parallel.layout import Layout
from mindspeed_parallel.megatron import groups as megatron_groups
from mindspeed_parallel.megatron.features import activate
from mindspeed_runtime.launch import Rank, world
from mindspeed_runtime.recipe import Recipe

from .engine import EngineOptions, MegatronEngine
from .model import MegatronModel


@dataclass(frozen=True, kw_only=True)
class Session:
    """A rank ready to train."""

    rank: Rank
    device: Device
    groups: megatron_groups.Groups
    arch: Arch
    source: Source
    model: MegatronModel

    @property
    def engine(self) -> MegatronEngine:
        """The model with its optimizer; only in a session that was opened to train."""
        assert isinstance(self.model, MegatronEngine)
        return self.model


def layout_of(recipe: Recipe, num_ranks: int) -> Layout:
    """The recipe's layout on ``num_ranks`` processes; data parallelism is what is left."""
    parallel = recipe.parallel
    layout = Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=recipe.megatron.virtual,
        context=parallel.context,
        expert=parallel.expert,
        data=1,
        sequence=parallel.sequence,
    )
    return replace(layout, data=num_ranks // layout.ranks)


@contextlib.contextmanager
def open_session(rank: Rank, recipe: Recipe, *, reference: bool = False, trains: bool = True) -> Iterator[Session]:
    """Build model and engine of this rank as the recipe says. ``reference``: in the fp64 reference mode.

    ``trains``: with gradients and an optimizer; without, the session only computes.
    """
    device = open_device(recipe.launch.device, rank.local_rank, float64=reference)
    layout = layout_of(recipe, rank.size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(rank, device, recipe.launch.timeout_s))
        if reference:
            stack.enter_context(fp64())
        kernels = Kernels.for_device(device, recipe.kernels)
        stack.enter_context(activate(recipe.features, device, kernels))
        groups = stack.enter_context(megatron_groups.open(layout, rank.size, timeout_s=recipe.launch.timeout_s))
        source = open_source(Path(recipe.model.path), weights=recipe.model.init == "weights")
        arch = source.arch
        dtype = (
            torch.float64 if reference else {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.training.precision]
        )
        chunks = build(arch, groups=groups, kernels=kernels, device=device, options=_build_options(recipe, dtype))
        if recipe.model.init == "random":
            init_weights(
                chunks, std=recipe.model.init_std, seed=recipe.training.seed, num_tokens=arch.vocab, pg=groups.pg
            )
        else:
            load_hf(chunks, source, num_tokens=arch.vocab, pg=groups.pg)
        model = _engine if trains else _model
        yield Session(
            rank=rank,
            device=device,
            groups=groups,
            arch=arch,
            source=source,
            model=model(chunks, recipe, groups=groups, device=device, dtype=dtype, num_tokens=arch.vocab),
        )


def _model(chunks: list[Any], recipe: Recipe, **options: Any) -> MegatronModel:
    return MegatronModel(chunks, **options)


def _engine(
    chunks: list[Any],
    recipe: Recipe,
    *,
    groups: megatron_groups.Groups,
    device: Device,
    dtype: torch.dtype,
    num_tokens: int,
) -> MegatronEngine:
    options = EngineOptions(
        optimizer=recipe.optimizer,
        dtype=dtype,
        distributed_optimizer=recipe.megatron.distributed_optimizer,
        num_tokens=num_tokens,
        seed=recipe.training.seed,
    )
    return MegatronEngine(chunks, groups=groups, device=device, options=options)


def _build_options(recipe: Recipe, dtype: torch.dtype) -> BuildOptions:
    return BuildOptions(
        dtype=dtype,
        recompute=recipe.memory.recompute,
        dropout=recipe.model.dropout,
        layers=recipe.megatron.layers,
        max_length=recipe.data.sequence,
    )


__all__ = ["Session", "layout_of", "open_session"]
