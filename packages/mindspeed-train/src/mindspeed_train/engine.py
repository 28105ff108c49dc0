"""The Megatron engine: optimizer steps of a model.

Everything that a step needs is passed in; nothing here reads a recipe or a file. The loss is the mean over all trained
tokens of the global batch: each micro-batch contributes its sum, and the gradients are divided once by the global count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from mindspeed_kernels.device import Device
from mindspeed_parallel.megatron.groups import Groups
from mindspeed_runtime.data.batch import Batch
from mindspeed_runtime.engine import StepResult
from mindspeed_runtime.recipe import OptimizerConfig

from .model import MegatronModel, mixed
from .optimizer import apply_update, build_optimizer, load_optimizer, save_optimizer


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the engine needs to know of a recipe."""

    optimizer: OptimizerConfig
    dtype: torch.dtype
    distributed_optimizer: bool
    num_tokens: int  # true size of the vocabulary
    seed: int


class MegatronEngine(MegatronModel):
    """Trains the model chunks of this rank together with the other ranks."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, groups: Groups, device: Device, options: EngineOptions
    ) -> None:
        self.options = options
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]  the TransformerConfig
        wrapped = [_wrapped(chunk, options, groups) for chunk in chunks]
        super().__init__(wrapped, groups=groups, device=device, dtype=options.dtype, num_tokens=options.num_tokens)
        self.optimizer: MegatronOptimizer = build_optimizer(
            self.chunks,
            options.optimizer,
            dtype=options.dtype,
            distributed=options.distributed_optimizer,
        )

    def train_step(self, step: int, batches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over this data rank's micro-batches of a global batch."""
        self.forward_backward(step, batches)
        update = apply_update(self.optimizer, self.options.optimizer, lr, self.device.torch_device)
        return StepResult(
            loss=self._loss_sum / max(self._num_trained, 1.0),
            trained=int(self._num_trained),
            grad_norm=update.grad_norm,
            tokens=self._num_seen,
            skipped=not update.applied,
        )

    def forward_backward(self, step: int, batches: list[Batch]) -> None:
        """Leave the gradients of a global batch in the parameters' ``main_grad``: the mean over its trained tokens."""
        self.groups.seed(mixed(self.options.seed, step, self.groups.data_rank))
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]  wrapped by _wrapped
        self.optimizer.zero_grad()
        self._run(batches, forward_only=False)

    def save(self, folder: Path) -> None:
        """Write ``model/`` and ``optimizer/`` below the existing ``folder``; every rank takes part."""
        for name in ("model", "optimizer"):
            if self.is_main:
                (folder / name).mkdir()
        dist.barrier()
        self.save_weights(folder / "model")
        save_optimizer(self.optimizer, self.pieces(), folder / "optimizer")

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote, in this layout or another."""
        self.load_weights(folder / "model")
        load_optimizer(self.optimizer, self.pieces(), folder / "optimizer")

    def load_weights(self, folder: Path) -> None:
        """Take weights alone; the optimizer starts fresh from them."""
        super().load_weights(folder)
        self.optimizer.reload_model_params()


def _wrapped(chunk: torch.nn.Module, options: EngineOptions, groups: Groups) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=options.distributed_optimizer,
        check_for_nan_in_grad=False,  # a step whose gradient norm is not finite is skipped by all ranks together
    )
    return DistributedDataParallel(chunk.config, ddp, chunk, pg_collection=groups.pg)  # pyright: ignore[reportArgumentType]
