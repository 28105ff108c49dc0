"""Command line of the benchmarks."""

import tempfile
from pathlib import Path

import click
from mindspeed_runtime.cli import NewFile
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from .cases import CASES
from .harness import Result
from .report import as_json, table

_WIDTH = 120  # of a table that goes into a file


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[CASE]...")
@click.option("--pairs", type=click.IntRange(1), help="Pairs of each case; each has a default of its own.")
@click.option("--json", "json_path", type=NewFile(), help="Write every second to a file.")
def main(names: tuple[str, ...], pairs: int | None, json_path: Path | None) -> None:
    """Measure CASEs, all if none is named, each in pairs with its peer."""
    if unknown := sorted(set(names) - set(CASES)):
        raise click.UsageError(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    disable_progress_bar()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    results: dict[str, Result] = {}
    for name in names or tuple(CASES):
        case = CASES[name]
        with console.status(f"{name}: {case.ours} against {case.peer}"), tempfile.TemporaryDirectory() as folder:
            results[name] = case.run(Path(folder), pairs or case.pairs)
    console.print(table(results))
    if json_path is not None:
        json_path.write_text(as_json(results))


if __name__ == "__main__":
    main()
