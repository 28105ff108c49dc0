"""The fp64 reference mode."""

from typing import ClassVar

import pytest
import torch
from mindspeed_kernels.reference import fp64
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_everything_inside_is_double_and_everything_outside_is_as_before():
    with fp64():
        assert torch.get_default_dtype() == torch.float64
        assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
        assert torch.zeros(1).to(torch.float16).dtype == torch.float64
        assert torch.arange(3, dtype=torch.int32).dtype == torch.int32
        assert nn.Linear(2, 2).bfloat16().weight.dtype == torch.float64
        assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.zeros(1, dtype=torch.float64).type() == "torch.DoubleTensor"


def test_a_softmax_asked_for_in_float32_runs_in_double():
    x = torch.linspace(0, 9, 10, dtype=torch.float64)
    with fp64():
        exact = torch.softmax(x, -1, dtype=torch.float32)
    assert torch.equal(exact, torch.softmax(x, -1))
    assert not torch.equal(torch.softmax(x, -1, dtype=torch.float32).double(), exact)


class _Recomputes(torch.autograd.Function):
    """Notes in its backward what a cast to float32 gives there."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        _Recomputes.seen.append(grad.float().dtype)
        return 2 * grad


@pytest.mark.parametrize(
    "start",
    [lambda y, x: y.backward(), lambda y, x: torch.autograd.backward(y), torch.autograd.grad],
    ids=["Tensor.backward", "autograd.backward", "autograd.grad"],
)
def test_what_is_computed_in_a_backward_pass_is_double_too(start):
    run_backward = torch.autograd._engine_run_backward
    with fp64():
        x = torch.ones(3, requires_grad=True)
        start(_Recomputes.apply(x).sum(), x)
    assert _Recomputes.seen.pop() == torch.float64
    x = torch.ones(3, requires_grad=True, dtype=torch.float64)
    start(_Recomputes.apply(x).sum(), x)
    assert _Recomputes.seen.pop() == torch.float32
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward is run_backward


def test_a_checkpointed_layer_is_recomputed_in_double():
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)

    def layer(value):
        return (value.float() * 1.1).sin()

    with fp64():
        (plain,) = torch.autograd.grad(layer(x).sum(), x)
        checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, plain)


def test_an_error_inside_restores_everything():
    before = (torch.get_default_dtype(), torch._dynamo.config.disable, torch.autograd._engine_run_backward)
    with pytest.raises(KeyError), fp64():
        raise KeyError
    assert (torch.get_default_dtype(), torch._dynamo.config.disable, torch.autograd._engine_run_backward) == before
    assert torch.zeros(1).float().dtype == torch.float32


def test_a_library_that_narrows_the_default_while_it_builds_a_model_builds_in_double():
    with fp64():
        torch.set_default_dtype(torch.bfloat16)
        assert nn.Linear(2, 2).weight.dtype == torch.tensor([1.5]).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
