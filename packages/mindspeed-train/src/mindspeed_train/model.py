"""A model that computes: megatron-core's pipeline schedules over the chunks of this rank.

The loss is a sum over trained tokens and their number, whatever the split; who divides does so once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from mindspeed_kernels.device import Device
from mindspeed_models.megatron.checkpoint import load_model, save_model
from mindspeed_models.megatron.geometry import LocalPiece, local_pieces
from mindspeed_parallel.megatron.config import PackedDocuments
from mindspeed_parallel.megatron.groups import Groups
from mindspeed_runtime.data.batch import IGNORE, Batch
from torch import Tensor


class MegatronModel:
    """The chunks of this rank, computing together with the other ranks. Every rank calls every method."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, groups: Groups, device: Device, dtype: torch.dtype, num_tokens: int
    ) -> None:
        """``num_tokens``: true size of the vocabulary."""
        self.chunks = list(chunks)
        self.groups = groups
        self.device = device
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.config: TransformerConfig = chunks[0].config  # pyright: ignore[reportAttributeAccessIssue]
        self._schedule = get_forward_backward_func()
        self._loss_sum = 0.0
        self._num_trained = 0.0
        self._num_seen = 0

    @property
    def is_main(self) -> bool:
        """This rank reports."""
        return dist.get_rank() == 0

    def evaluate(self, batches: Sequence[list[Batch]]) -> float:
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
        self._schedule_call(self.repeated(batch), forward_only=True, step=partial(_logits_step, self.device, found))
        if self.groups.is_last_stage:
            parts = [torch.empty_like(found[0]) for _ in range(self.groups.layout.tensor)]
            dist.all_gather(parts, found[0].contiguous(), group=self.groups.pg.tp)
            found = [torch.cat(parts, dim=-1)[..., : self.num_tokens]]
        return self._from_last_stage(found, (rows, length, self.num_tokens))

    def token_losses(self, batch: Batch) -> Tensor:
        """Loss of every token of a batch, on every rank.   (B, S); tokens that are not trained have 0."""
        for chunk in self.chunks:
            chunk.eval()
        found: list[Tensor] = []
        self._schedule_call(self.repeated(batch), forward_only=True, step=partial(_token_step, self.device, found))
        return self._from_last_stage(found, tuple(batch.tokens.shape))

    def save_weights(self, folder: Path) -> None:
        """Write the weights alone into the existing ``folder``."""
        save_model(self.chunks, folder, num_tokens=self.num_tokens, pg=self.groups.pg)

    def load_weights(self, folder: Path) -> None:
        """Take the weights of a checkpoint's ``model`` folder."""
        load_model(self.chunks, folder, num_tokens=self.num_tokens, pg=self.groups.pg)

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

    def pieces(self) -> dict[Tensor, list[LocalPiece]]:
        """Where each local weight lies in the whole tensors."""
        return local_pieces(self.chunks, self.num_tokens, self.groups.pg)

    def repeated(self, batch: Batch) -> list[Batch]:
        """One batch, as often as the interleaved schedule wants micro-batches."""
        layout = self.groups.layout
        return [batch] * (layout.pipeline if layout.virtual > 1 else 1)

    def _from_last_stage(self, found: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        if self.groups.is_last_stage:
            value = found[0].to(self.dtype).contiguous()
        else:
            value = torch.empty(shape, dtype=self.dtype, device=self.device.torch_device)
        dist.broadcast(value, group=self.groups.pg.pp, group_src=self.groups.layout.pipeline - 1)
        return value

    def _run(self, batches: list[Batch], *, forward_only: bool) -> None:
        stored = self._schedule_call(batches, forward_only=forward_only, step=partial(_loss_step, self.device))
        totals = [0.0, 0.0, 0.0]  # loss, trained tokens, all tokens
        if self.groups.is_last_stage and self.groups.tensor_rank == 0:
            for loss_sum, count in _on_host(stored):
                totals[0] += loss_sum
                totals[1] += count
        if self.groups.pipeline_rank == 0 and self.groups.tensor_rank == 0:
            totals[2] = float(sum(batch.tokens.numel() for batch in batches))
        shared = torch.tensor(totals, dtype=self.device.reduction_dtype, device=self.device.torch_device)
        dist.all_reduce(shared)
        self._loss_sum, self._num_trained, num_tokens = shared.tolist()
        self._num_seen = int(num_tokens)

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
        return _nothing(device)

    return _forward(model, batch, labels=None), keep


def _token_step(
    device: Device, found: list[Tensor], batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    batch = next(batches).to(device.torch_device)

    def keep(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found.append(torch.where(batch.labels != IGNORE, losses, torch.zeros_like(losses)).detach())
        return _nothing(device)

    return _forward(model, batch, labels=batch.labels), keep


def _nothing(device: Device) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros((), device=device.torch_device)
    return zero, zero.to(torch.int), zero


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


def _on_host(sums: list[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Loss sum and count of each micro-batch, taken off the device at once."""
    if not sums:
        return []
    wide = torch.promote_types(sums[0][0].dtype, torch.float32)  # bfloat16 does not count beyond 256
    return torch.stack([torch.stack((loss_sum.to(wide), count.to(wide))) for loss_sum, count in sums]).tolist()


def mixed(*numbers: int) -> int:
    """A seed that depends on all the numbers, so that step n + 1 is not step n of the next seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
