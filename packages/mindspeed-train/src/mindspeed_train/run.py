"""Starting a run: everything that can be known is checked before a process is started.

What a rank then does is in ``rank.py``. It is named, not imported: megatron-core takes seconds to import, and the
process that starts the ranks has no use for it.
"""

from dataclasses import dataclass
from pathlib import Path

from mindspeed_kernels.device import check_device
from mindspeed_kernels.errors import UserError
from mindspeed_models.plan import check_plan
from mindspeed_models.weights.source import open_source
from mindspeed_runtime.config import check_recipe
from mindspeed_runtime.data.open import check_data
from mindspeed_runtime.launch import join_torchrun, launch
from mindspeed_runtime.recipe import Recipe
from mindspeed_runtime.rundir import Checkpoints

from . import PRELOAD

TRAIN = "mindspeed_train.rank:train"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # all steps were taken
    checkpoint: Path | None
    export: Path | None


def run(recipe: Recipe, *, num_ranks: int, resume: bool = False) -> Outcome:
    """Train as ``recipe`` says: in processes started here, or as one rank of torchrun's."""
    joined = join_torchrun()
    size = joined.size if joined else num_ranks
    check_recipe(recipe, size)
    folder = Path(recipe.checkpoint.folder)
    if joined is None or joined.is_main:
        check_run(recipe, size, folder, resume)
    if joined is not None:
        from .rank import train

        return train(joined, recipe, resume)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = launch(
        TRAIN, recipe, resume, nproc=num_ranks, log_dir=folder / "logs", port=recipe.launch.port, preload=PRELOAD
    )
    return outcomes[0]


def check_run(recipe: Recipe, num_ranks: int, folder: Path, resume: bool) -> None:
    """What can be known before a process is started."""
    check_device(recipe.launch.device)
    source = open_source(Path(recipe.model.path), weights=recipe.model.init == "weights")
    check_plan(recipe, source.arch, num_ranks)
    check_data(recipe)
    found = Checkpoints(folder / "checkpoints").latest()
    if resume and found is None:
        raise UserError(f"--resume: there is no complete checkpoint in {folder / 'checkpoints'}; leave --resume out")
    if not resume and found is not None:
        raise UserError(
            f"checkpoint.folder={folder}: holds a run already ({found.name}); use --resume to continue it, or another folder"
        )
