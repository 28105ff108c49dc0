"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass

from .recipe import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up from zero, then constant or a half cosine down to ``min_lr`` (Loshchilov and Hutter, 2017)."""

    kind: str
    peak: float
    warmup: int
    minimum: float
    steps: int

    def lr(self, step: int) -> float:
        """Of optimizer step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.minimum + (self.peak - self.minimum) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def make_schedule(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> Schedule:
    """The schedule of a run of ``steps`` optimizer steps."""
    return Schedule(
        kind=schedule.kind,
        peak=optimizer.lr,
        warmup=schedule.warmup_steps,
        minimum=schedule.min_lr,
        steps=steps,
    )
