"""The measurements that are made inside a rank process."""

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mindspeed_kernels.errors import RunError
from mindspeed_runtime.data.batch import IGNORE, Batch
from mindspeed_runtime.launch import Rank
from mindspeed_runtime.recipe import OptimizerConfig, Recipe
from mindspeed_train.optimizer import optimizer_tensors
from mindspeed_train.rank import data_of
from mindspeed_train.session import Session, open_session
from torch import Tensor
from torch.nn import functional

from .harness import Result, measure

_SAME = {"fp32": 1e-4, "bf16": 2e-2}  # how far two first losses may lie apart, relative


class Plain:
    """The transformers model, trained by hand as a plain program would.

    AdamW over float32 weights. A 16-bit model computes with a copy of them, and its gradients are widened for the step.
    """

    def __init__(self, model: Any, options: OptimizerConfig) -> None:
        self.model = model
        self.options = options
        self.weights = list(model.parameters())
        wide = self.weights[0].dtype == torch.float32
        self.masters = self.weights if wide else [w.detach().float().requires_grad_() for w in self.weights]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def step(self, batches: list[Batch]) -> float:
        """One optimizer step; the mean loss before it."""
        count = sum(batch.num_trained for batch in batches)
        self.model.zero_grad()
        total = 0.0
        for batch in batches:
            logits = self.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            (loss / count).backward()
            total += float(loss) / count
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self.options.clip or float("inf"))
        self.adam.step()
        if self.masters is not self.weights:
            with torch.no_grad():
                for master, weight in zip(self.masters, self.weights, strict=True):
                    weight.copy_(master)
        return total


def step(rank: Rank, recipe: Recipe, folder: Path, pairs: int) -> Result:
    """An optimizer step, and the same of the transformers model by hand. RunError if the two do not start alike."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    precision = recipe.training.precision
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with open_session(rank, recipe) as session:
        engine, options = session.engine, recipe.optimizer
        batches = data_of(recipe, session, folder / "data").train.step(0)
        plain = Plain(
            AutoModelForCausalLM.from_pretrained(recipe.model.path, attn_implementation="sdpa", dtype=dtype), options
        )
        found, expected = engine.train_step(0, batches, options.lr).loss, plain.step(batches)
        if abs(found - expected) > _SAME[precision] * expected:
            raise RunError(f"step: our first loss is {found:.6g}, the peer's {expected:.6g}; they do not do the same")
        return measure(lambda: engine.train_step(0, batches, options.lr), lambda: plain.step(batches), pairs)


def many_steps(rank: Rank, recipe: Recipe, folder: Path, count: int) -> float:
    """Seconds that some steps take on one thread a process, after one that is not counted."""
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
        out = folder / "ours"

        def peer() -> None:
            _write(_state(session), out / "peer.pt")

        return measure(lambda: session.engine.save(out), peer, pairs, before=partial(_empty, out))


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


def _state(session: Session) -> list[Tensor]:
    """Weights and what the optimizer holds, each once: of float32 weights it holds views."""
    weights = [p.detach() for chunk in session.engine.chunks for p in chunk.parameters()]
    held = {weight.data_ptr() for weight in weights}
    return weights + [x.detach() for x in optimizer_tensors(session.engine.optimizer) if x.data_ptr() not in held]


def _write(state: list[Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
