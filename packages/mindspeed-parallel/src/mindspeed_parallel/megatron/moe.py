"""A mixture of experts: the router and the experts of this project inside megatron-core's layer and dispatcher.

megatron-core permutes tokens, sends them to the ranks that hold their experts, and puts the results back. Its router
cannot express every family (DeepSeek-V3 scores a group by its two best experts whatever ``top_k`` is; sigmoid scores
are always normalised), and its experts are separate layers, whose gradients it does not sum over tensor ranks unless
experts are dealt to ranks as well.

Letters: S sequence, B batch, T tokens, E experts, K experts a token, H hidden size, F width of an expert.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional


class Router(TopKRouter):
    """Chooses experts through the chosen kernel."""

    def __init__(self, config: Any, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.choice, self.is_wide = config.choice, config.router_is_wide
        self.kernel = config.kernels.routing
        if config.router_is_biased:
            self.bias = nn.Parameter(torch.empty(config.num_moe_experts, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]  read by megatron-core
        if config.router_has_bias:
            del self.expert_bias  # None: megatron-core's own comes with its updates, which nobody has asked for
            # float32 beside a model in bfloat16: it is a sum of many small steps. It stands in checkpoints.
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logits (S, B, E) of input (S, B, H)."""
        if not self.is_wide:
            return functional.linear(input, self.weight, self.bias)
        assert self.bias is None
        return functional.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights (T, E), 0 where an expert was not chosen, and which were, of logits (S, B, E)."""
        assert padding_mask is None
        logits = logits.flatten(0, 1)
        weights, chosen = self.kernel(logits, self.choice, self.expert_bias)
        whole = torch.zeros_like(logits).scatter(1, chosen, weights)
        return whole, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class Stack(nn.Module):
    """A linear layer of each expert of this rank."""

    def __init__(self, experts: int, columns: int, rows: int, *, bias: bool, config: Any) -> None:
        super().__init__()
        self.weight = _of_experts(experts, rows, columns, dtype=config.params_dtype)
        self.bias = _of_experts(experts, rows, dtype=config.params_dtype) if bias else None
        self.kernel = config.kernels.grouped_linear

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x (T, columns), sorted by expert, counts (E of this rank,) -> (T, rows)."""
        out = self.kernel(x, self.weight, counts)
        if self.bias is None:
            return out
        return out + self.bias.repeat_interleave(counts.to(self.bias.device), dim=0, output_size=len(x))


class Experts(MegatronModule):
    """The experts of this rank, their weights stacked: each product is one grouped one.

    A checkpoint has them under the names and in the shapes of megatron-core's own experts.
    """

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config)
        hidden, width, bias = config.hidden_size, config.moe_ffn_hidden_size, config.experts_are_biased
        self.fc1 = Stack(num_local_experts, hidden, 2 * width, bias=bias, config=config)
        self.fc2 = Stack(num_local_experts, width, hidden, bias=bias, config=config)
        self.activation = partial(getattr(config.kernels, config.activation), **dict(config.activation_options))
        self.expert_group, self.copies = pg_collection.ep, pg_collection.expt_dp

    def forward(self, x: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """x (T, H), sorted by expert; tokens_per_expert (E of this rank,); weights (T,) -> (T, H) and no bias."""
        inner = self.activation(self.fc1(x, tokens_per_expert))
        if self.fc2.bias is not None:  # which is weighed, too
            return (self.fc2(inner, tokens_per_expert) * weights[:, None]).to(x.dtype), None
        return self.fc2((inner * weights[:, None]).to(x.dtype), tokens_per_expert), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Each parameter as a part of the stack of all experts."""
        assert not sharded_offsets
        part = (0, self.expert_group.rank(), self.expert_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.linear_{name}", parameter.data, part, replica_id=(0, 0, self.copies.rank())
            )
            for name, parameter in self.named_parameters()
        }


def moe(provider: BackendSpecProvider, linear: Any) -> ModuleSpec:
    """Experts where a layer would have its MLP. ``linear``: makes a class of linear layers without bias of one."""
    shared = MLPSubmodules(
        linear_fc1=linear(provider.column_parallel_linear()),
        linear_fc2=linear(provider.row_parallel_linear()),
        activation_func=provider.activation_func(),
    )
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=Router,  # pyright: ignore[reportArgumentType]  a builder of one
            experts=ModuleSpec(module=Experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        ),
    )


def _of_experts(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(shape, dtype=dtype))
    # Its gradient is summed over all ranks that hold the same experts, tensor ranks among them: each saw other tokens.
    # megatron-core sets this only where experts are dealt to ranks, and else sums over data ranks alone.
    weight.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]  read by megatron-core
    set_tensor_model_parallel_attributes(weight, True, 0, 1)  # or the gradient norm would count tensor rank 0 alone
    return weight
