"""Pairs of measurements. A busy machine slows both sides of a pair, so a ratio says more than a time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], object]


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


def measure(ours: Action, peer: Action, pairs: int, *, clock: Callable[[], float] = time.perf_counter) -> Result:
    """Run both once unmeasured, then in pairs of which every second begins with the peer."""
    ours()
    peer()
    seconds: dict[Action, list[float]] = {ours: [], peer: []}
    for number in range(pairs):
        for action in (ours, peer) if number % 2 == 0 else (peer, ours):
            started = clock()
            action()
            seconds[action].append(clock() - started)
    return Result(ours=tuple(seconds[ours]), peer=tuple(seconds[peer]))
