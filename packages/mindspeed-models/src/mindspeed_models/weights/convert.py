"""Conversion between Hugging Face folders and checkpoints, one tensor in memory at a time."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from mindspeed_runtime.rundir import new_folder, write_manifest
from torch import Tensor

from .ledger import Ledger
from .safetensors_files import DTYPES, Planned, write_folder
from .shards import Box, Piece, save_pieces
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
        ledger = Ledger(source.shapes(), {name: rule.shape for name, rule in source.rules.items()})
        pieces = [_piece(source, box, ledger, progress) for name in source.rules for _, box in source.parts(name)]
        save_pieces(folder / "model", pieces)
        facts = {"family": source.family.name, "parameters": num_parameters(source), **asdict(ledger.close())}
        write_manifest(folder, "weights", **facts)


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
        ledger = Ledger(source.shapes(), {plan.name: plan.shape for plan in planned})
        write_folder(folder, planned, _unpacked(source, ledger, progress), max_shard=max_shard)
        ledger.close()
        source.copy_description(folder)
        _state_dtype(folder / "config.json", planned)


def num_parameters(source: Source) -> int:
    """How many weights the model has; tied ones count once."""
    return sum(torch.Size(rule.shape).numel() for rule in source.rules.values())


def _piece(source: Source, box: Box, ledger: Ledger, progress: Progress | None) -> Piece:
    def fill() -> Tensor:
        tensor = source.read(box, ledger=ledger)
        ledger.written(box.key, box.offset[0], tuple(tensor.shape))
        if progress is not None:
            progress(box.key, tensor.nbytes)
        return tensor

    return Piece(box=box, dtype=source.dtype(box.key), fill=fill)


def _unpacked(source: Source, ledger: Ledger, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    for name in source.rules:
        for rule, box in source.parts(name):
            parts = rule.unpack(source.read(box, ledger=ledger).view(rule.shape))
            size = sum(part.nbytes for part in parts)
            for hf in rule.hf:
                shape = tuple(parts[0].shape)
                yield hf, parts.pop(0)
                ledger.written(hf, 0, shape)  # the writer has come back for the next one
            if progress is not None:
                progress(name, size)


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
