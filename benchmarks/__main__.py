"""Command line of the benchmarks."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .cases import CASES
from .harness import Result


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[CASE]...")
@click.option("--pairs", type=click.IntRange(1), help="Pairs of each case; each has a default of its own.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every second to a file.")
def main(names: tuple[str, ...], pairs: int | None, json_path: Path | None) -> None:
    """Measure CASEs, all if none is named, each in pairs with its peer."""
    if unknown := sorted(set(names) - set(CASES)):
        raise click.UsageError(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    console = Console()
    results: dict[str, Result] = {}
    for name in names or tuple(CASES):
        case = CASES[name]
        with console.status(f"{name}: {case.ours} against {case.peer}"), tempfile.TemporaryDirectory() as folder:
            results[name] = case.run(Path(folder), pairs or case.pairs)
    console.print(_table(results))
    if json_path is not None:
        json_path.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


def _table(results: dict[str, Result]) -> Table:
    table = Table(title="Ours over the peer's, median of pairs: below 1, ours is faster", title_justify="left")
    for column in ("case", "peer"):
        table.add_column(column, no_wrap=True)
    for column in ("ratio", "quartiles", "pairs"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        first, last = result.spread
        row = (f"{result.ratio:.2f}", f"{first:.2f} to {last:.2f}", str(len(result.ours)))
        table.add_row(name, CASES[name].peer, *row)
    return table


if __name__ == "__main__":
    main()
