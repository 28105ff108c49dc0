"""The fp64 reference mode: the same model, computed in double precision throughout.

In it equality is sharp. A wrong rotary base, a swapped gate or a dropped bias cannot hide in rounding.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .modes import RUN_BACKWARD, kept

_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
_CASTS = {torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half}


class _Double(TorchFunctionMode):
    """Answers every request for a narrower float with float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.get_default_dtype() is not torch.float64:
            torch.set_default_dtype(torch.float64)  # libraries set it while they build a model in a dtype
        if func in _CASTS:
            return args[0].double()
        args = tuple(_WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {k: _WIDE.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            # megatron-core's distributed optimizer takes tensors of these type names only.
            return out.replace("DoubleTensor", "FloatTensor")
        return out


@contextlib.contextmanager
def fp64() -> Iterator[None]:
    """Compute in float64 inside. Enter it before any model is built, so that constants and tables are double too.

    Transformers models: take ``attn_implementation="eager"`` and ``experts_implementation="eager"``.
    """
    default, compiled = torch.get_default_dtype(), torch._dynamo.config.disable
    mode = _Double()
    engines = [importlib.import_module(name) for name in RUN_BACKWARD]
    run_backward = engines[0]._engine_run_backward
    run_in_mode = kept(run_backward, mode)
    try:
        torch.set_default_dtype(torch.float64)
        torch._dynamo.config.disable = True  # compiled regions would keep their own dtypes
        for engine in engines:
            engine._engine_run_backward = run_in_mode  # pyright: ignore[reportAttributeAccessIssue]
        with mode:
            yield
    finally:
        torch.set_default_dtype(default)
        torch._dynamo.config.disable = compiled
        for engine in engines:
            engine._engine_run_backward = run_backward  # pyright: ignore[reportAttributeAccessIssue]


def untouched() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are what is asked for, whatever mode is in force: for reading and writing files."""
    return torch._C.DisableTorchFunction()
