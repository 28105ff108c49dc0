"""Conversion between Hugging Face folders and checkpoints, one tensor in memory at a time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from mindspeed_runtime.rundir import new_folder, write_manifest
from torch import Tensor

from .safetensors_files import DTYPES, Planned, write_folder
from .shards import Piece, save_pieces
from .source import Source

SHARD_BYTES = 5 * 10**9
Progress = Callable[[str, int], None]  # our name of the tensor that is done, its bytes


def to_megatron(source: Source, out: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write a checkpoint (``model/``, ``hf/``, manifest) with every weight of ``source``, dtypes kept.

    One folder serves every layout. Nothing stands at ``out`` before all of it does.
    """
    with new_folder(out, force=force) as folder:
        for name in ("model", "hf"):
            (folder / name).mkdir()
        source.copy_description(folder / "hf")
        save_pieces(folder / "model", [_piece(source, name, progress) for name in source.rules])
        write_manifest(folder, "weights", family=source.family.name, parameters=num_parameters(source))


def to_hf(
    source: Source, out: Path, *, force: bool = False, max_shard: int = SHARD_BYTES, progress: Progress | None = None
) -> None:
    """Write a Hugging Face folder with every weight of ``source``, dtypes kept.

    Nothing stands at ``out`` before all of it does.
    """
    planned = [
        Planned(name=name, shape=rule.hf_shape(number), dtype=source.dtype(rule.ours))
        for rule in source.rules.values()
        for number, name in enumerate(rule.hf)
    ]
    with new_folder(out, force=force) as folder:
        write_folder(folder, planned, _unpacked(source, progress), max_shard=max_shard)
        source.copy_description(folder)
        _state_dtype(folder / "config.json", planned)


def num_parameters(source: Source) -> int:
    """How many weights the model has; tied ones count once."""
    return sum(torch.Size(rule.shape).numel() for rule in source.rules.values())


def _piece(source: Source, name: str, progress: Progress | None) -> Piece:
    box, dtype = source.whole(name), source.dtype(name)

    def fill() -> Tensor:
        tensor = source.read(box)
        if progress is not None:
            progress(name, tensor.nbytes)
        return tensor

    return Piece(box=box, dtype=dtype, fill=fill)


def _unpacked(source: Source, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    for name, rule in source.rules.items():
        whole = source.read(source.whole(name))
        yield from zip(rule.hf, rule.unpack(whole), strict=True)
        if progress is not None:
            progress(name, whole.nbytes)


def _state_dtype(path: Path, planned: list[Planned]) -> None:
    """Let config.json name the dtype of the weights beside it, where it names another."""
    counts: dict[torch.dtype, int] = {}
    for plan in planned:
        counts[plan.dtype] = counts.get(plan.dtype, 0) + plan.num_bytes
    stored = str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")
    assert getattr(torch, stored) in DTYPES.values()
    config = json.loads(path.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if all(config[key] == stored for key in keys) and keys:
        return
    config.pop("torch_dtype", None)
    config["dtype"] = stored
    path.write_text(json.dumps(config, indent=2) + "\n")
