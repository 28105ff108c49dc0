"""Modules whose parameters tensor ranks share out by rows, where megatron-core has none."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import nn
from torch.distributed import ProcessGroup


class Cut(nn.Module):
    """Its own parameters are rows of whole ones; those of its children are what the children say."""

    def __init__(self, group: ProcessGroup) -> None:
        """``group``: the tensor ranks."""
        super().__init__()
        self.group = group

    def part(self, rows: int, *others: int, dtype: torch.dtype) -> nn.Parameter:
        """This rank's share of a parameter of the whole shape (rows, others)."""
        parameter = nn.Parameter(torch.ones(rows // self.group.size(), *others, dtype=dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Own parameters as rows of the whole ones, and what children say of theirs."""
        own = dict(self.named_parameters(recurse=False))
        data_group = (metadata or {}).get("dp_cp_group")
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, tp_group=self.group, dp_cp_group=data_group
        )
        for name, child in self.named_children():
            found |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.group
            )
        return found
