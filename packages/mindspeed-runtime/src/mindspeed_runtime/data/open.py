"""The data of a recipe: loaders for training and validation."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import ConfigError, length_multiple
from ..recipe import Recipe
from .loader import Cut, Loader
from .prepare import Counts, Encoder, Wanted, find, is_made, listed, lock, make, open_store
from .rows import Packed, Rows, Single, Windows
from .sources import DataError, OnRead, expand
from .store import Store

_NOTED = 20  # rows of a kind that are named; the others stand in the counts file


@dataclass(frozen=True, kw_only=True)
class Data:
    """Loaders of a run, and what was found while preparing them."""

    train: Loader
    validation: Loader | None
    notes: tuple[str, ...]


def open_data(
    recipe: Recipe,
    encoder: Callable[[], Encoder],
    cut: Cut,
    *,
    cache: Path,
    share: Callable[[Any], Any],
    is_main: bool,
    console: Console | None = None,
) -> Data:
    """Tokenise and open the data of ``recipe``. Every rank calls it; DataError for data that cannot be used.

    The main rank tokenises into ``cache`` and ``share`` tells the others, from the main rank's argument, where; they
    wait for it at a file lock, which no timeout of a collective ends. Where a rank does not see the main rank's
    folder, on another machine, one tokenises there. ``encoder`` is called only where rows are tokenised.
    ``console``: where the main rank shows its progress.
    """
    wanted = _wanted(recipe, cache)
    with contextlib.ExitStack() as stack:
        if is_main:
            made = encoder()
            folders = {name: find(item, made) for name, item in wanted.items()}
            for folder in folders.values():
                stack.enter_context(lock(folder))
            share({name: folder.name for name, folder in folders.items()})
            for name, folder in folders.items():
                if not is_made(folder):
                    with _progress(wanted[name], console) as on_read:
                        make(wanted[name], made, folder, on_read)
        else:
            folders = {name: wanted[name].cache / folder for name, folder in share(None).items()}
            for name, folder in folders.items():
                with lock(folder):
                    if not is_made(folder):
                        _make_here(wanted[name], encoder(), folder)
    notes: list[str] = []
    loaders = {
        name: _loader(recipe, name, folder, cut, notes, shuffle=recipe.data.shuffle and name == "train")
        for name, folder in folders.items()
    }
    return Data(train=loaders["train"], validation=loaders.get("validation"), notes=tuple(notes))


def check_data(recipe: Recipe) -> None:
    """ConfigError or DataError unless the files that ``recipe`` names are there and of a kind that is read."""
    for item in _wanted(recipe, Path()).values():
        expand(item.patterns)


def _wanted(recipe: Recipe, cache: Path) -> dict[str, Wanted]:
    data = recipe.data
    if not data.train:
        raise ConfigError("data.train: names no files; give paths, folders or globs")
    return {
        name: Wanted(
            name=name,
            patterns=patterns,
            cache=cache,
            sequence=None if data.format == "text" else data.sequence,
            skip_bad=data.bad_rows == "skip",
        )
        for name, patterns in (("train", data.train), ("validation", data.validation))
        if patterns
    }


def _make_here(wanted: Wanted, encoder: Encoder, folder: Path) -> None:
    if find(wanted, encoder) != folder:
        raise DataError(
            f"data.{wanted.name}: the files, or the tokenizer, are not those of the main rank's machine; "
            "every machine needs the same, at the same place"
        )
    make(wanted, encoder, folder)


@contextlib.contextmanager
def _progress(wanted: Wanted, console: Console | None) -> Iterator[OnRead | None]:
    if console is None or not console.is_terminal:
        yield None
        return
    total = sum(file.stat().st_size for file in expand(wanted.patterns))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"tokenising data.{wanted.name}", total=total)
        yield lambda size: progress.advance(task, size)


def _loader(recipe: Recipe, name: str, folder: Path, cut: Cut, notes: list[str], *, shuffle: bool) -> Loader:
    store, counts = open_store(folder)
    notes += _notes(name, counts, folder)
    rows = _rows(recipe, store, shuffle)
    if rows.per_epoch(0) == 0:
        raise ConfigError(f"data.{name}: {store.num_tokens} tokens in all leave nothing to predict; give more text")
    multiple = length_multiple(recipe)
    return Loader(rows, cut, padding=recipe.data.padding, multiple=multiple, apart=recipe.data.packing)


def _notes(name: str, counts: Counts, folder: Path) -> Iterator[str]:
    yield (
        f"data.{name}: {counts.rows} rows, {counts.documents} documents, {counts.tokens} tokens, "
        f"{counts.trained} trained"
    )
    for reason, number in sorted(counts.blank.items()):
        yield f"data.{name}: passed over {number} x {reason}"
    if counts.cut_documents:
        yield (
            f"data.{name}: {counts.cut_documents} of the documents are longer than data.sequence and cut there; "
            f"{counts.cut_trained} of their trained tokens are lost"
        )
    for kind, rows in (("skipped", counts.bad), ("left out", counts.unlabelled)):
        if rows:
            yield f"data.{name}: {kind} {len(rows)} (all are named in {folder / 'counts.json'})"
            yield from (f"data.{name}: {kind} {line}" for line in listed(rows, _NOTED))


def _rows(recipe: Recipe, store: Store, shuffle: bool) -> Rows:
    data, seed = recipe.data, recipe.training.seed
    if data.format == "text":
        return Windows(store, data.sequence, seed, shuffle, apart=data.packing)
    kind = Packed if data.packing else Single
    return kind(store, data.sequence, seed, shuffle)
