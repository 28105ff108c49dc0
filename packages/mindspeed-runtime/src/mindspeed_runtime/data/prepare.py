"""From files to token stores, once: the same files, tokenizer and options find what was made before."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..rundir import new_folder
from .sources import BadRow, DataError, Row, expand, read_rows, stop_on
from .store import Example, Store, write_store

Encode = Callable[[Row], list[Example]]  # raises RowError for a row that cannot be used
_VERSION = 1  # of what is stored; a change makes old caches unused


class RowError(Exception):
    """One row cannot be used; the text says why."""


@dataclass
class Counts:
    """What came of the rows of a data set."""

    rows: int = 0
    documents: int = 0
    skipped: list[BadRow] = field(default_factory=list)  # unusable, skipped on request
    unlabelled: list[BadRow] = field(default_factory=list)  # nothing to learn from inside the window


def prepare(
    patterns: Sequence[str],
    encode: Encode,
    *,
    name: str,
    cache: Path,
    key: str,
    sequence: int | None,
    vocabulary: int,
    skip_bad: bool = False,
) -> Path:
    """Tokenise all rows of ``patterns`` into a store below ``cache``; returns its prefix.

    ``key`` says all that ``encode`` depends on. ``sequence``: documents with no trained token inside that many are
    left out and counted; None keeps all. DataError with every bad row, unless ``skip_bad``.
    """
    files = expand(patterns)
    folder = cache / f"{name}-{_digest(files, key, sequence, skip_bad)}"
    if not (folder / "counts.json").exists():
        with new_folder(folder, force=True) as partial:
            counts = Counts()
            num = write_store(partial / "tokens", _examples(files, encode, sequence, counts), vocabulary)
            if not skip_bad:
                stop_on(counts.skipped)
            _check(num, counts, patterns)
            facts = {
                "files": [str(file) for file in files],
                "rows": counts.rows,
                "documents": num,
                "skipped": [vars(row) for row in counts.skipped],
                "unlabelled": [vars(row) for row in counts.unlabelled],
            }
            (partial / "counts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return folder / "tokens"


def open_store(prefix: Path) -> tuple[Store, dict]:
    """A prepared store and the counts of how it came to be."""
    return Store(prefix), json.loads((prefix.parent / "counts.json").read_text())


def _examples(files: Sequence[Path], encode: Encode, sequence: int | None, counts: Counts) -> Iterator[Example]:
    for row in read_rows(files):
        if isinstance(row, BadRow):
            counts.skipped.append(row)
            continue
        counts.rows += 1
        try:
            examples = encode(row)
        except RowError as error:
            counts.skipped.append(BadRow(origin=row.origin, reason=str(error)))
            continue
        for example in examples:
            if sequence is not None and not any(example.trained[1:sequence]):
                reason = f"no trained token among the first {sequence} (data.sequence)"
                counts.unlabelled.append(BadRow(origin=row.origin, reason=reason))
                continue
            yield example


def _check(num: int, counts: Counts, patterns: Sequence[str]) -> None:
    if num:
        return
    why = [f"{row.origin}: {row.reason}" for row in (*counts.unlabelled, *counts.skipped)[:5]]
    raise DataError("\n".join([f"data: nothing to train on in {', '.join(patterns)}", *why]))


def _digest(files: Sequence[Path], key: str, sequence: int | None, skip_bad: bool) -> str:
    digest = xxhash.xxh3_128()
    digest.update(f"{_VERSION} {key} {sequence} {skip_bad}".encode())
    for file in files:
        digest.update(str(file.resolve()).encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:20]
