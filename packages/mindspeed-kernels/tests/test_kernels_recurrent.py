"""Mixers with a state: chunks against the recurrence, both against what transformers computes, documents kept apart."""

import pytest
import torch
from mindspeed_kernels.ops.recurrent import (
    causal_conv,
    chunked_gated_delta_rule,
    chunked_selective_scan,
    gated_delta_rule,
    selective_scan,
)
from mindspeed_kernels.reference import fp64
from torch.nn import functional

PAIRS = {"delta": (gated_delta_rule, chunked_gated_delta_rule), "scan": (selective_scan, chunked_selective_scan)}
LENGTHS = [5, 64, 65, 150]  # less than a chunk, one, one and a token, more than two


def _inputs(kind, length, *, heads=6, key_heads=2, dim=7, value_dim=5):
    generator = torch.Generator().manual_seed(length)

    def random(*shape):
        return torch.randn(2, length, *shape, generator=generator, dtype=torch.float64)

    q, k = functional.normalize(random(key_heads, dim), dim=-1), functional.normalize(random(key_heads, dim), dim=-1)
    decay = -functional.softplus(random(heads))
    found = [q, k, random(heads, value_dim), decay]
    return [*found, random(heads).sigmoid()] if kind == "delta" else found


def _documents(length):
    """Of one to three documents, cut within chunks and at the end of one; and of padding."""
    first = torch.ones(length, dtype=torch.long)
    first[length // 3 :] = 2
    first[64:] = 3
    second = torch.ones(length, dtype=torch.long)
    second[-2:] = 0
    return torch.stack((first, second))


def _both(kind, length, documents):
    results = []
    for function in PAIRS[kind]:
        given = [x.clone().requires_grad_() for x in _inputs(kind, length)]
        with fp64():
            out = function(*given, documents=documents)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), given)))
    return results


@pytest.mark.parametrize("kind", list(PAIRS))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_equal_the_recurrence_with_every_gradient(kind, length, has_documents):
    ours, reference = _both(kind, length, _documents(length) if has_documents else None)
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("function", [f for pair in PAIRS.values() for f in pair])
def test_a_document_is_what_it_is_alone_whatever_stands_before_it(function):
    kind = "delta" if "delta" in function.__name__ else "scan"
    inputs, documents = _inputs(kind, 150), _documents(150)
    with fp64():
        whole = function(*inputs, documents=documents)
        for start, stop in ((0, 50), (50, 64), (64, 150)):
            alone = function(*(x[:1, start:stop] for x in inputs))
            torch.testing.assert_close(whole[:1, start:stop], alone, rtol=1e-10, atol=1e-12)
        open_gate = function(*inputs)
    assert (whole - open_gate)[0, 50:].abs().max() > 1e-2  # without document numbers it does pass


@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_is_pytorchs_and_stops_at_documents(length, has_bias):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, length, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    bias = torch.randn(6, generator=generator, dtype=torch.float64) if has_bias else None
    expected = functional.conv1d(x.mT, weight, bias, padding=3, groups=6)[..., :length].mT
    torch.testing.assert_close(causal_conv(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    documents = torch.zeros(2, length, dtype=torch.int32)
    documents[:, length // 2 :] = 1
    apart = causal_conv(x, weight, bias, documents=documents)
    parts = [causal_conv(part, weight, bias) for part in (x[:, : length // 2], x[:, length // 2 :]) if part.shape[1]]
    torch.testing.assert_close(apart, torch.cat(parts, dim=1), rtol=1e-12, atol=1e-12)


def test_a_state_that_decays_to_nothing_leaves_the_present_alone():
    q, k, v, decay = _inputs("scan", 70)
    out = chunked_selective_scan(q, k, v, torch.full_like(decay, -1e4))
    groups = v.shape[2] // k.shape[2]
    own = (q * k).sum(-1, keepdim=True).repeat_interleave(groups, dim=2) * v
    torch.testing.assert_close(out, own, rtol=1e-5, atol=1e-6)
    assert out.isfinite().all()
