"""The decoder against a decoder written down in plain PyTorch, and its vocabulary padding."""

import math

import pytest
import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_parallel.megatron.config import DecoderConfig
from mindspeed_parallel.megatron.layers import Add, Norm
from tiny_training import (
    HEAD_DIM,
    LENGTH,
    NUM_TOKENS,
    WINDOWS,
    PackedDocuments,
    Rotary,
    batches,
    chunks_for,
    config_for,
    opened,
)
from torch.nn import functional

pytestmark = pytest.mark.dist
EPS = 1e-5


def _forward(rank, layout="tp1"):
    """Weights, logits and losses of one micro-batch in one process."""
    with opened(rank, layout) as groups:
        (chunk,) = chunks_for(groups, config_for(groups))
        tokens, labels, positions, documents = batches(3)[0]
        packed = PackedDocuments.of(documents, LENGTH)
        chunk.eval()
        with torch.no_grad():
            logits = chunk(tokens, positions, None, packed_seq_params=packed)
            losses = chunk(tokens, positions, None, labels=labels, packed_seq_params=packed)
        weights = {name: value.detach().clone() for name, value in chunk.named_parameters()}
        return weights, logits, losses


def _norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rotated(x, positions):
    """x (B, S, H, D) turned by the angle of each position, pair (i, i + D / 2) by pair, as complex numbers."""
    frequencies = 1e4 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[..., None, None] * frequencies)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attention(q, k, v, documents, window):
    """Token by token: softmax over the keys that the token may see."""
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for at in range(q.shape[1]):
            first = 0 if window is None else max(0, at - window + 1)
            keys = [t for t in range(first, at + 1) if documents[row, t] == documents[row, at]]
            for head in range(q.shape[2]):
                group = head * k.shape[2] // q.shape[2]
                scores = k[row, keys, group] @ q[row, at, head] / math.sqrt(HEAD_DIM)
                out[row, at, head] = scores.softmax(0) @ v[row, keys, group]
    return out


def _plain_decoder(weights, tokens, positions, documents):
    """Logits (B, S, V) of the tiny decoder: 4 heads, 2 kv heads, the weights by megatron-core's names."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer, window in enumerate(WINDOWS):
        w = {name.removeprefix(f"decoder.layers.{layer}."): value for name, value in weights.items()}
        qkv = functional.linear(
            _norm(x, w["input_layernorm.weight"]),
            w["self_attention.linear_qkv.weight"],
            w["self_attention.linear_qkv.bias"],
        ).unflatten(-1, (2, 4, HEAD_DIM))  # by kv head: two queries, key, value
        q, k, v = qkv[..., :2, :].flatten(2, 3), qkv[..., 2, :], qkv[..., 3, :]
        q, k = (_norm(t, w[f"self_attention.{n}_layernorm.weight"]) for n, t in (("q", q), ("k", k)))
        out = _attention(_rotated(q, positions), _rotated(k, positions), v, documents, window)
        x = x + functional.linear(
            out.flatten(2), w["self_attention.linear_proj.weight"], w["self_attention.linear_proj.bias"]
        )
        gate, up = functional.linear(_norm(x, w["pre_mlp_layernorm.weight"]), w["mlp.linear_fc1.weight"]).chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, w["mlp.linear_fc2.weight"])
    return _norm(x, weights["decoder.final_layernorm.weight"]) @ weights["embedding.word_embeddings.weight"].T


@pytest.fixture(scope="module")
def forward(pool):
    return pool.run(_forward, nproc=1)[0]


def test_logits_equal_a_decoder_in_plain_pytorch(forward):
    weights, logits, _ = forward
    tokens, _, positions, documents = batches(3)[0]
    expected = _plain_decoder(weights, tokens, positions, documents)
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-12


@pytest.mark.parametrize("fault", ["positions", "documents", "window"])
def test_a_planted_fault_in_positions_documents_or_windows_shows(forward, fault, monkeypatch):
    weights, logits, _ = forward
    tokens, _, positions, documents = batches(3)[0]
    if fault == "positions":
        positions = torch.arange(LENGTH).expand_as(positions)
    elif fault == "documents":
        documents = torch.ones_like(documents)
    else:
        monkeypatch.setattr("test_layers.WINDOWS", (None, 5, None, 4))
    expected = _plain_decoder(weights, tokens, positions, documents)
    assert float((logits - expected).abs().max() / expected.abs().max()) > 1e-4


def test_rows_that_pad_the_vocabulary_stay_out_of_the_softmax(forward):
    weights, logits, losses = forward
    _, labels, _, _ = batches(3)[0]
    assert weights["embedding.word_embeddings.weight"].shape[0] == 64 > NUM_TOKENS
    trained = labels >= 0
    expected = functional.cross_entropy(logits[..., :NUM_TOKENS][trained], labels[trained], reduction="none")
    torch.testing.assert_close(losses[trained], expected, rtol=1e-12, atol=1e-12)
    leaking = functional.cross_entropy(logits[trained], labels[trained], reduction="none")
    assert float((losses[trained] - leaking).abs().min()) > 1e-6


def _padding_lies_on_one_rank(rank):
    with opened(rank, "tp2") as groups:
        (chunk,) = chunks_for(groups, config_for(groups, num_tokens=31))
        tokens, labels, positions, documents = batches(3)[0]
        packed = PackedDocuments.of(documents, LENGTH)
        with torch.no_grad():
            losses = chunk(tokens % 31, positions, None, labels=labels.clamp(max=30), packed_seq_params=packed)
            logits = chunk(tokens % 31, positions, None, packed_seq_params=packed)
        return losses, logits


def test_a_rank_that_holds_nothing_but_padding_adds_nothing(pool):
    found = pool.run(_padding_lies_on_one_rank, nproc=2)
    logits = torch.cat([part for _, part in found], dim=-1)
    _, labels, _, _ = batches(3)[0]
    trained = labels >= 0
    expected = functional.cross_entropy(logits[..., :31][trained], labels.clamp(max=30)[trained], reduction="none")
    for losses, _ in found:
        torch.testing.assert_close(losses[trained], expected, rtol=1e-12, atol=1e-12)


def _turns_of_a_narrow_model(rank):
    with opened(rank, "tp1", reference=False) as groups:
        config = config_for(groups, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True)
        (chunk,) = chunks_for(groups, config)
        chunk.bfloat16()
        return chunk.rotary_pos_emb.turns(torch.tensor([[0, 1, 50_001]]), torch.float32)


def test_angles_keep_their_precision_in_a_narrow_model(pool):
    ((cos, sin),) = pool.run(_turns_of_a_narrow_model, nproc=1)
    angles = 50_001 * 1e4 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    assert cos.shape == sin.shape == (1, 3, 1, HEAD_DIM)
    for found, expected in ((cos, angles.cos()), (sin, angles.sin())):
        assert float((found[0, 2, 0].double() - torch.cat((expected, expected))).abs().max()) < 5e-3


def test_an_attention_factor_scales_what_is_rotated():
    frequencies, positions = torch.tensor([1.0, 0.1]), torch.tensor([[0, 7]])
    plain = Rotary(frequencies).turns(positions, torch.float64)
    scaled = Rotary(frequencies, attention_factor=1.25).turns(positions, torch.float64)
    assert all(torch.allclose(1.25 * one, other) for one, other in zip(plain, scaled, strict=True))


def _layer_config(**fields):
    base = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return DecoderConfig(**base, kernels=Kernels.reference(), use_cpu_initialization=True, **fields)


def _random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_offset_norm_multiplies_before_it_rounds_as_gemma_does():
    norm = Norm(_layer_config(params_dtype=torch.bfloat16, norm_offset=1.0), 24, 1e-6)
    norm.weight.data.copy_(0.01 * _random(24, seed=1))
    x = _random(64, 24, seed=2).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), (normed * (1 + norm.weight.float())).bfloat16())
    assert not torch.equal(norm(x), normed.bfloat16() * (1 + norm.weight))  # the order matters here


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_norm_behind_a_layer_norms_its_bias_too_and_adds_to_the_residual(has_bias):
    add = Add(_layer_config(layernorm_epsilon=EPS), has_norm=True)
    add.norm.weight.data.copy_(_random(24, seed=1))
    out, bias, residual = (_random(3, 2, 24, seed=seed) for seed in (2, 3, 4))
    bias = bias[0, 0] if has_bias else None
    expected = residual + _norm(out if bias is None else out + bias, add.norm.weight)
    assert torch.allclose(add(True, False)((out, bias), residual, 0.0), expected, atol=1e-6)
    assert torch.equal(add(True, False)((out, bias), residual, 1.0), residual)  # all is dropped but the residual
    assert torch.allclose(
        add(False, False)((out, bias), residual, 1.0), expected, atol=1e-6
    )  # nothing outside training
