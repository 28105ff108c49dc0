"""The Megatron engine: one optimizer step over megatron-core's pipeline schedules.

Everything that a step needs is passed in; nothing here reads a recipe or a file. The loss is the mean over all
trained tokens of the global batch, whatever the split: each micro-batch contributes its sum, and the gradients are
divided once by the global count.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from mindspeed_kernels.device import Device
from mindspeed_models.megatron.checkpoint import load_model, save_model
from mindspeed_models.megatron.geometry import LocalPiece, local_pieces
from mindspeed_parallel.megatron.groups import Groups
from mindspeed_parallel.megatron.layers import PackedDocuments
from mindspeed_runtime.data.batch import IGNORE, Batch
from mindspeed_runtime.engine import StepResult
from mindspeed_runtime.recipe import OptimizerConfig
from torch import Tensor

from .optimizer import apply_update, build_optimizer, load_optimizer, save_optimizer


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the engine needs to know of a recipe."""

    optimizer: OptimizerConfig
    dtype: torch.dtype
    distributed_optimizer: bool
    num_tokens: int  # true size of the vocabulary
    seed: int


class MegatronEngine:
    """Trains the model chunks of this rank together with the other ranks."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, groups: Groups, device: Device, options: EngineOptions
    ) -> None:
        self.groups = groups
        self.device = device
        self.options = options
        self.config: TransformerConfig = chunks[0].config
        self.chunks = [self._wrap(chunk) for chunk in chunks]
        self.optimizer: MegatronOptimizer = build_optimizer(
            self.chunks,
            options.optimizer,
            dtype=options.dtype,
            distributed=options.distributed_optimizer,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = None
        self._schedule = get_forward_backward_func()

    @property
    def is_main(self) -> bool:
        """This rank reports."""
        return dist.get_rank() == 0

    def train_step(self, step: int, batches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over this data rank's micro-batches of a global batch."""
        self.forward_backward(step, batches)
        update = apply_update(self.optimizer, self.options.optimizer, lr)
        return StepResult(
            loss=self._loss_sum / max(self._num_trained, 1.0),
            trained=int(self._num_trained),
            grad_norm=update.grad_norm,
            tokens=self._num_tokens,
            skipped=not update.applied,
        )

    def forward_backward(self, step: int, batches: list[Batch]) -> None:
        """Leave the gradients of a global batch in the parameters' ``main_grad``: the mean over its trained tokens."""
        self.groups.seed(_mixed(self.options.seed, step, self.groups.data_rank))
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(batches, forward_only=False)

    def evaluate(self, batches: list[list[Batch]]) -> float:
        """Mean loss over all trained tokens of the given global batches; no gradient, no dropout."""
        total, count = 0.0, 0.0
        for chunk in self.chunks:
            chunk.eval()
        for part in batches:
            self._run(part, forward_only=True)
            total, count = total + self._loss_sum, count + self._num_trained
        return total / max(count, 1.0)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits of whole rows, on every rank.   tokens (B, S) -> (B, S, V) over the true vocabulary."""
        for chunk in self.chunks:
            chunk.eval()
        rows, length = tokens.shape
        positions = torch.arange(length).expand(rows, -1).contiguous()
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), positions, None)
        found: list[Tensor] = []
        self._schedule_call([batch], forward_only=True, step=partial(_logits_step, self.device, found))
        num_tokens = self.options.num_tokens
        logits = torch.zeros(rows, length, num_tokens, dtype=self.options.dtype, device=self.device.torch_device)
        if self.groups.is_last_stage:
            parts = [torch.empty_like(found[0]) for _ in range(self.groups.layout.tensor)]
            dist.all_gather(parts, found[0].contiguous(), group=self.groups.pg.tp)
            logits = torch.cat(parts, dim=-1)[..., :num_tokens].contiguous()
        dist.broadcast(logits, group=self.groups.pg.pp, group_src=self.groups.layout.pipeline - 1)
        return logits

    def save(self, folder: Path) -> None:
        """Write ``model/`` and ``optimizer/`` below the existing ``folder``; every rank takes part."""
        for name in ("model", "optimizer"):
            if self.is_main:
                (folder / name).mkdir()
        dist.barrier()
        save_model(self.chunks, folder / "model", num_tokens=self.options.num_tokens, pg=self.groups.pg)
        save_optimizer(self.optimizer, self.pieces(), folder / "optimizer")

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote, in this layout or another."""
        self.load_weights(folder / "model")
        load_optimizer(self.optimizer, self.pieces(), folder / "optimizer")

    def load_weights(self, folder: Path) -> None:
        """Take weights alone; the optimizer starts fresh from them."""
        load_model(self.chunks, folder, num_tokens=self.options.num_tokens, pg=self.groups.pg)
        self.optimizer.reload_model_params()

    def is_finite(self) -> bool:
        """Whether every weight of every rank is a finite number."""
        finite = all(bool(torch.isfinite(parameter).all()) for chunk in self.chunks for parameter in chunk.parameters())
        return not self.any(not finite)

    def share(self, value: Any) -> Any:
        """The main rank's ``value``, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        flags = torch.tensor([float(flag)], device=self.device.torch_device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def pieces(self) -> dict[torch.nn.Parameter, list[LocalPiece]]:
        """Where each local parameter lies in the whole tensors."""
        return local_pieces(self.chunks, self.options.num_tokens, self.groups.pg)

    def _wrap(self, chunk: torch.nn.Module) -> DistributedDataParallel:
        if self.options.dtype != torch.float32:
            chunk = Float16Module(self.config, chunk) if self.options.dtype == torch.bfloat16 else chunk
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.options.distributed_optimizer,
            check_for_nan_in_grad=False,  # a step whose gradient norm is not finite is skipped by all ranks together
        )
        return DistributedDataParallel(self.config, options, chunk, pg_collection=self.groups.pg)

    def _run(self, batches: list[Batch], *, forward_only: bool) -> None:
        stored = self._schedule_call(batches, forward_only=forward_only, step=partial(_loss_step, self.device))
        sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        if self.groups.is_last_stage and self.groups.tensor_rank == 0:
            for loss_sum, count in stored:
                sums += torch.stack((loss_sum.double().cpu(), count.double().cpu()))
        local = torch.tensor(float(sum(batch.tokens.numel() for batch in batches)), dtype=torch.float64)
        if not (self.groups.pipeline_rank == 0 and self.groups.tensor_rank == 0):
            local.zero_()
        totals = torch.cat((sums, local[None])).to(torch.float32 if self.device.kind == "npu" else torch.float64)
        totals = totals.to(self.device.torch_device)
        dist.all_reduce(totals)
        self._loss_sum, self._num_trained, num_tokens = (float(value) for value in totals.tolist())
        self._num_tokens = int(num_tokens)

    def _schedule_call(self, batches: list[Batch], *, forward_only: bool, step: Any) -> list[Any]:
        iterators = [iter(batches) for _ in self.chunks]
        rows, length = batches[0].tokens.shape
        return self._schedule(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )


def _loss_step(device: Device, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches).to(device.torch_device)
    losses = _forward(model, batch, labels=batch.labels)
    return losses, partial(_summed, batch.labels)


def _logits_step(
    device: Device, found: list[Tensor], batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    batch = next(batches).to(device.torch_device)

    def keep(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found.append(logits.detach())
        zero = torch.zeros((), device=logits.device)
        return zero, torch.zeros((), dtype=torch.int, device=logits.device), zero

    return _forward(model, batch, labels=None), keep


def _forward(model: torch.nn.Module, batch: Batch, labels: Tensor | None) -> Tensor:
    return model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=None,
        labels=labels,
        packed_seq_params=PackedDocuments.of(batch.documents, batch.tokens.shape[1]),
    )


def _summed(labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Sum over trained tokens, their number, and both for the report.   labels, losses (B, S)."""
    trained = labels != IGNORE
    # A product would turn an infinite loss on an untrained token into NaN.
    loss_sum = torch.where(trained, losses, torch.zeros_like(losses)).sum()
    count = trained.sum().to(torch.int)
    return loss_sum, count, (loss_sum.detach().clone(), count)


def _mixed(*numbers: int) -> int:
    """A seed that depends on all the numbers, so that step n + 1 is not step n of the next seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
