"""One small interface over npu, cuda and cpu.

The only module, with the features that run megatron-core on other devices, that names ``torch.cuda`` or ``torch.npu``.
A device is chosen by name or detected; what follows from it (the collective backend, streams, memory figures) is asked
of it and of nothing else.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from .errors import UserError

KINDS = ("npu", "cuda", "cpu")
_log = logging.getLogger(__name__)


class DeviceError(UserError):
    """A device that was asked for and is not there."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a device: held now by tensors, the most held so far, and what the device has."""

    allocated: int
    peak: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of one kind, and its number among those of this machine."""

    kind: str
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """For ``tensor.to`` and ``device=``."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def collective_backend(self) -> str:
        """What ``init_process_group`` is given. Object collectives on npu and cuda go through gloo."""
        return {"npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[self.kind]

    def prepare_collectives(self, timeout_s: float) -> None:
        """To be called before the process group of a run is made, with its time limit."""
        if self.kind == "npu":
            # HCCL must give up before torch_npu's watchdog ends the process, or its log does not say where it hung.
            os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(_hccl_timeout(timeout_s)))

    @property
    def reduction_dtype(self) -> torch.dtype:
        """The widest float that collectives of this device sum."""
        return torch.float32 if self.kind == "npu" else torch.float64

    def activate(self) -> None:
        """Make it the current device of this process."""
        if self.kind != "cpu":
            _module(self.kind).set_device(self.index)

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        if self.kind != "cpu":
            _module(self.kind).synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        if self.kind == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            _module(self.kind).manual_seed(seed)

    def rng_state(self) -> Tensor:
        """State of the device's generator, a CPU tensor of bytes."""
        return torch.get_rng_state() if self.kind == "cpu" else _module(self.kind).get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Put back what ``rng_state`` gave."""
        if self.kind == "cpu":
            torch.set_rng_state(state)
        else:
            _module(self.kind).set_rng_state(state)

    def memory(self) -> Memory:
        """Memory figures. On cpu those of the process, since torch keeps none there."""
        if self.kind == "cpu":
            return _process_memory()
        module = _module(self.kind)
        return Memory(
            allocated=module.memory_allocated(),
            peak=module.max_memory_allocated(),
            total=module.mem_get_info()[1],
        )

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now. The process's own peak (cpu) cannot be reset."""
        if self.kind != "cpu":
            _module(self.kind).reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Give cached blocks back."""
        if self.kind != "cpu":
            _module(self.kind).empty_cache()

    @property
    def module(self) -> Any:
        """What ``torch.cuda`` is for cuda: streams, events and the rest, for this kind."""
        return HostModule(self) if self.kind == "cpu" else _module(self.kind)


class HostStream:
    """A stream where work is done when it is called for: nothing is ever pending."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> "HostEvent":
        return event or HostEvent()

    def query(self) -> bool:
        return True


class HostEvent:
    """An event of a stream that is never behind."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class HostModule:
    """The questions that are asked of ``torch.cuda``, answered for the host."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self, device: Device) -> None:
        self._device = device

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def current_stream(self, device: Any = None) -> HostStream:
        return HostStream()

    def default_stream(self, device: Any = None) -> HostStream:
        return HostStream()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        self._device.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        return _process_memory().allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return _process_memory().peak

    def memory_reserved(self, device: Any = None) -> int:
        return _process_memory().allocated

    def device_count(self) -> int:
        return 1


def detect(*, float64: bool = False) -> str:
    """The first kind that works here: npu, then cuda, then cpu. ``float64``: among those that compute in it."""
    if not float64 and _npu_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def import_npu() -> bool:
    """Import torch_npu where it is installed; whether it is there now.

    No device is touched, so that a process may fork afterwards. It must be imported before the first backward pass of a
    process: PyTorch's autograd engine makes its queues once.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:  # the driver libraries are absent
        _log.warning("device npu: torch_npu is installed and cannot be imported: %s", error)
        return False
    return True


def open_device(kind: str = "auto", index: int = 0, *, float64: bool = False) -> Device:
    """The device ``kind`` (or the detected one), made current.

    DeviceError when it is not there, or when ``float64`` is asked of a kind that does not compute in it.
    """
    if kind == "auto":
        kind = detect(float64=float64)
        _log.info("device: %s (detected)", kind)
    if kind not in KINDS:
        raise DeviceError(f"device {kind!r}: unknown; use one of auto, {', '.join(KINDS)}")
    if kind == "npu" and float64:
        raise DeviceError("device npu: Ascend has no float64, which the reference mode needs; use launch.device=cpu")
    count = _count(kind)
    if count == 0:
        raise _absent(kind)
    if kind != "cpu" and index >= count:
        raise DeviceError(f"device {kind}:{index}: this machine has {count}; start at most {count} processes here")
    device = Device(kind=kind, index=0 if kind == "cpu" else index)
    device.activate()
    return device


def check_device(kind: str) -> None:
    """DeviceError when ``kind`` cannot be here, as far as is known without opening it: to be asked before ranks start."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise _absent(kind)
    if kind == "cuda" and _count(kind) == 0:
        raise _absent(kind)


def _absent(kind: str) -> DeviceError:
    if kind == "npu":
        return DeviceError(
            "device npu: torch_npu is not installed or finds no NPU; install mindspeed-kernels[npu] on an Ascend machine"
        )
    return DeviceError("device cuda: torch finds no CUDA device; use cpu, or run on a machine that has one")


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _module("npu").device_count() if _npu_available() else 0


def _npu_available() -> bool:
    return import_npu() and bool(_module("npu").is_available())


def _module(kind: str) -> ModuleType:
    if kind == "npu":
        importlib.import_module("torch_npu")  # registers torch.npu
    return getattr(torch, kind)


def _hccl_timeout(timeout_s: float) -> int:
    """Seconds, in the multiples of 68 that HCCL knows, and less than ``timeout_s`` where that can be."""
    return max(1, math.ceil(timeout_s / 68) - 1) * 68


def _process_memory() -> Memory:
    fields: dict[str, int] = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                fields[name] = int(rest.split()[0]) * 1024
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    return Memory(allocated=fields["VmRSS"], peak=fields["VmHWM"], total=total)
