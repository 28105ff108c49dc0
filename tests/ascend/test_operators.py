"""Fused operators through torch_npu's own host code and autograd nodes, against their definitions on the host."""

import pytest
import torch
import torch_npu
from mindspeed_kernels.bundle import OPERATORS, Kernels
from mindspeed_kernels.device import Device, open_device

pytestmark = pytest.mark.npu

NPU, REFERENCE = Kernels.for_device(Device(kind="npu")), Kernels.reference()
BOUNDS = [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)]


@pytest.fixture(autouse=True)
def _device():
    open_device("npu")


def _rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _compare(name, tensors, dtype, **options):
    """Outputs and gradients on both devices; returns the largest difference of each relative to the largest value."""
    found = []
    for kernels, device in ((REFERENCE, "cpu"), (NPU, "npu")):
        inputs = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in tensors]
        given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        out = getattr(kernels, name)(*inputs, **given)
        assert out.device.type == device and out.dtype == dtype
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)
        (out * weights).sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs)])
    return [
        float((b.cpu().double() - a.double()).abs().max() / a.double().abs().max())
        for a, b in zip(*found, strict=True)
        if a is not None
    ]


def test_the_bundle_takes_every_operator_written_for_ascend():
    written = {name for name, operator in OPERATORS.items() if "npu" in operator.faster}
    assert written and {name for name, choice in NPU.chosen.items() if choice == "npu"} == written


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_norm_activation_and_rotary(dtype, bound):
    x = _rand(3, 5, 12, dtype=dtype)
    assert max(_compare("rms_norm", [x, _rand(12, dtype=dtype, seed=1)], dtype, eps=1e-5)) < bound
    assert max(_compare("swiglu", [x], dtype)) < bound
    heads = _rand(2, 5, 3, 8, dtype=dtype)
    angle = _rand(2, 5, 1, 4, seed=2).repeat(1, 1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert max(_compare("rotary", [heads], dtype, cos=cos, sin=sin)) < bound


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("case", ["causal", "window", "documents", "both"])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2)])
def test_attention(case, heads, kv, dtype, bound):
    q, k, v = (_rand(2, 11, n, 8, dtype=dtype, seed=seed) for seed, n in enumerate((heads, kv, kv)))
    options = {"scale": 0.3}
    if case in ("window", "both"):
        options["window"] = 4
    if case in ("documents", "both"):
        options["documents"] = torch.tensor([[1] * 4 + [2] * 7, [1] * 6 + [2] * 3 + [0] * 2], dtype=torch.int32)
    assert max(_compare("attention", [q, k, v], dtype, **options)) < bound


def test_a_mask_the_other_way_round_is_seen(monkeypatch):
    from mindspeed_kernels.npu import attention as module

    def upside_down(device):
        return ~torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)

    monkeypatch.setattr(module, "_triangle", upside_down)
    x = _rand(1, 6, 2, 8).npu()
    with pytest.raises(RuntimeError):
        NPU.attention(x, x, x)


def test_checks_of_the_host_code_are_those_of_torch_npu():
    q = _rand(1, 6, 2, 8).npu()
    bad = [
        {"head_num": 0, "input_layout": "BSND"},
        {"head_num": 2, "input_layout": "QQQQ"},
        {"head_num": 2, "input_layout": "BSND", "sparse_mode": 99},
        {"head_num": 2, "input_layout": "BSND", "keep_prob": 1.5},
    ]
    for options in bad:
        with pytest.raises(RuntimeError) as info:
            torch_npu.npu_fusion_attention(q, q, q, **options)
        assert "not in libopapi" not in str(info.value)


def test_gradients_come_from_the_autograd_nodes_of_torch_npu():
    x = _rand(2, 6, 2, 8).npu().requires_grad_()
    assert "NpuFusionAttentionBackward" in _names(NPU.attention(x, x, x))
    assert "NpuRmsNormBackward" in _names(NPU.rms_norm(x, torch.ones(8).npu(), 1e-5))
    assert "NpuSwigluBackward" in _names(NPU.swiglu(x))


def _names(out):
    names, waiting = "", [out.grad_fn]
    while waiting:
        node = waiting.pop()
        names += type(node).__name__ + " "
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return names
