"""Proofs of a recipe on this machine: that a layout computes what one process computes, that a resumed run is the run.

Both need no accelerator and end in a number. ``layout`` works in the fp64 reference mode: what is the same in theory
then agrees to ten digits, and what is not cannot hide. ``resume`` compares every byte of the final state.
"""

import math
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mindspeed_kernels.errors import RunError
from mindspeed_models.plan import check_plan
from mindspeed_models.weights.shards import Box, Shards
from mindspeed_models.weights.source import open_source
from mindspeed_parallel.layout import Layout, parse_layout
from mindspeed_runtime.config import check_recipe
from mindspeed_runtime.launch import LaunchError, Pool
from mindspeed_runtime.recipe import Recipe
from mindspeed_runtime.rundir import Checkpoints
from torch import Tensor

from . import PRELOAD
from .run import TRAIN, run

BOUND = 1e-10  # relative to the largest reference value
DEFAULT_LAYOUTS = ("tp2", "tp2sp", "pp2", "pp2vpp2", "dp2", "tp2pp2")
OBSERVED = "mindspeed_train.observe:observed"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one process of a layout says of a few steps; gradients and weights are in files."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest relative difference of one kind of quantity, and where it is."""

    quantity: str
    value: float
    where: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a layout compares with one process."""

    layout: str
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max((difference.value for difference in self.differences), default=math.inf)

    @property
    def holds(self) -> bool:
        """Equal within the bound. A number that is not finite never is."""
        return all(math.isfinite(item.value) and item.value <= BOUND for item in self.differences)


def with_layout(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe on another layout."""
    parallel = replace(
        recipe.parallel,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        sequence=layout.sequence,
    )
    return replace(recipe, parallel=parallel, megatron=replace(recipe.megatron, virtual=layout.virtual, layers=None))


def prove_layouts(
    recipe: Recipe,
    layouts: Sequence[str],
    folder: Path,
    *,
    observe: Callable[..., Observation] | str = OBSERVED,
    report: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Compare each layout with one process: losses, gradient norms, every gradient and every updated weight.

    ``folder`` holds the gathered tensors. Dropout is off: its masks are not meant to be equal.
    """
    recipe = replace(recipe, model=replace(recipe.model, dropout=0.0))
    parsed = [parse_layout(text) for text in layouts]
    arch = open_source(Path(recipe.model.path), weights=recipe.model.init == "weights").arch
    for layout in parsed:
        check_recipe(with_layout(recipe, layout), layout.ranks)
        check_plan(with_layout(recipe, layout), arch, layout.ranks)
    verdicts = []
    with Pool(max((layout.ranks for layout in parsed), default=1), preload=PRELOAD, log_dir=folder / "logs") as pool:
        one = pool.run(observe, with_layout(recipe, Layout()), folder / "one", nproc=1, timeout_s=_TIMEOUT_S)[0]
        for layout in parsed:
            here = folder / str(layout)
            other = pool.run(observe, with_layout(recipe, layout), here, nproc=layout.ranks, timeout_s=_TIMEOUT_S)[0]
            verdicts.append(Verdict(layout=str(layout), differences=_compare(one, other, folder / "one", here)))
            shutil.rmtree(here)
            if report is not None:
                report(verdicts[-1])
    return verdicts


def _compare(one: Observation, other: Observation, reference: Path, folder: Path) -> tuple[Difference, ...]:
    return (
        _numbers("loss", one.losses, other.losses),
        _numbers("gradient norm", one.grad_norms, other.grad_norms),
        _tensors("gradient", reference / "gradients", folder / "gradients"),
        _tensors("weight", reference / "model", folder / "model"),
    )


def _numbers(quantity: str, reference: Sequence[float], values: Sequence[float]) -> Difference:
    pairs = [
        (abs(b - a) / abs(a) if a else abs(b), step) for step, (a, b) in enumerate(zip(reference, values, strict=True))
    ]
    value, step = max(pairs, key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)
    return Difference(quantity=quantity, value=value, where=f"step {step + 1}")


def _tensors(quantity: str, reference: Path, folder: Path) -> Difference:
    expected, found = read_all(reference), read_all(folder)
    if set(expected) != set(found):
        strange = min(set(expected) ^ set(found))
        return Difference(quantity=quantity, value=math.inf, where=f"{strange} (held by one of the two only)")
    worst = Difference(quantity=quantity, value=0.0, where="")
    for name, tensor in expected.items():
        scale = tensor.abs().max().item() or 1.0
        value = ((found[name] - tensor).abs().max() / scale).item()
        if not value <= worst.value:  # also when it is not a number
            worst = Difference(quantity=quantity, value=value, where=name)
    return worst


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a ``torch_dist`` folder, whole."""
    shards = Shards(folder)
    found = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in shards.tensors.items()}
    shards.load([(Box.of_whole(key, tuple(tensor.shape)), tensor) for key, tensor in found.items()])
    return found


@dataclass(frozen=True, kw_only=True)
class ResumeVerdict:
    """How a run that was taken up again compares with one that went straight through."""

    steps: int
    split: int
    kills: int
    compared: int  # tensors
    bytes: int
    differing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Every byte is equal, and there was something to compare."""
        return not self.differing and self.compared > 0


def prove_resume(
    recipe: Recipe, folder: Path, *, num_ranks: int, steps: int, split: int, kills: int = 0, seed: int = 0
) -> ResumeVerdict:
    """Compare ``steps`` optimizer steps at once with a run that stops after ``split`` and is resumed by new processes.

    With ``kills`` the second run is killed (SIGKILL) that many times, at random moments, and resumed each time.
    """
    if not 0 < split < steps:
        raise RunError(f"prove resume: --split {split} must lie between 0 and --steps {steps}")
    straight, broken = folder / "straight", folder / "split"
    run(_run_of(recipe, straight, steps, steps), num_ranks=num_ranks)
    if kills:
        _run_through_kills(_run_of(recipe, broken, steps, 1), num_ranks, kills, random.Random(seed))
    else:
        first = _run_of(recipe, broken, steps, split)
        _stop_after(first, num_ranks, split)
        run(first, num_ranks=num_ranks, resume=True)
    return _same_bytes(straight, broken, steps=steps, split=split, kills=kills)


def _run_of(recipe: Recipe, folder: Path, steps: int, every: int) -> Recipe:
    return replace(
        recipe,
        training=replace(recipe.training, steps=steps, epochs=None),
        checkpoint=replace(recipe.checkpoint, folder=str(folder), every=every, export_hf=False),
    )


def _stop_after(recipe: Recipe, num_ranks: int, split: int) -> None:
    """Run until the checkpoint of ``split`` is there, then end every process at once."""
    checkpoints = Checkpoints(Path(recipe.checkpoint.folder) / "checkpoints")
    with Pool(num_ranks, preload=PRELOAD, log_dir=Path(recipe.checkpoint.folder) / "logs") as pool:
        _until(pool, recipe, num_ranks, False, lambda: checkpoints.at(split) in checkpoints.all())
    for path in checkpoints.all():
        if path != checkpoints.at(split):
            shutil.rmtree(path)


def _run_through_kills(recipe: Recipe, num_ranks: int, kills: int, chance: random.Random) -> None:
    checkpoints = Checkpoints(Path(recipe.checkpoint.folder) / "checkpoints")
    with Pool(num_ranks, preload=PRELOAD, log_dir=Path(recipe.checkpoint.folder) / "logs") as pool:
        for _ in range(kills):
            deadline = time.monotonic() + chance.uniform(0.2, 6.0)
            _until(pool, recipe, num_ranks, checkpoints.latest() is not None, lambda at=deadline: time.monotonic() > at)
        resume = checkpoints.latest() is not None
        pool.run(TRAIN, recipe, resume, nproc=num_ranks, timeout_s=_TIMEOUT_S)


def _until(pool: Pool, recipe: Recipe, num_ranks: int, resume: bool, condition: Callable[[], bool]) -> None:
    """Train until ``condition``, then kill all ranks; or to the end, if that comes first."""
    import threading

    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if condition():
                pool.signal(signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        pool.run(TRAIN, recipe, resume, nproc=num_ranks, timeout_s=_TIMEOUT_S)
    except LaunchError:
        if not condition():
            raise  # it failed by itself
    finally:
        over.set()
        watcher.join()


def _same_bytes(straight: Path, broken: Path, *, steps: int, split: int, kills: int) -> ResumeVerdict:
    differing: list[str] = []
    compared = num_bytes = 0
    at = f"checkpoints/step-{steps:08}"
    for part in ("model", "optimizer"):
        expected, found = read_all(straight / at / part), read_all(broken / at / part)
        for name in sorted(set(expected) | set(found)):
            compared += 1
            same = name in expected and name in found and _bits(expected[name], found[name])
            num_bytes += expected[name].nbytes if name in expected else 0
            if not same:
                differing.append(f"{part}/{name}")
    for name in ("progress.json", "optimizer/steps.json"):
        compared += 1
        if (straight / at / name).read_bytes() != (broken / at / name).read_bytes():
            differing.append(name)
    return ResumeVerdict(
        steps=steps, split=split, kills=kills, compared=compared, bytes=num_bytes, differing=tuple(differing)
    )


def _bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_json(verdicts: Sequence[Verdict]) -> list[Mapping[str, Any]]:
    """For a file."""
    return [{**asdict(verdict), "worst": verdict.worst, "holds": verdict.holds, "bound": BOUND} for verdict in verdicts]
