"""What follows from a device."""

import importlib.util
import os

import pytest
import torch
from mindspeed_kernels.device import Device, DeviceError, check_device, open_device


@pytest.mark.parametrize(("timeout_s", "expected"), [(600, 544), (137, 136), (136, 68), (60, 68), (68.5, 68)])
def test_hccl_gives_up_before_the_watchdog(monkeypatch, timeout_s, expected):
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    Device(kind="cpu").prepare_collectives(timeout_s)
    assert "HCCL_EXEC_TIMEOUT" not in os.environ
    Device(kind="npu").prepare_collectives(timeout_s)
    assert os.environ["HCCL_EXEC_TIMEOUT"] == str(expected)
    Device(kind="npu").prepare_collectives(10_000)
    assert os.environ["HCCL_EXEC_TIMEOUT"] == str(expected)  # what is set stays


def test_the_reference_mode_has_no_ascend():
    with pytest.raises(DeviceError, match=r"Ascend has no float64"):
        open_device("npu", float64=True)


def test_what_cannot_be_here_is_said_before_anything_starts():
    check_device("cpu")
    check_device("auto")
    if importlib.util.find_spec("torch_npu") is None:
        with pytest.raises(DeviceError, match="device npu: torch_npu is not installed"):
            check_device("npu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="device cuda: torch finds no CUDA device"):
            check_device("cuda")
