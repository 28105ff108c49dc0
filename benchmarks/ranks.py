"""The measurements that are made inside a rank process."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from mindspeed_runtime.data.batch import IGNORE, Batch
from mindspeed_runtime.launch import Rank
from mindspeed_runtime.recipe import Recipe
from mindspeed_train.optimizer import optimizer_tensors
from mindspeed_train.rank import data_of
from mindspeed_train.session import Session, open_session
from torch.nn import functional

from .harness import Result, measure


def step(rank: Rank, recipe: Recipe, folder: Path, pairs: int) -> Result:
    """An optimizer step, and the same of the transformers model by hand."""
    from transformers import AutoModelForCausalLM

    with open_session(rank, recipe) as session:
        engine, options = session.engine, recipe.optimizer
        batches = data_of(recipe, session, folder / "data").train.step(0)
        hf = AutoModelForCausalLM.from_pretrained(recipe.model.path, attn_implementation="sdpa", dtype=torch.float32)
        adam = torch.optim.AdamW(hf.parameters(), lr=options.lr, weight_decay=options.weight_decay)
        return measure(lambda: engine.train_step(0, batches, options.lr), lambda: _plain_step(hf, adam, batches), pairs)


def _plain_step(model: Any, adam: torch.optim.Optimizer, batches: list[Batch]) -> None:
    count = sum(batch.num_trained for batch in batches)
    adam.zero_grad()
    for batch in batches:
        logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        (loss / count).backward()
    adam.step()


def many_steps(rank: Rank, recipe: Recipe, folder: Path, count: int) -> float:
    """Seconds that some steps take, after one that is not counted."""
    torch.set_num_threads(1)
    with open_session(rank, recipe) as session:
        engine = session.engine
        batches = data_of(recipe, session, folder / "data").train.step(0)
        engine.train_step(0, batches, 1e-4)
        engine.share(None)
        started = time.perf_counter()
        for _ in range(count):
            engine.train_step(0, batches, 1e-4)
        return time.perf_counter() - started


def save(rank: Rank, recipe: Recipe, folder: Path, pairs: int) -> Result:
    """Writing weights and optimizer."""
    with open_session(rank, recipe) as session:
        _train_once(session, recipe, folder)

        def ours() -> None:
            _empty(folder / "ours")
            session.engine.save(folder / "ours")

        def peer() -> None:
            _write(_state(session), folder / "peer.pt")

        return measure(ours, peer, pairs)


def load(rank: Rank, recipe: Recipe, folder: Path, pairs: int) -> Result:
    """Reading them back."""
    with open_session(rank, recipe) as session:
        _train_once(session, recipe, folder)
        _empty(folder / "ours")
        session.engine.save(folder / "ours")
        _write(_state(session), folder / "peer.pt")

        def peer() -> None:
            for target, source in zip(_state(session), torch.load(folder / "peer.pt"), strict=True):
                target.copy_(source)

        return measure(lambda: session.engine.load(folder / "ours"), peer, pairs)


def _train_once(session: Session, recipe: Recipe, folder: Path) -> None:
    session.engine.train_step(0, data_of(recipe, session, folder / "data").train.step(0), 1e-4)


def _state(session: Session) -> list[torch.Tensor]:
    weights = [p.detach() for chunk in session.engine.chunks for p in chunk.parameters()]
    moments = [x.detach() for x in optimizer_tensors(session.engine.optimizer) if not isinstance(x, torch.nn.Parameter)]
    return weights + moments


def _write(state: list[torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
