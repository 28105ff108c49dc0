"""The verbs of ``mindspeed-convert``."""

import json
from pathlib import Path
from typing import Any

import click
from mindspeed_kernels.errors import RunError, UserError
from mindspeed_runtime.cli import NewFile

_out = click.argument("out", type=click.Path(path_type=Path))
_force = click.option("--force", is_flag=True, help="Replace what is at OUT, as a whole.")


@click.command("to-megatron")
@click.argument("model", type=click.Path(path_type=Path))
@_out
@_force
def to_megatron_command(model: Path, out: Path, force: bool) -> None:
    """Convert MODEL, a Hugging Face folder or a GGUF file, to a checkpoint at OUT that serves every layout."""
    from mindspeed_models.weights.convert import to_megatron
    from mindspeed_models.weights.source import open_source

    _check_target(out, force)
    source = open_source(model)
    with _progress(len(source.rules)) as done:
        to_megatron(source, out, force=force, progress=done)
    click.echo(f"{out}: checkpoint of {source.family.name}, {_count(source)} parameters in {len(source.rules)} tensors")


@click.command("to-hf")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_out
@_force
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file, as 500MB or 5GB.")
def to_hf_command(checkpoint: Path, out: Path, force: bool, max_shard_size: str) -> None:
    """Convert CHECKPOINT to a Hugging Face folder at OUT."""
    from mindspeed_models.weights.convert import to_hf
    from mindspeed_models.weights.source import open_source
    from mindspeed_runtime.rundir import read_manifest

    _check_target(out, force)
    if (checkpoint / "model").is_dir():
        read_manifest(checkpoint)
    source = open_source(checkpoint)
    with _progress(len(source.rules)) as done:
        to_hf(source, out, force=force, max_shard=_bytes(max_shard_size), progress=done)
    click.echo(f"{out}: Hugging Face folder of {source.family.name}, {_count(source)} parameters")


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(path: Path, tensors: bool, as_json: bool) -> None:
    """Show what PATH holds: family, sizes, parameters, dtypes, and, on request, its tensors."""
    from .inspection import inspected, show

    found = inspected(path)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        show(found, tensors=tensors)


@click.command("verify")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--against", type=click.Path(path_type=Path), help="Checkpoint to compare with; a fresh conversion if not given."
)
@click.option(
    "--layouts",
    default="auto",
    show_default=True,
    help="Layouts, separated by commas; auto: all that the model allows of the usual ones.",
)
@click.option(
    "--precision",
    default="fp64",
    show_default=True,
    type=click.Choice(["fp64", "fp32", "bf16"]),
    help="Of both computations; each has its own bound.",
)
@click.option("--gradients", is_flag=True, help="Compare the gradient of every weight too (fp64).")
@click.option("--json", "json_file", type=NewFile(), help="Write the report to a file.")
def verify_command(
    model: Path, against: Path | None, layouts: str, precision: str, gradients: bool, json_file: Path | None
) -> None:
    """Compare MODEL, as transformers computes it, with its checkpoint, as megatron-core computes it.

    Every tensor through the weight rules bit for bit, every key of the configuration, and logits and losses at all
    positions in every layout. Exit code 1 when anything differs; the report names the tensor, key or module.
    """
    from importlib.util import find_spec

    if find_spec("mindspeed_train") is None:
        raise UserError("verify: it runs the model with megatron-core; install mindspeed-tools[megatron]")
    from mindspeed_runtime.launch import warm_up
    from mindspeed_train import PRELOAD

    warm_up(*PRELOAD)  # while this process imports for seconds itself
    from .verify import verify

    report = verify(model, against, layouts=layouts, precision=precision, gradients=gradients, say=click.echo)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if not report.holds:
        raise RunError(f"verify: {report.first_failure}")
    click.echo("verified: equal in every tensor, every key and every layout")


def _check_target(out: Path, force: bool) -> None:
    if out.exists() and not force and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; name another folder, or use --force to replace it")


def _progress(total: int) -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def running() -> Any:
        with Progress(
            console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
        ) as bar:
            task = bar.add_task("tensors", total=total)
            yield lambda _name, _bytes: bar.advance(task)

    return running()


def _count(source: object) -> str:
    from mindspeed_models.weights.convert import num_parameters

    return f"{num_parameters(source):,}"  # type: ignore[arg-type]


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2], text[-2:].upper()
    if unit not in units or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise UserError(f"--max-shard-size {text}: write it as 500MB or 5GB")
    return int(float(number) * units[unit])
