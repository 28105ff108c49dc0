"""The verbs of ``mindspeed-train``."""

from pathlib import Path

import click
from mindspeed_runtime.config import check_recipe, describe, load_recipe

_recipe = click.argument("recipe", type=click.Path(path_type=Path))
_set = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe, as section.key=value."
)
_nproc = click.option(
    "--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="Processes to start on this machine."
)


@click.command("run")
@_recipe
@_nproc
@_set
@click.option("--resume", is_flag=True, help="Continue from the newest complete checkpoint.")
@click.option("--print-config", is_flag=True, help="Show every key with its value and origin, and leave.")
@click.option("--backend", type=click.Choice(["megatron", "fsdp2"]), help="Override the recipe's backend.")
def run_command(
    recipe: Path, nproc: int, overrides: tuple[str, ...], resume: bool, print_config: bool, backend: str | None
) -> None:
    """Train as RECIPE says.

    Starts --nproc processes on this machine, or joins those of torchrun when started by it.
    """
    if backend is not None:
        overrides = (*overrides, f"backend={backend}")
    loaded = load_recipe(recipe, overrides)
    if print_config:
        click.echo(describe(loaded))
        return
    check_recipe(loaded.recipe, _num_ranks(nproc))
    if loaded.recipe.backend != "megatron":
        _hand_over(loaded.recipe.backend)(loaded.recipe, num_ranks=nproc, resume=resume)
        return
    from .run import run

    outcome = run(loaded.recipe, num_ranks=nproc, resume=resume)
    _report(outcome)


def _report(outcome: object) -> None:
    from .run import Outcome

    assert isinstance(outcome, Outcome)
    if outcome.checkpoint is not None:
        click.echo(f"checkpoint: {outcome.checkpoint}")
    if outcome.export is not None and outcome.checkpoint is not None:
        click.echo(f"Hugging Face folder: {outcome.export}")
    if not outcome.finished and outcome.checkpoint is not None:
        click.echo(f"stopped after step {outcome.step}; continue with --resume")


def _num_ranks(nproc: int) -> int:
    from mindspeed_runtime.launch import join_torchrun

    joined = join_torchrun()
    return joined.size if joined else nproc


def _hand_over(backend: str):
    from importlib.metadata import entry_points

    from mindspeed_runtime.config import ConfigError

    for point in entry_points(group="mindspeed.backends"):
        if point.name == backend:
            return point.load()
    raise ConfigError(f"backend={backend}: not installed here; install mindspeed-fsdp, or use backend=megatron")
