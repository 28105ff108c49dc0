"""Every implementation against the definition: values and gradients."""

import logging
import math
import mmap
import re
import sys
import types
from dataclasses import FrozenInstanceError, replace
from importlib.metadata import EntryPoint

import pytest
import torch
from mindspeed_kernels import bundle
from mindspeed_kernels.bundle import Kernels, OpError
from mindspeed_kernels.device import Device, DeviceError, detect, open_device
from mindspeed_kernels.ops.activation import clamped_swiglu, geglu
from mindspeed_kernels.ops.attention import attention, sdpa, visible
from mindspeed_kernels.ops.grouped import grouped_linear, grouped_mm
from mindspeed_kernels.ops.norm import rms_norm
from mindspeed_kernels.ops.routing import Choice, routing
from mindspeed_kernels.ops.table import Implementation
from mindspeed_kernels.reference import fp64
from torch.nn import functional

CPU = Device(kind="cpu")


def _attention_inputs(dtype=torch.float64, batch=2, length=13, heads=6, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(7)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim))
    return [
        (3 * torch.randn(batch, length, *shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes
    ]


DOCUMENTS = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "documents"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_attention_equals_its_definition(documents, window, scale):
    results = []
    for function in (attention, sdpa):
        inputs = _attention_inputs()
        with fp64():
            out = function(*inputs, documents=documents, window=window, scale=scale)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weights).sum().backward()
        results.append((out.detach(), *(x.grad for x in inputs)))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_attention_sees_neither_the_future_nor_another_document_nor_past_its_window():
    q, k, v = (x.detach() for x in _attention_inputs())
    base = attention(q, k, v, documents=DOCUMENTS, window=3)
    for poisoned in range(13):
        changed = v.clone()
        changed[:, poisoned] += 100
        moved = (attention(q, k, changed, documents=DOCUMENTS, window=3) != base).any(-1).any(-1)
        for row in range(2):
            expected = [
                poisoned <= t < poisoned + 3 and bool(DOCUMENTS[row, t] == DOCUMENTS[row, poisoned]) for t in range(13)
            ]
            assert moved[row].tolist() == expected


def test_capped_scores_stay_below_their_cap_and_a_high_cap_changes_nothing():
    q, k, v = (20 * x.detach() for x in _attention_inputs())
    torch.testing.assert_close(attention(q, k, v, cap=1e12), attention(q, k, v))
    # Scores that hardly differ: every token sees the mean of all before it.
    means = (
        v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).cumsum(1) / torch.arange(1, v.shape[1] + 1)[:, None, None]
    )
    torch.testing.assert_close(attention(q, k, v, cap=1e-9), means)
    assert (attention(q, k, v, cap=2.0) - attention(q, k, v)).abs().max() > 0.1


def test_a_sink_takes_its_share_of_every_row_of_weights():
    q, k, v = (x.detach() for x in _attention_inputs())
    torch.testing.assert_close(attention(q, k, v, sinks=torch.full((6,), -1e9)), attention(q, k, v))
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ones = torch.ones_like(v)
    sums = attention(q, k, ones, sinks=sinks)  # what is left of the weights of each row
    assert (sums > 0).all() and (sums < 1 + 1e-6).all() and sums.min() < 0.9
    torch.testing.assert_close(attention(q, k, v, sinks=sinks), attention(q, k, v) * sums, rtol=1e-5, atol=1e-6)


def test_the_clamped_activation_is_bounded_on_both_sides():
    x = torch.tensor([[9.0, -9.0, 9.0, -9.0]])
    low, high = clamped_swiglu(x, slope=1.7, limit=2.0)[0].tolist()
    assert low == pytest.approx(3 * 2 / (1 + math.exp(-3.4)))
    assert high == pytest.approx(-1 * -9 / (1 + math.exp(15.3)))


def test_attention_dropout_keeps_the_expectation_and_follows_the_seed():
    q, k, v = (x.detach() for x in _attention_inputs(length=33))
    whole = attention(q, k, v)
    torch.manual_seed(3)
    runs = torch.stack([attention(q, k, v, dropout=0.2) for _ in range(600)])
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout=0.2), runs[0])
    assert not torch.equal(runs[0], runs[1])
    assert (runs.mean(0) - whole).abs().max() < 0.1 * whole.abs().max()


def test_visible_is_a_triangle_when_nothing_is_kept_apart():
    assert torch.equal(visible(5, None, None, torch.device("cpu")), torch.ones(5, 5).tril().bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torch_in_its_dtype(dtype):
    x, weight = torch.randn(3, 7, 24).to(dtype), torch.randn(24).to(dtype)
    reference = functional.rms_norm(x.double(), (24,), weight.double(), 1e-5)
    assert (rms_norm(x, weight, 1e-5).double() - reference).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
    assert rms_norm(x, weight, 1e-5).dtype == dtype


def test_a_named_kernel_that_cannot_run_is_an_error_that_lists_what_can():
    with pytest.raises(
        OpError, match=re.escape("kernels.attention: no 'npu' implementation for cpu; here: reference, sdpa")
    ):
        Kernels.for_device(CPU, {"attention": "npu"})
    with pytest.raises(OpError, match=r"kernels.atention: no such operator"):
        Kernels.for_device(CPU, {"atention": "sdpa"})


def test_auto_says_what_it_chose(caplog):
    with caplog.at_level(logging.INFO):
        kernels = Kernels.for_device(CPU)
    assert kernels.chosen["attention"] == "sdpa" and kernels.attention is sdpa
    assert "attention=sdpa" in caplog.text
    assert Kernels.for_device(CPU, {"attention": "reference"}).attention is attention


def _plug(monkeypatch, name, implementation):
    monkeypatch.setitem(sys.modules, "plugged_kernel", types.SimpleNamespace(FAST=implementation))
    point = EntryPoint(name=name, value="plugged_kernel:FAST", group="mindspeed.kernels")
    monkeypatch.setattr(bundle, "entry_points", lambda group: [point] if group == point.group else [])


def _doubled(x, weight, eps):
    return 2 * rms_norm(x, weight, eps)


def test_another_distribution_brings_an_implementation_that_is_taken_by_name(monkeypatch):
    _plug(monkeypatch, "rms_norm.doubled", Implementation(load=lambda: _doubled, kinds=("cpu",), auto=False))
    assert Kernels.for_device(CPU).rms_norm is rms_norm
    kernels = Kernels.for_device(CPU, {"rms_norm": "doubled"})
    assert kernels.rms_norm is _doubled and kernels.chosen["rms_norm"] == "doubled"
    with pytest.raises(OpError, match=r"kernels\.rms_norm: no 'doubled' implementation for cuda; here: reference"):
        Kernels.for_device(Device(kind="cuda"), {"rms_norm": "doubled"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("attention.sdpa", "attention has 'sdpa' already; rename it"),
        ("rms_norm.reference", "rms_norm has 'reference' already"),
        ("rms_norm", "rms_norm has '' already"),
        (
            "rms_nrom.fast",
            "no operator rms_nrom; name it operator.implementation, with one of attention, capped_attention, causal_conv, clamped_swiglu, gated_delta_rule, geglu, grouped_linear, rms_norm",
        ),
    ],
)
def test_an_implementation_under_a_name_that_is_taken_or_means_nothing_is_refused(monkeypatch, name, text):
    _plug(monkeypatch, name, Implementation(load=lambda: _doubled, kinds=("cpu",)))
    with pytest.raises(OpError, match=re.escape(text)):
        Kernels.for_device(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(0, 5, 2, 0), (7, 0, 0, 0), (1, 2, 3, 1)])
def test_the_grouped_product_of_pytorch_equals_the_definition_with_its_gradients(dtype, counts):
    fast = Kernels.for_device(CPU, {"grouped_linear": "grouped_mm"}).grouped_linear
    assert fast is grouped_mm and Kernels.for_device(CPU).grouped_linear is grouped_linear
    found = []
    for function in (grouped_linear, fast):
        generator = torch.Generator().manual_seed(4)
        x, weight = (
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((7, 16), (4, 24, 16))
        )
        out = function(x, weight, torch.tensor(counts))
        found.append((out, *torch.autograd.grad(out.sum(), (x, weight))))  # an expanded gradient
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_experts_are_chosen_by_score_and_bias_and_weighed_by_score():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [-1.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    choice = Choice(top_k=1, score="sigmoid", normalised=False, scale=2.5)
    weights, chosen = routing(logits, choice, torch.tensor([0.0, 0.2, 0.0, 0.0]))
    assert chosen.tolist() == [[1], [3]]
    torch.testing.assert_close(weights, 2.5 * logits.gather(1, chosen).sigmoid())
    weights, chosen = routing(logits, Choice(top_k=3, score="softmax", normalised=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(weights, logits.gather(1, chosen).softmax(-1))
    assert chosen.tolist() == [[0, 1, 2], [3, 2, 1]]


def test_a_group_is_worth_its_best_score_or_its_two_best():
    logits = torch.tensor([[0.9, -9.0, 0.8, 0.8, 0.1, 0.2]])
    two = Choice(top_k=2, score="softmax", normalised=False, groups=3, top_groups=1)
    assert sorted(routing(logits, two)[1][0].tolist()) == [2, 3]
    assert routing(logits, replace(two, group_score="best"))[1].tolist() == [[0, 1]]


def test_sigmoids_that_have_all_vanished_do_not_divide_by_nothing():
    weights, _ = routing(torch.full((1, 4), -200.0), Choice(top_k=2, score="sigmoid", normalised=True))
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_bundle_cannot_be_changed():
    kernels = Kernels.for_device(CPU)
    with pytest.raises(FrozenInstanceError):
        kernels.rms_norm = _doubled


def test_a_device_that_is_absent_is_refused_by_name():
    assert detect() == "cpu" or torch.cuda.is_available()
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="device cuda: torch finds no CUDA device"):
            open_device("cuda")
    with pytest.raises(DeviceError, match="device 'tpu': unknown"):
        open_device("tpu")


def test_the_device_generator_is_restored_exactly():
    device = open_device("cpu")
    device.manual_seed(5)
    state = device.rng_state()
    first = torch.rand(4)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_process_memory_is_measured():
    held = mmap.mmap(-1, 120_000_000)  # not of the allocator, which may have as much lying idle
    before = CPU.memory()
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    after = CPU.memory()
    assert 100e6 < after.allocated - before.allocated < 140e6 and after.peak >= after.allocated > 0
    assert held[0] and after.total > after.peak


def test_rms_norm_rounds_before_it_meets_the_weight_as_llama_does():
    x, weight = (torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16() for n in ((64, 48), (48,)))
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), weight * normed.bfloat16())
    assert not torch.equal(rms_norm(x, weight, 1e-5), (weight.float() * normed).bfloat16())


def test_on_cuda_attention_is_the_fused_one_and_is_named():
    assert Kernels.for_device(Device(kind="cuda")).chosen == {
        "rms_norm": "reference",
        "attention": "sdpa",
        "capped_attention": "reference",
        "sink_attention": "reference",
        "clamped_swiglu": "reference",
        "swiglu": "reference",
        "geglu": "reference",
        "rotary": "reference",
        "routing": "reference",
        "grouped_linear": "reference",
        "causal_conv": "reference",
        "gated_delta_rule": "chunked",
        "selective_scan": "chunked",
    }


def test_geglu_is_the_gated_gelu_with_tanh_on_the_first_half():
    x = torch.randn(3, 5, 22, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gate, up = x[..., :11], x[..., 11:]
    by_hand = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    assert (geglu(x) - by_hand).abs().max() < 1e-14
