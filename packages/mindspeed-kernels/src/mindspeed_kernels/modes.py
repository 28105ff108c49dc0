"""Torch function modes that stay in force while gradients are computed.

PyTorch takes a mode off for the length of a call to ``backward``. What Python computes in there, a recomputed layer or
the backward of an autograd function, is then computed without the mode, and no error says so.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# The function that all of PyTorch's ways to start a backward pass call, and the modules that bind it.
RUN_BACKWARD = ("torch.autograd.graph", "torch.autograd")


def kept(run_backward: Callable[..., Any], mode: TorchFunctionMode) -> Callable[..., Any]:
    """``run_backward`` with ``mode`` in force inside."""

    @functools.wraps(run_backward)
    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        if any(active is mode for active in _get_current_function_mode_stack()):
            return run_backward(*args, **kwargs)
        with mode:
            return run_backward(*args, **kwargs)

    return run_in_mode
