"""What happens between steps: validation, sample generations, checkpoints."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_kernels.errors import RunError

from .data.batch import Batch
from .engine import Engine
from .loop import Done
from .metrics import Metrics
from .rundir import Checkpoints, save_failed

Describe = Callable[[Path], None]  # puts what describes a run into a checkpoint folder


class Validation:
    """The mean loss over the validation rows, every ``every`` steps and at the end."""

    def __init__(
        self, engine: Engine, batches: Callable[[], Sequence[list[Batch]]], *, every: int | None, report: Metrics | None
    ) -> None:
        self.engine = engine
        self.every = every
        self.last: tuple[int, float] | None = None  # step, loss
        self._batches = batches
        self._report = report

    def after_step(self, done: Done) -> None:
        """Validate when it is time."""
        if self.every is not None and done.step % self.every == 0:
            self.run(done.step)

    def at_end(self, done: Done | None, stopped: bool) -> None:
        """Validate the final weights."""
        if done is not None and not stopped and (self.last is None or self.last[0] != done.step):
            self.run(done.step)

    def run(self, step: int) -> float:
        """Validate now."""
        loss = self.engine.evaluate(self._batches())
        self.last = (step, loss)
        if self._report is not None:
            self._report.validation(step, loss)
        return loss


class Samples:
    """Answers to given prompts, every ``every`` steps."""

    def __init__(
        self, generate: Callable[[str], str], prompts: Sequence[str], *, every: int, report: Metrics | None
    ) -> None:
        self._generate = generate
        self._prompts = prompts
        self._every = every
        self._report = report

    def after_step(self, done: Done) -> None:
        """Generate when it is time. Every rank computes, the main rank reports."""
        if done.step % self._every == 0:
            for prompt in self._prompts:
                text = self._generate(prompt)
                if self._report is not None:
                    self._report.say(f"step {done.step}: {prompt!r} -> {text!r}")

    def at_end(self, done: Done | None, stopped: bool) -> None:
        """Nothing."""


class Saving:
    """A checkpoint every ``every`` steps, at the end, and when the run is asked to stop."""

    def __init__(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        describe: Describe,
        *,
        every: int | None,
        validation: Validation | None = None,
    ) -> None:
        self.engine = engine
        self.checkpoints = checkpoints
        self._describe = describe
        self._every = every
        self._validation = validation
        self._saved: int | None = None

    def after_step(self, done: Done) -> None:
        """Save when it is time."""
        if self._every is not None and done.step % self._every == 0:
            self.save(done.step)

    def at_end(self, done: Done | None, stopped: bool) -> None:
        """Save what has not been saved."""
        if done is not None and self._saved != done.step:
            self.save(done.step)

    def save(self, step: int) -> None:
        """Write the checkpoint of ``step``. RunError, with older checkpoints as they were, when that fails."""
        engine = self.engine
        if not engine.is_finite():
            raise RunError(f"checkpoint: some weights are not finite after step {step}; nothing was written")
        partial = Path(self._together(lambda: str(self.checkpoints.start(step))))
        try:
            engine.save(partial)
        except (OSError, RuntimeError) as error:
            if engine.is_main:
                self.checkpoints.discard(partial)
            raise save_failed(self.checkpoints.folder, error, self.checkpoints.latest()) from error
        self._together(lambda: self._finish(partial, step))
        self._saved = step

    def _finish(self, partial: Path, step: int) -> None:
        facts: dict[str, Any] = {}
        if self._validation is not None and self._validation.last is not None and self._validation.last[0] == step:
            facts["validation_loss"] = self._validation.last[1]
        try:
            self._describe(partial)
            (partial / "progress.json").write_text(json.dumps({"step": step, **facts}) + "\n")
            self.checkpoints.finish(partial, step, **facts)
        except OSError:
            self.checkpoints.discard(partial)
            raise

    def _together(self, action: Callable[[], Any]) -> Any:
        """Do ``action`` on the main rank; every rank gets its result, or fails with it."""
        result: tuple[Any, str | None] = (None, None)
        if self.engine.is_main:
            try:
                result = (action(), None)
            except OSError as error:
                result = (None, str(error))
        value, failure = self.engine.share(result)
        if failure is not None:
            raise save_failed(self.checkpoints.folder, OSError(failure), self.checkpoints.latest())
        return value
