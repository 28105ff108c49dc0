"""The training loop: the one answer to where training happens."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from mindspeed_kernels.errors import RunError

from .data.batch import Batch
from .engine import Engine, StepResult
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that was taken, as hooks see it."""

    step: int  # how many steps have been taken by now
    steps: int  # of the whole run
    lr: float
    result: StepResult
    seconds: float
    bad_steps: int  # skipped so far in this process


class Hook(Protocol):
    """Something that happens between steps. Every rank calls every hook."""

    def after_step(self, done: Done) -> None:
        """After each optimizer step."""
        ...

    def at_end(self, done: Done | None, stopped: bool) -> None:
        """When the loop is left: all steps done, or asked to stop. ``done`` is None when no step was taken."""
        ...


class StopFlag:
    """Set by SIGTERM: the loop finishes its step, lets the hooks save, and leaves."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Listen inside the block."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.is_set = True

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def fit(
    engine: Engine,
    batches: Callable[[int], list[Batch]],
    *,
    start: int,
    steps: int,
    schedule: Schedule,
    hooks: Sequence[Hook],
    stop: StopFlag,
    max_bad_steps: int,
) -> bool:
    """Take the optimizer steps ``start`` to ``steps``; whether all were taken. ``batches(n)`` gives those of step n.

    RunError when ``max_bad_steps`` steps in a row had gradients that are not finite.
    """
    done: Done | None = None
    bad, in_a_row = 0, 0
    for step in range(start, steps):
        began = time.perf_counter()
        lr = schedule.lr(step)
        result = engine.train_step(step, batches(step), lr)
        in_a_row = in_a_row + 1 if result.skipped else 0
        bad += result.skipped
        seconds = time.perf_counter() - began
        done = Done(step=step + 1, steps=steps, lr=lr, result=result, seconds=seconds, bad_steps=bad)
        for hook in hooks:
            hook.after_step(done)
        if in_a_row >= max_bad_steps:
            raise RunError(
                f"training: {in_a_row} steps in a row with gradients that are not finite, the last is step {step + 1}; "
                "nothing was changed by them; lower optimizer.lr or look at the data"
            )
        if engine.any(stop.is_set):
            _leave(hooks, done, stopped=True)
            return step + 1 == steps
    _leave(hooks, done, stopped=False)
    return True


def _leave(hooks: Sequence[Hook], done: Done | None, *, stopped: bool) -> None:
    for hook in hooks:
        hook.at_end(done, stopped)
