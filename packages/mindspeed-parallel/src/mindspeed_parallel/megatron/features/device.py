"""Running megatron-core on a device that is not CUDA.

megatron-core asks ``torch.cuda`` for the current device, streams, events and generators, creates tensors on the literal
device "cuda", and compares the names of tensor types. No configuration field, spec or subclass reaches these: they are
written into schedules, mappings, buffers and optimizers. So the questions are answered by the chosen device, and the
literals are redirected by a mode that is in force only inside.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from mindspeed_kernels.device import Device, DeviceError
from mindspeed_kernels.modes import RUN_BACKWARD, kept
from mindspeed_runtime.patch import Feature, Patch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ASKED = (  # what megatron-core asks of torch.cuda while it trains
    "current_device",
    "synchronize",
    "current_stream",
    "stream",
    "Stream",
    "Event",
    "empty_cache",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
)

_BOUND_BY = {"get_rng_state": ("torch.cuda.random",)}  # megatron-core asks these modules too


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
            _check_caller()
            return args[0].to(self._device)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            _check_caller()
            args = (args[0], self._device, *args[2:])
        if kwargs and _is_cuda(kwargs.get("device")):
            _check_caller()
            kwargs = {**kwargs, "device": self._device}
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(out, str):
            # The distributed optimizer takes tensors by the names of their types, and knows those of CUDA alone.
            return out.replace(self._own, "torch.cuda.", 1)
        return out


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _check_caller() -> None:
    """megatron-core alone is read so: the same literal in other code is a mistake that would show on no other device."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module(frame).split(".")[0] in ("torch", "contextlib"):
        frame = frame.f_back
    if not _module(frame).startswith("megatron."):
        raise DeviceError(
            f'{frame.f_code.co_filename}:{frame.f_lineno}: names the device "cuda" and runs on another; take the device '
            "from a tensor, or from mindspeed_kernels.device"
        )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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

    def set_rng_state(new_state: Tensor, *_: Any, **__: Any) -> None:
        chosen.set_rng_state(new_state)

    def get_rng_state(*_: Any, **__: Any) -> Tensor:
        return chosen.rng_state()

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        moved = tensor.cpu()  # done when it returns, so no stream needs to be told
        return moved.numpy() if as_numpy else moved

    answers = {
        **{name: getattr(chosen.module, name) for name in _ASKED},
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
    return [
        *(_answered(name, answer) for name, answer in answers.items()),
        Patch(
            target=f"{RUN_BACKWARD[0]}:_engine_run_backward",
            make=lambda original: kept(original, _Redirected(chosen)),
            kind="wrap",
            why="PyTorch takes modes off in backward passes, where recomputed layers name the device again",
            also=RUN_BACKWARD[1:],
        ),
        Patch(
            target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            make=lambda _: set_rng_state,
            kind="replace",
            why="it reaches into torch.cuda.default_generators, which exist only where CUDA does",
            written_against="bc661293c830",
        ),
        Patch(
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            make=lambda _: maybe_move_tensor_to_cpu,
            kind="replace",
            why="it moves CUDA tensors alone, and all_to_all refuses sizes that are still tensors",
            written_against="305cf1bb7bbc",
            also=("megatron.core.transformer.moe.token_dispatcher",),
        ),
    ]


def _answered(name: str, answer: Any) -> Patch:
    return Patch(
        target=f"torch.cuda:{name}",
        make=lambda _: answer,
        kind="replace",
        why="megatron-core asks it of torch.cuda; the chosen device answers",
        also=_BOUND_BY.get(name, ()),
    )


DEVICE = Feature(
    name="device",
    why="megatron-core runs on npu and cpu",
    resort="the questions to torch.cuda and the literal devices are inside functions that no field or spec chooses",
    patches=_patches,
    needed=lambda context: context.device.kind != "cuda",
    enter=_enter,
)
