"""megatron-core's own optimizer checkpoints with PyTorch's Adam, where neither Apex nor Transformer Engine is there.

PyTorch keeps a step counter in the state of each parameter, Apex one for all. DistributedOptimizer treats the first
like the second when it loads: a fresh optimizer is refused, the counter is looked for among the loaded tensors, and one
tensor becomes the counter of every parameter, so that one step advances it by their number: the run goes on from there
with wrong moments, without an error.

The trainer of this project stores optimizer state itself and does not need this; nor does it call megatron-core's
writer, which forks, and waits for ever where psutil is not installed. It is for code that calls
``sharded_state_dict`` and ``load_state_dict`` of megatron-core's optimizer. No field or spec reaches inside these
methods, and megatron-core makes the optimizer by its own class, which a subclass does not replace.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.patch import Feature, Patch
from torch import Tensor

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _with_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self)

    return state_dict


def _with_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, model_param, {"step": state["step"], **tensors})

    return set_main_param_and_optimizer_states


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _check(_: Any) -> None:
    for name in ("apex", "transformer_engine"):
        if importlib.util.find_spec(name) is not None:
            raise ConfigError(
                f"features.torch_adam: {name} is installed and brings its own Adam; leave the feature out"
            )


TORCH_ADAM = Feature(
    name="torch_adam",
    why="megatron-core's optimizer checkpoints load right with PyTorch's Adam",
    resort="the faults are inside methods of a class that megatron-core makes itself",
    check=_check,
    patches=lambda _: [
        Patch(
            target=f"{_CLASS}.state_dict",
            make=_with_state,
            kind="wrap",
            why="an optimizer that has not stepped yet has no counter, and is refused as the target of a load",
            written_against="a8af0531302e",
        ),
        Patch(
            target=f"{_CLASS}._set_main_param_and_optimizer_states",
            make=_with_step,
            kind="wrap",
            why="the counter is not among the loaded tensors, where it is looked for",
            written_against="3ed3e919774d",
        ),
        Patch(
            target=f"{_CLASS}.load_state_dict",
            make=_with_own_steps,
            kind="wrap",
            why="all parameters are given one counter, which then counts once for each of them",
            written_against="c2e93d87cdf9",
        ),
    ],
)
