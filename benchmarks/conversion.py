"""Conversion, against a copy of the same weights that changes nothing."""

import os
import shutil
from functools import partial
from pathlib import Path

from mindspeed_models.weights.convert import to_hf as convert_to_hf
from mindspeed_models.weights.convert import to_megatron as convert_to_megatron
from mindspeed_models.weights.source import open_source
from safetensors import safe_open
from safetensors.torch import save_file

from .harness import Result, measure
from .subjects import converted_model


def to_megatron(folder: Path, pairs: int) -> Result:
    """Hugging Face folder to checkpoint."""
    return _measured(folder, converted_model(folder), pairs, to_checkpoint=True)


def to_hf(folder: Path, pairs: int) -> Result:
    """Checkpoint to Hugging Face folder."""
    convert_to_megatron(open_source(converted_model(folder)), folder / "checkpoint")
    return _measured(folder, folder / "checkpoint", pairs, to_checkpoint=False)


def _measured(folder: Path, source: Path, pairs: int, *, to_checkpoint: bool) -> Result:
    out = folder / "out"
    convert = convert_to_megatron if to_checkpoint else convert_to_hf
    weights = converted_model(folder) / "model.safetensors"
    return measure(
        lambda: convert(open_source(source), out), lambda: _copied(weights, out), pairs, before=partial(_removed, out)
    )


def _copied(weights: Path, out: Path) -> None:
    """Tensor by tensor, and on the disk as surely as ours."""
    out.mkdir()
    with safe_open(weights, framework="pt") as file:
        save_file({name: file.get_tensor(name) for name in file.keys()}, out / weights.name)  # noqa: SIM118  no mapping
    descriptor = os.open(out / weights.name, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _removed(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
