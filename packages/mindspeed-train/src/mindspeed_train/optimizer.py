"""The optimizer: built by megatron-core, stepped here, stored as pieces of whole tensors.

megatron-core's own optimizer checkpoints gather every shard on one rank, or cannot be read in another layout, and
restore one step counter into all parameters. Here each rank writes the ranges that it owns as boxes of the whole
tensors, in the same format as the weights, and any layout reads them back.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from mindspeed_kernels.errors import RunError
from mindspeed_models.megatron.geometry import LocalPiece, range_pieces
from mindspeed_models.weights.shards import Box, Piece, load_pieces, save_pieces
from mindspeed_runtime.recipe import OptimizerConfig
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master"  # the fp32 weights of a 16-bit model


@dataclass(frozen=True, kw_only=True)
class Update:
    """What came of one optimizer step."""

    grad_norm: float
    applied: bool  # False: the gradient norm is not finite, nothing was changed


@dataclass(frozen=True, kw_only=True)
class _Owned:
    """The share of a parameter's optimizer state that this rank holds, flat."""

    parameter: torch.nn.Parameter
    start: int
    main: torch.nn.Parameter | Tensor  # key into the torch optimizer's state
    optimizer: torch.optim.Optimizer
    is_shard: bool  # data-parallel ranks own different ranges

    def boxes(self, pieces: Sequence[LocalPiece], numel: int) -> Iterator[tuple[Box, int, bool]]:
        """Each box of the share, where it starts in the flat share, and whether this rank writes it."""
        for piece in pieces:
            writes = piece.is_main_of_data if self.is_shard else piece.is_main
            for box, start in range_pieces([piece], self.start, self.start + numel):
                yield box, start - self.start, writes


def build_optimizer(
    chunks: Sequence[torch.nn.Module], config: OptimizerConfig, *, dtype: torch.dtype, distributed: bool
) -> MegatronOptimizer:
    """AdamW over the trainable parameters of ``chunks`` (wrapped for data parallelism)."""
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        decoupled_weight_decay=True,
        clip_grad=config.clip or 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    # An empty mapping decays every parameter; None is megatron-core's rule that spares vectors.
    return get_megatron_optimizer(
        options,
        list(chunks),  # pyright: ignore[reportArgumentType]  wrapped, they are modules
        config_overrides={} if config.decay_1d else None,
        use_gloo_process_groups=False,
    )


def apply_update(optimizer: MegatronOptimizer, config: OptimizerConfig, lr: float, device: torch.device) -> Update:
    """Step with the gradients that lie ready, unless their norm is not finite: then every rank leaves all as it was."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
    optimizer.prepare_grads()
    norm = gradient_norm(optimizer, device)
    if not math.isfinite(norm):
        return Update(grad_norm=norm, applied=False)
    if config.clip is not None:
        for part in _parts(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=config.clip, total_norm=norm)  # pyright: ignore[reportArgumentType]  a list of parameters is one of tensors
    optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, applied=True)


def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """The 2-norm of all gradients of the model, the same on every rank.

    megatron-core's own, where Transformer Engine and Apex are not installed, takes the norm of each gradient off the
    device, one after the other; here one number leaves it.
    """
    shares: dict[Any, list[Tensor]] = {}
    for part in _parts(optimizer):
        share = shares.setdefault(part.get_grad_stats_parallel_group(), [])
        share += [gradient.detach() for gradient in part.get_main_grads_for_grad_norm()]
    total = 0.0
    for group, gradients in shares.items():
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=device)]
        squares = torch.stack(list(norms)).square().sum()
        torch.distributed.all_reduce(squares, group=group)
        total += float(squares)
    return math.sqrt(total) if total >= 0 else math.nan


def save_optimizer(optimizer: MegatronOptimizer, pieces: Mapping[Tensor, list[LocalPiece]], folder: Path) -> None:
    """Write moments, master weights and the step count of all ranks into the existing ``folder``."""
    found: list[Piece] = []
    steps: set[int] = set()
    for owned in _owned(optimizer):
        state = owned.optimizer.state.get(owned.main)
        if not state:
            continue
        steps.add(int(state["step"]))
        for name, flat in _tensors(owned, state):
            for box, start, writes in owned.boxes(pieces[owned.parameter], flat.numel()):
                if writes:
                    view = flat[start : start + math.prod(box.shape)].view(box.shape)
                    found.append(Piece(box=_named(box, name), dtype=flat.dtype, fill=view))
    save_pieces(folder, found)
    if len(steps) > 1:
        raise RunError(f"optimizer: parameters have taken different numbers of steps: {sorted(steps)}")
    gathered: list[int | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, max(steps, default=0))
    if torch.distributed.get_rank() == 0:
        (folder / "steps.json").write_text(json.dumps({"steps": max(n or 0 for n in gathered)}))


def load_optimizer(optimizer: MegatronOptimizer, pieces: Mapping[Tensor, list[LocalPiece]], folder: Path) -> None:
    """Restore what ``save_optimizer`` wrote, into whatever layout this rank is part of."""
    steps = json.loads((folder / "steps.json").read_text())["steps"]
    if steps == 0:
        return
    targets: list[tuple[Box, Tensor]] = []
    for owned in _owned(optimizer):
        main = owned.main
        # A counter of its own for each parameter: a shared one would be advanced once per parameter.
        state = {"step": torch.tensor(float(steps)), **{name: torch.zeros_like(main) for name in _MOMENTS}}
        owned.optimizer.state[main] = state
        for name, flat in _tensors(owned, state):
            for box, start, _ in owned.boxes(pieces[owned.parameter], flat.numel()):
                view = flat[start : start + math.prod(box.shape)].view(box.shape)
                targets.append((_named(box, name), view))
    unique: dict[Box, Tensor] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for box, view in targets:
        if unique.setdefault(box, view) is not view:
            copies.append((view, unique[box]))
    load_pieces(folder, list(unique.items()))
    for target, source in copies:
        target.copy_(source)


def gradient_pieces(optimizer: MegatronOptimizer, pieces: Mapping[Tensor, list[LocalPiece]]) -> list[Piece]:
    """The gradients that the last update used, before clipping took effect on them or after, as this rank owns them."""
    found: list[Piece] = []
    for owned in _owned(optimizer):
        gradient = owned.main.grad
        if gradient is None:
            continue
        flat = gradient.reshape(-1)
        for box, start, writes in owned.boxes(pieces[owned.parameter], flat.numel()):
            if writes:
                view = flat[start : start + math.prod(box.shape)].view(box.shape)
                found.append(Piece(box=box, dtype=flat.dtype, fill=view))
    return found


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Every tensor that the optimizer of this rank holds."""
    for owned in _owned(optimizer):
        yield owned.main
        yield from (value for value in owned.optimizer.state.get(owned.main, {}).values() if isinstance(value, Tensor))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _owned(optimizer: MegatronOptimizer) -> Iterator[_Owned]:
    for part in _parts(optimizer):
        inner = part.optimizer
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(parameter)["param"]
                main = inner.param_groups[group]["params"][order]
                yield _Owned(parameter=parameter, start=span.start, main=main, optimizer=inner, is_shard=True)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                for parameter, main in zip(models, mains, strict=True):
                    yield _Owned(parameter=parameter, start=0, main=main, optimizer=inner, is_shard=False)
            for group in part.fp32_from_fp32_groups:
                for parameter in group:
                    yield _Owned(parameter=parameter, start=0, main=parameter, optimizer=inner, is_shard=False)
        elif isinstance(part, FP32Optimizer):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield _Owned(parameter=parameter, start=0, main=parameter, optimizer=inner, is_shard=False)


def _tensors(owned: _Owned, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and flat views of the stored tensors of a share."""
    for name in _MOMENTS:
        yield name, state[name].view(-1)
    if owned.parameter.dtype != owned.main.dtype:  # else the weights themselves say it all
        yield _MASTER, owned.main.data.view(-1)


def _named(box: Box, name: str) -> Box:
    return Box(key=f"{name}.{box.key}", whole=box.whole, offset=box.offset, shape=box.shape)
