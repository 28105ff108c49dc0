"""Operators forward and backward on one thread.   Letters: B batch, S sequence, H heads, K kv heads, D head dim."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import open_device
from torch import Tensor
from torch.nn import functional

from .harness import Result, measure

Function = Callable[..., Tensor]
_CALLS = 5  # that are timed together


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One operator and what PyTorch has for it."""

    ours: Function
    peer: Function
    inputs: Callable[[], tuple[Tensor, ...]]


def operator(name: str, folder: Path, pairs: int) -> Result:
    """One of ``comparisons``."""
    del folder
    with _one_thread():
        found = comparisons()[name]
        inputs = found.inputs()
        return measure(partial(_both_ways, found.ours, inputs), partial(_both_ways, found.peer, inputs), pairs)


def comparisons() -> dict[str, Comparison]:
    """The definitions of every operator, and the attention that is taken on a CPU."""
    from transformers.models.llama.modeling_llama import rotate_half

    reference, chosen = Kernels.reference(), Kernels.for_device(open_device("cpu"))
    heads = partial(_random, (2, 256, 8, 64), (2, 256, 4, 64), (2, 256, 4, 64))
    return {
        "rms_norm": Comparison(
            ours=lambda x, weight: reference.rms_norm(x, weight, 1e-6),
            peer=lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-6),
            inputs=partial(_random, (4, 256, 512), (512,)),
        ),
        "swiglu": Comparison(ours=reference.swiglu, peer=_swiglu, inputs=partial(_random, (4, 256, 2048))),
        "rotary": Comparison(
            ours=reference.rotary,
            peer=lambda x, cos, sin: (x * cos) + (rotate_half(x) * sin),
            inputs=lambda: (*_random((2, 256, 8, 64)), *_turns(256, 64)),
        ),
        "attention": Comparison(ours=reference.attention, peer=_sdpa, inputs=heads),
        "attention-auto": Comparison(ours=chosen.attention, peer=_sdpa, inputs=heads),
    }


def _both_ways(function: Function, inputs: tuple[Tensor, ...]) -> None:
    for _ in range(_CALLS):
        function(*inputs).sum().backward()


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _swiglu(x: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    return functional.silu(x[..., :width]) * x[..., width:]


def _random(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)


def _turns(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, S, 1, D)."""
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(width // 2) * 2 / width)
    angles = torch.cat((angles, angles), dim=-1)[None, :, None]
    return angles.cos(), angles.sin()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
