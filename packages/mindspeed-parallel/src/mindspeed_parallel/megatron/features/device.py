"""Running megatron-core on a device that is not CUDA.

megatron-core asks ``torch.cuda`` for the current device, streams, generators and memory, creates tensors on the literal
device "cuda", and compares the names of tensor types. No configuration field, spec or subclass reaches these: they are
written into schedules, mappings, buffers and optimizers. So the questions are answered by the chosen device, and the
literals are redirected by a mode that is in force only inside.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mindspeed_kernels.device import Device
from mindspeed_runtime.patch import Feature, Patch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ASKED = (  # what megatron-core asks of torch.cuda while it trains
    "current_device",
    "set_device",
    "synchronize",
    "current_stream",
    "stream",
    "Stream",
    "Event",
    "empty_cache",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
)


class _Redirected(TorchFunctionMode):
    """Reads "cuda" as the chosen device, and names its tensor types as CUDA's."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device.torch_device
        self._own = "torch." if device.kind == "cpu" else f"torch.{device.kind}."

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if kwargs and (device := kwargs.get("device")) is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": self._device}
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(out, str):
            # DistributedOptimizer: "wrapped parameters must be one of torch.cuda.FloatTensor ..."
            return out.replace(self._own, "torch.cuda.", 1)
        return out


class _SameGenerator(logging.Filter):
    """Drops a warning that is about two generators where the host has one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "CPU RNG state changed within GPU RNG context"


def _enter(context: Any) -> contextlib.AbstractContextManager[Any]:
    return _redirected(context.device)


@contextlib.contextmanager
def _redirected(device: Device) -> Iterator[None]:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    drop = _SameGenerator()
    if device.kind == "cpu":
        logger.addFilter(drop)
    try:
        with _Redirected(device):
            yield
    finally:
        logger.removeFilter(drop)


def _patches(context: Any) -> Sequence[Patch]:
    chosen: Device = context.device
    module = chosen.module

    def set_generator_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        chosen.set_rng_state(new_state)

    def get_generator_state(device: Any = None) -> Tensor:
        return chosen.rng_state()

    def answered(name: str) -> Patch:
        answers = {"get_rng_state": get_generator_state, "set_rng_state": set_generator_state}
        answer = answers.get(name, getattr(module, name))
        return Patch(
            target=f"torch.cuda:{name}",
            make=lambda _: answer,
            kind="replace",
            why=f"megatron-core asks torch.cuda.{name}; the chosen device answers",
        )

    return [
        *(answered(name) for name in _ASKED),
        Patch(
            target="torch.cuda.random:get_rng_state",
            make=lambda _: get_generator_state,
            kind="replace",
            why="the generator tracker reads the state by this name",
        ),
        Patch(
            target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            make=lambda _: set_generator_state,
            kind="replace",
            why="it reaches into torch.cuda.default_generators, which exist only where CUDA does",
            written_against="bc661293c830",
        ),
    ]


DEVICE = Feature(
    name="device",
    why="megatron-core runs on npu and cpu",
    resort="the questions to torch.cuda and the literal devices are inside functions that no field or spec chooses",
    patches=_patches,
    needed=lambda context: context.device.kind != "cuda",
    enter=_enter,
)
