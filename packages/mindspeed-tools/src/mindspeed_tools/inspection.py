"""What a model folder, a GGUF file or a checkpoint holds, told without loading weights."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from mindspeed_models.weights.convert import num_parameters
from mindspeed_models.weights.gguf import GGUFSource
from mindspeed_models.weights.source import CheckpointSource, Source, open_source
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
    files = _files(source)
    found: dict[str, Any] = {
        "path": str(path),
        "kind": _kind(source),
        "family": source.family.name,
        "parameters": num_parameters(source),
        "dtypes": dict(Counter(tensor["dtype"] for tensor in tensors)),
        "arch": dataclasses.asdict(source.arch),
        "bytes": sum(files.values()),
        "files": files,
        "tensors": tensors,
    }
    if isinstance(source, GGUFSource):
        found["quantised"] = dict(Counter(kind for _, kind in source.tensors.values()))
    if isinstance(source, CheckpointSource):
        manifest = read_manifest(path, hashes=False)
        found["manifest"] = {"kind": manifest.kind, **manifest.facts, "versions": manifest.versions}
    return found


def _kind(source: Source) -> str:
    if isinstance(source, CheckpointSource):
        return "checkpoint"
    return "GGUF" if isinstance(source, GGUFSource) else "Hugging Face"


def _files(source: Source) -> dict[str, int]:
    """Sizes in bytes, by name. Of a folder, everything but hidden subfolders."""
    if source.path.is_file():
        return {source.path.name: source.path.stat().st_size}
    inside = ((path.relative_to(source.path), path) for path in sorted(source.path.rglob("*")) if path.is_file())
    return {
        str(name): path.stat().st_size
        for name, path in inside
        if not any(part.startswith(".") for part in name.parts[:-1])
    }


def show(found: dict[str, Any], *, tensors: bool) -> None:
    """Print the facts for a reader."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=found["path"], title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("kind", found["kind"])
    table.add_row("family", found["family"])
    table.add_row("parameters", f"{found['parameters']:,}")
    stored = found.get("quantised", found["dtypes"])
    table.add_row("stored as", ", ".join(f"{kind} ({count} tensors)" for kind, count in stored.items()))
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
    number = len(found["files"])
    table.add_row("on disk", f"{found['bytes'] / 2**20:,.1f} MiB in {number} file{'s' if number > 1 else ''}")
    if any(arch["windows"]):
        table.add_row("sliding window", ", ".join(str(window or "none") for window in arch["windows"]))
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
