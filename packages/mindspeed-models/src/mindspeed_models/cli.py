"""Verbs that need no backend; both trainers mount them."""

import dataclasses
import json
from pathlib import Path

import click


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


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
