"""What a rank shows of itself to a proof: a few steps in the reference mode, with every gradient and weight."""

from pathlib import Path

from mindspeed_models.weights.shards import save_pieces
from mindspeed_runtime.launch import Rank
from mindspeed_runtime.recipe import Recipe

from .optimizer import gradient_pieces
from .prove import Observation
from .rank import data_of
from .session import Session, open_session

_STEPS = 2


def observed(rank: Rank, recipe: Recipe, folder: Path) -> Observation:
    """Take two optimizer steps in the reference mode and write gradients and weights below ``folder``."""
    with open_session(rank, recipe, reference=True) as session:
        return observe_session(session, recipe, folder)


def observe_session(session: Session, recipe: Recipe, folder: Path) -> Observation:
    """The part of ``observed`` that comes after the session is open."""
    engine = session.engine
    if engine.is_main:
        for name in ("gradients", "model"):
            (folder / name).mkdir(parents=True)
    data = data_of(recipe, session, folder.parent / "data")
    results = []
    for step in range(_STEPS):
        batches = data.train.step(step)
        results.append(engine.train_step(step, batches, recipe.optimizer.lr))
    # The gradients of the last step are still in place.
    save_pieces(folder / "gradients", gradient_pieces(engine.optimizer, engine.pieces()))
    engine.save_weights(folder / "model")
    return Observation(
        losses=tuple(result.loss for result in results), grad_norms=tuple(result.grad_norm for result in results)
    )
