"""The fp64 reference mode."""

import torch
from mindspeed_kernels.reference import fp64
from torch import nn


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
