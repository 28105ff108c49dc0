"""Verbs that need no backend; both trainers mount them."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import click
from mindspeed_runtime.cli import NewFile


@click.command("plan")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="Processes in all.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_command(recipe: Path, nproc: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """What RECIPE takes on every rank: weights, gradients, optimizer state. Starts nothing."""
    from mindspeed_runtime.config import check_recipe, load_recipe

    from .families import describe
    from .plan import make_plan
    from .weights.source import read_config

    loaded = load_recipe(recipe, overrides).recipe
    check_recipe(loaded, nproc)
    _, arch = describe(read_config(Path(loaded.model.path)))
    plan = make_plan(loaded, arch, nproc)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(plan), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{arch.family}, {plan.model_parameters:,} parameters on {nproc} ranks", title_justify="left")
    for name in ("rank", "tp", "pp", "dp", "layers"):
        table.add_column(name)
    for name in ("weights", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right")
    for rank in plan.ranks:
        sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.total_bytes)
        layers = " ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in rank.layers)
        numbers = (rank.rank, rank.tensor_rank, rank.pipeline_rank, rank.data_rank)
        table.add_row(*map(str, numbers), layers, *(_mib(size) for size in sizes))
    console = Console()
    console.print(table)
    console.print(f"{plan.microbatches} micro-batches a step on each of {plan.data_size} data ranks")


@click.command("models")
@click.option("--family", help="Only models of this family.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: everything that the catalog has of each model.")
def models_command(family: str | None, as_json: bool) -> None:
    """List the named models of the catalog, with published and computed sizes."""
    from .catalog import catalog
    from .errors import ModelError
    from .families import describe
    from .plan import num_parameters

    found = [model for model in catalog().values() if family in (None, model.family)]
    if not found:
        known = ", ".join(sorted({model.family for model in catalog().values()}))
        raise ModelError(f"--family {family}: the catalog has no model of it; there are {known}")
    counts = {model.name: num_parameters(describe(model.config)[1]) for model in found}
    if as_json:
        rows = [{**dataclasses.asdict(m), "config_source": m.config_source, "computed": counts[m.name]} for m in found]
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("model", "family", "parameters", "computed", "context"):
        table.add_column(name, justify="left" if name in ("model", "family") else "right", no_wrap=True)
    for model in found:
        size = f"{counts[model.name] / 1e9:,.3f}B"
        table.add_row(model.name, model.family, model.parameters, size, f"{model.context:,}")
    console = Console()
    console.print(table)
    console.print(f"{len(found)} models")


@click.command("recipe")
@click.argument("name")
@click.option(
    "--stage", default="sft", show_default=True, type=click.Choice(["pretrain", "sft"]), help="What is trained."
)
@click.option("--devices", required=True, type=click.IntRange(min=1), help="Devices in all, one process each.")
@click.option("--memory", "memory_gib", required=True, type=click.FloatRange(min=0.1), help="GiB of each device.")
@click.option("--out", type=NewFile(), help="Write the recipe here instead of printing it.")
def recipe_command(
    name: str, stage: Literal["pretrain", "sft"], devices: int, memory_gib: float, out: Path | None
) -> None:
    """Write a complete recipe for the model NAME of the catalog, in a layout that fits."""
    from .catalog import named
    from .recipes import fit, write

    model = named(name)
    found = fit(model, stage=stage, devices=devices, memory_gib=memory_gib)
    text = write(model, found, devices=devices, memory_gib=memory_gib)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
