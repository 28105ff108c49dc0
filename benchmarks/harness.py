"""Pairs of measurements. A busy machine slows both sides of a pair, so a ratio says more than a time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], object]
Clock = Callable[[], float]
Timed = Callable[[], float]  # acts once and returns the seconds that count


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of each pair, ours and the peer's."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, of each pair: below 1, ours is faster."""
        return [a / b for a, b in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        if len(self.ratios) < 2:
            return (self.ratio, self.ratio)
        first, _, last = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return first, last


def measure(
    ours: Action, peer: Action, pairs: int, *, before: Action | None = None, clock: Clock = time.perf_counter
) -> Result:
    """Time both in turn. ``before`` clears the ground for each, and is not counted."""
    return in_turn(timed(ours, before=before, clock=clock), timed(peer, before=before, clock=clock), pairs)


def timed(action: Action, *, before: Action | None = None, clock: Clock = time.perf_counter) -> Timed:
    """``action`` with a clock around it."""

    def once() -> float:
        if before is not None:
            before()
        started = clock()
        action()
        return clock() - started

    return once


def in_turn(ours: Timed, peer: Timed, pairs: int) -> Result:
    """Run both once unmeasured, then in pairs of which every second begins with the peer."""
    ours()
    peer()
    sides = (ours, peer)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[side].append(sides[side]())
    return Result(ours=tuple(seconds[0]), peer=tuple(seconds[1]))
