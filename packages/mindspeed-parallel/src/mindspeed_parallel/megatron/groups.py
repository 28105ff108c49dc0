"""Process groups of a layout: the only module that knows megatron-core's global state.

``open`` makes the groups, hands them out as a collection, and leaves nothing behind, so that one process can open
another layout afterwards.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from mindspeed_kernels.device import Device

from ..layout import Layout, LayoutError


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of an open layout, and where this rank stands in it."""

    layout: Layout
    pg: ProcessGroupCollection
    tensor_rank: int
    pipeline_rank: int
    data_rank: int

    @property
    def is_first_stage(self) -> bool:
        """This rank embeds tokens."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank computes the loss."""
        return self.pipeline_rank == self.layout.pipeline - 1

    def seed(self, number: int) -> None:
        """Seed dropout. Tensor ranks share what they compute alike and differ where their work does.

        No other stage, and no other ``number``, draws the same again.
        """
        # megatron-core adds the tensor rank: with neighbouring numbers, a rank would draw what another one draws next.
        digest = hashlib.blake2b(f"{number} {self.pipeline_rank}".encode(), digest_size=4).digest()
        model_parallel_cuda_manual_seed(int.from_bytes(digest, "little") >> 1, force_reset_rng=True)


@contextlib.contextmanager
def open(layout: Layout, num_ranks: int, *, timeout_s: float = 600.0) -> Iterator[Groups]:  # noqa: A001
    """Make the groups of ``layout`` over the ``num_ranks`` ranks of the world."""
    if layout.ranks != num_ranks:
        raise LayoutError(f"layout {layout}: takes {layout.ranks} processes, {num_ranks} were started")
    if (stage := layout.ranks // layout.pipeline) % layout.expert:
        raise LayoutError(f"layout {layout}: expert={layout.expert} does not divide the {stage} ranks of a stage")
    before = _global_state()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    try:
        groups = Groups(
            layout=layout,
            pg=ProcessGroupCollection.use_mpu_process_groups(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            data_rank=parallel_state.get_data_parallel_rank(),
        )
        groups.seed(0)  # some layers ask for a generator even when nothing is dropped
        yield groups
    finally:
        parallel_state.destroy_model_parallel()
        for name, value in before.items():  # it leaves some groups and lists of ranks standing
            setattr(parallel_state, name, value)
        initialize_rng_tracker(force_reset=True)  # one that holds no generator
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()


def _global_state() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def communication_options(layout: Layout, device: Device) -> dict[str, bool]:
    """Configuration fields that point-to-point communication needs in this layout on this device.

    gloo matches messages between two ranks in their order alone. With two stages and several chunks a stage, both
    neighbours are the same rank, and megatron-core's batched exchange swaps them: the model trains on the wrong
    activations, without an error. One direction at a time, over groups of its own, is right.
    """
    ambiguous = layout.pipeline == 2 and layout.virtual > 1
    batched = device.kind != "cpu" and not ambiguous
    return {"batch_p2p_comm": batched, "batch_p2p_sync": False, "overlap_p2p_comm": False}
