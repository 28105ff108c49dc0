"""Results as a table and as a file."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median

from rich.table import Table

from .cases import CASES
from .harness import Result

COLUMNS = ("case", "peer", "ours", "peer's", "ratio", "quartiles", "pairs")


def row(name: str, result: Result) -> tuple[str, ...]:
    """A case in ``COLUMNS``."""
    first, last = result.spread
    return (
        name,
        CASES[name].peer,
        _time(median(result.ours)),
        _time(median(result.peer)),
        f"{result.ratio:.2f}",
        f"{first:.2f}-{last:.2f}",
        str(len(result.ours)),
    )


def table(results: Mapping[str, Result]) -> Table:
    """For a terminal."""
    found = Table(title="Ours over the peer's, median of pairs: below 1, ours is faster", title_justify="left")
    for number, column in enumerate(COLUMNS):
        found.add_column(column, no_wrap=number != 1, justify="left" if number < 2 else "right")
    for name, result in results.items():
        found.add_row(*row(name, result))
    return found


def as_json(results: Mapping[str, Result]) -> str:
    """Every second of every pair, by case."""
    return json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
