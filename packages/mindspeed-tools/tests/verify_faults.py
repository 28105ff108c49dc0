"""Faults that are planted in rank processes."""

from unittest import mock

from mindspeed_tools.verify_rank import gradients


def without_norm_reduction(*arguments):
    """Norm gradients are not summed over tensor ranks."""
    name = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    with mock.patch(name):
        return gradients(*arguments)
