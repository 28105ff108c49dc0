"""What a model folder, a GGUF file or a checkpoint holds, told without loading weights."""

import dataclasses
from pathlib import Path
from typing import Any

from mindspeed_models.weights.convert import num_parameters
from mindspeed_models.weights.gguf import GGUFSource
from mindspeed_models.weights.source import CheckpointSource, open_source
from mindspeed_runtime.rundir import read_manifest


def inspected(path: Path) -> dict[str, Any]:
    """Facts about ``path``, as plain values."""
    source = open_source(path)
    tensors = [
        {
            "name": name,
            "shape": list(rule.shape),
            "dtype": str(source.dtype(name)).removeprefix("torch."),
            "from": list(rule.hf),
        }
        for name, rule in source.rules.items()
    ]
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor["dtype"]] = dtypes.get(tensor["dtype"], 0) + 1
    kind = (
        "checkpoint"
        if isinstance(source, CheckpointSource)
        else "GGUF"
        if isinstance(source, GGUFSource)
        else "Hugging Face"
    )
    found: dict[str, Any] = {
        "path": str(path),
        "kind": kind,
        "family": source.family.name,
        "parameters": num_parameters(source),
        "dtypes": dtypes,
        "arch": dataclasses.asdict(source.arch),
        "tensors": tensors,
    }
    if isinstance(source, CheckpointSource):
        manifest = read_manifest(path, hashes=False)
        found["manifest"] = {"kind": manifest.kind, **manifest.facts, "versions": manifest.versions}
        found["bytes"] = sum(fact["bytes"] for fact in manifest.files.values())
    return found


def show(found: dict[str, Any], *, tensors: bool) -> None:
    """Print the facts for a reader."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=found["path"], title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("kind", found["kind"])
    table.add_row("family", found["family"])
    table.add_row("parameters", f"{found['parameters']:,}")
    table.add_row("stored as", ", ".join(f"{dtype} ({count} tensors)" for dtype, count in found["dtypes"].items()))
    arch = found["arch"]
    table.add_row("layers", str(arch["num_layers"]))
    table.add_row("hidden, MLP", f"{arch['hidden']}, {arch['ffn']}")
    table.add_row("heads", f"{arch['num_heads']} query, {arch['num_kv_heads']} kv, {arch['head_dim']} wide")
    table.add_row("vocabulary", f"{arch['vocab']:,}" + (", tied" if arch["tied"] else ""))
    table.add_row(
        "positions", f"{arch['max_positions']:,}, rope {arch['rope']['kind']} theta {arch['rope']['theta']:g}"
    )
    for name, value in found.get("manifest", {}).items():
        if name != "versions":
            table.add_row(name.replace("_", " "), str(value))
    if "bytes" in found:
        table.add_row("on disk", f"{found['bytes'] / 2**20:,.1f} MiB")
    console.print(table)
    if tensors:
        listing = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("tensor", "shape", "dtype", "Hugging Face"):
            listing.add_column(column)
        for tensor in found["tensors"]:
            listing.add_row(
                tensor["name"], " x ".join(map(str, tensor["shape"])), tensor["dtype"], ", ".join(tensor["from"])
            )
        console.print(listing)
