"""What follows from a device."""

import os

import pytest
from mindspeed_kernels.device import Device, DeviceError, open_device


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
