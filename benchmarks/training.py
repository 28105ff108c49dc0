"""Training and its checkpoints, measured in rank processes."""

from pathlib import Path

from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.launch import Pool
from mindspeed_train import PRELOAD

from .harness import Result, in_turn
from .subjects import recipe_for

_STEP, _MANY_STEPS = "benchmarks.ranks:step", "benchmarks.ranks:many_steps"
_SAVE, _LOAD = "benchmarks.ranks:save", "benchmarks.ranks:load"
_TIMEOUT_S = 600
STAGES = 2
MICRO_BATCHES = 8
# Of a pipeline against one process: a share of the work, and the wait of every stage for STAGES - 1 micro-batches.
IDEAL = (MICRO_BATCHES + STAGES - 1) / MICRO_BATCHES / STAGES
_STEPS = 2  # that are timed together


def step(precision: str, folder: Path, pairs: int) -> Result:
    """An optimizer step."""
    recipe = recipe_for(folder, precision=precision)
    with Pool(1, preload=PRELOAD) as pool:
        return pool.run(_STEP, recipe, folder, pairs, timeout_s=_TIMEOUT_S)[0]


def pipeline(folder: Path, pairs: int) -> Result:
    """Two stages against one process, each process with one thread, in worlds of their own."""

    def steps(layout: str) -> float:
        recipe = recipe_for(folder, layout, rows=(MICRO_BATCHES, 1))
        size = parse_layout(layout).ranks
        return max(pool.run(_MANY_STEPS, recipe, folder, _STEPS, nproc=size, timeout_s=_TIMEOUT_S))

    with Pool(STAGES, preload=PRELOAD) as pool:
        return in_turn(lambda: steps(f"pp{STAGES}"), lambda: steps("tp1"), pairs)


def save(folder: Path, pairs: int) -> Result:
    """Writing a checkpoint."""
    with Pool(1, preload=PRELOAD) as pool:
        return pool.run(_SAVE, recipe_for(folder), folder, pairs, timeout_s=_TIMEOUT_S)[0]


def load(folder: Path, pairs: int) -> Result:
    """Reading it back."""
    with Pool(1, preload=PRELOAD) as pool:
        return pool.run(_LOAD, recipe_for(folder), folder, pairs, timeout_s=_TIMEOUT_S)[0]
