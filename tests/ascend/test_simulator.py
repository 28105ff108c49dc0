"""The simulator itself: it is the genuine torch_npu, and what is not simulated is refused rather than answered."""

import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import version

import ascend_ranks as ranks
import pytest
import torch
import torch_npu
from fake_cann import load
from mindspeed_kernels.device import DeviceError, detect, open_device
from mindspeed_runtime import launch
from mindspeed_runtime.launch import LaunchError

pytestmark = pytest.mark.npu

COLLECTIVES = [
    "all_reduce", "all_reduce_of_bf16", "maximum_async", "mean", "broadcast", "all_gather", "reduce_scatter",
    "all_to_all", "uneven_all_to_all", "ring", "scatter", "reduce", "subgroup", "objects",
]  # fmt: skip


def test_it_is_the_wheel_of_pypi():
    assert torch_npu.__version__ == version("torch-npu") == "2.13.0"
    assert detect() == "npu"
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    with pytest.raises(DeviceError, match=r"npu:8: this machine has 8"):
        open_device("npu", 8)


def test_the_reference_mode_is_not_for_ascend():
    assert open_device("auto", float64=True).kind == "cpu"
    with pytest.raises(DeviceError, match=r"Ascend has no float64"):
        open_device("npu", float64=True)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: torch.logcumsumexp(x, 0), NotImplementedError, "_logcumsumexp has no NPU kernel"),
        (lambda x: x + torch.ones(3, 5), RuntimeError, "found at least two devices, npu:0 and cpu"),
        (lambda x: x @ torch.ones(5, 3), RuntimeError, "found at least two devices, npu:0 and cpu"),
        (lambda x: torch.cat([x, torch.ones(1, 5)]), RuntimeError, "found at least two devices, npu:0 and cpu"),
        (lambda x: x + torch.ones(3, 5, device="npu:1"), RuntimeError, "npu:0 and npu:1"),
        (lambda x: torch_npu.npu_moe_gating_top_k_softmax(x, k=2), RuntimeError, "aclnnMoeGatingTopKSoftmax"),
    ],
)
def test_what_is_not_simulated_or_not_allowed_raises(call, error, text):
    x = torch.randn(3, 5).npu()
    with pytest.raises(RuntimeError, match=text) as caught:
        call(x)
    assert caught.type is error


def test_a_runtime_function_that_is_not_simulated_returns_an_error(capfd):
    library = ctypes.CDLL(os.path.join(os.environ[load.FOLDER], "libascendcl.so"))
    assert library.aclrtMallocPhysical() == 500000
    assert "aclrtMallocPhysical is not simulated" in capfd.readouterr().err


def test_an_operator_of_the_old_kind_is_refused(capfd):
    with pytest.raises(RuntimeError):
        torch_npu.npu_format_cast(torch.randn(16, 16).npu(), 29)
    assert "is not simulated" in capfd.readouterr().err


def test_numbers_are_those_of_the_host():
    torch.manual_seed(1)
    x, weight = torch.randn(6, 5), torch.randn(7, 5)
    found = []
    for device in ("cpu", "npu"):
        a, w = (value.detach().clone().to(device).requires_grad_() for value in (x, weight))
        y = torch.nn.functional.layer_norm(torch.nn.functional.linear(a, w).softmax(-1), (7,))
        y[:, torch.tensor([1, 3]).to(device)].pow(3).sum().backward()
        found.append((y.detach(), a.grad, w.grad))
    for on_host, on_device in zip(*found, strict=True):
        assert on_device.device.type == "npu"
        assert torch.equal(on_host, on_device.cpu())


def test_views_and_resized_outputs_share_the_memory_of_the_device():
    x = torch.arange(12.0).npu().reshape(3, 4)
    x.t()[1].add_(100)
    assert x[:, 1].tolist() == [101, 105, 109]
    out = torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert out.shape == (3, 4) and out.device.type == "npu" and torch.equal(out, x + 1)
    row = x[0]
    x.zero_()
    assert row.abs().sum().item() == 0


def test_fresh_memory_is_not_zero_and_memory_is_counted_and_ends():
    code = """
import torch, torch_npu
big = torch.empty(1 << 20, device="npu")
print(bool(big.isnan().all()), torch.npu.memory_allocated() >= 4 << 20)
try:
    torch.empty(1 << 28, device="npu")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    environment = {**os.environ, "FAKE_CANN_MEMORY": str(64 << 20)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["True True", "out of memory"], done.stderr


def test_the_generator_of_the_device_is_its_own():
    torch.manual_seed(5)
    device = open_device("npu")
    device.manual_seed(3)
    before = torch.get_rng_state()
    first = torch.randn(4, device="npu")
    state = device.rng_state()
    second = torch.randn(4, device="npu")
    assert torch.equal(before, torch.get_rng_state())
    device.set_rng_state(state)
    assert torch.equal(second, torch.randn(4, device="npu"))
    device.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device="npu"))
    assert not torch.equal(first, second)


def test_the_device_layer_answers():
    device = open_device("npu", 1)
    x = torch.ones(1 << 10, device=device.torch_device)
    device.synchronize()
    memory = device.memory()
    assert memory.allocated >= x.nbytes and memory.peak >= memory.allocated and memory.total == 64 << 30
    stream = device.module.Stream()
    with device.module.stream(stream):
        y = x + 1
    device.module.current_stream().wait_stream(stream)
    assert y.device == torch.device("npu", 1)
    device.reset_peak()
    device.empty_cache()
    open_device("npu", 0)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(pool, size):
    found = pool.run(ranks.collectives, COLLECTIVES, nproc=size, timeout_s=120)
    for rank, results in enumerate(found):
        assert list(results) == COLLECTIVES
        assert {name: value for name, value in results.items() if value is not True} == {}, rank


def test_a_reduction_that_hccl_does_not_have_is_refused(pool):
    texts = pool.run(ranks.reduce_in_fp64, nproc=2, timeout_s=120)
    assert all(text for text in texts)


def test_a_dead_peer_is_an_error_at_once(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 20.0)  # for the other rank to write what it met, on a busy machine too
    with pytest.raises(LaunchError, match=r"rank 1: the process left with code 7"):
        pool.run(ranks.outlive_a_peer, tmp_path / "note", nproc=2, timeout_s=60)
    seconds, text = json.loads((tmp_path / "note").read_text())
    assert text and seconds < 20
