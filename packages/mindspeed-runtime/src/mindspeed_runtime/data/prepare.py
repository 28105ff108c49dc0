"""From files to token stores, once: the same files, tokenizer and options find what was made before."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from ..rundir import new_folder
from .sources import BadRow, Blank, DataError, OnRead, Row, expand, read_rows
from .store import Example, Store, write_store

Encode = Callable[[Row], list[Example]]  # raises RowError or EmptyRowError for a row that cannot be used
_FORMAT = 2  # of what is stored; a change makes old caches unused
_SHOWN = 100  # bad rows that a message lists
_COUNTS = "counts.json"  # written last
_TOKENS = "tokens"


class RowError(Exception):
    """One row cannot be used; the text says why."""


class EmptyRowError(Exception):
    """There is nothing in a row; it is passed over and counted under the text."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How rows become tokens below ``vocabulary``, and all that this depends on in a string."""

    encode: Encode
    key: str
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A data set that is to be tokenised.

    ``sequence``: documents of which no trained token is a target within that many are left out and counted, and what
    reaches further is counted; None keeps all, for text that flows on. ``skip_bad``: unusable rows are left out and
    counted; otherwise they are a DataError that lists them.
    """

    name: str
    patterns: tuple[str, ...]
    cache: Path
    sequence: int | None
    skip_bad: bool = False


@dataclass
class Counts:
    """What came of the rows of a data set."""

    rows: int = 0  # that hold something
    documents: int = 0
    tokens: int = 0
    trained: int = 0  # tokens that carry loss
    cut_documents: int = 0  # longer than a row
    cut_trained: int = 0  # tokens that would carry loss and lie beyond the row
    blank: dict[str, int] = field(default_factory=dict)  # reason: places without a row
    bad: list[BadRow] = field(default_factory=list)  # unusable; with skip_bad
    unlabelled: list[BadRow] = field(default_factory=list)  # nothing to learn from inside the row

    def add(self, example: Example, sequence: int | None) -> None:
        """Count a document that is kept."""
        self.documents += 1
        self.tokens += len(example.tokens)
        self.trained += sum(example.trained)
        if sequence is not None and len(example.tokens) > sequence + 1:
            self.cut_documents += 1
            self.cut_trained += sum(example.trained[sequence + 1 :])


def find(wanted: Wanted, encoder: Encoder) -> Path:
    """The folder of the data set's tokens, named after the content of all that they depend on; perhaps not there yet."""
    files = expand(wanted.patterns)
    digest = xxhash.xxh3_128()
    digest.update(json.dumps([_FORMAT, encoder.key, encoder.vocabulary, wanted.sequence, wanted.skip_bad]).encode())
    for file in files:
        digest.update(json.dumps([str(file.resolve()), file.stat().st_size]).encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return wanted.cache / f"{wanted.name}-{digest.hexdigest()[:20]}"


def lock(folder: Path) -> AbstractContextManager[Any]:
    """Held by the one process that makes ``folder``; waits for another, however long that takes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def is_made(folder: Path) -> bool:
    """Whether the tokens are there, all of them."""
    return (folder / _COUNTS).is_file()


def make(wanted: Wanted, encoder: Encoder, folder: Path, on_read: OnRead | None = None) -> None:
    """Tokenise all rows into ``folder``. To be called under its lock.

    DataError with every unusable row, unless ``wanted.skip_bad``; and when nothing is left.
    """
    counts = Counts()
    rows = read_rows(expand(wanted.patterns), on_read)
    with new_folder(folder, force=True) as partial:
        write_store(partial / _TOKENS, _examples(rows, encoder.encode, wanted, counts), encoder.vocabulary)
        if counts.bad and not wanted.skip_bad:
            raise _refusal(wanted, counts.bad)
        if not counts.documents:
            raise _nothing(wanted, counts)
        (partial / _COUNTS).write_text(json.dumps(asdict(counts), indent=1) + "\n")


def open_store(folder: Path) -> tuple[Store, Counts]:
    """A tokenised data set, and the counts of how it came to be."""
    facts = json.loads((folder / _COUNTS).read_text())
    for kind in ("bad", "unlabelled"):
        facts[kind] = [BadRow(**row) for row in facts[kind]]
    return Store(folder / _TOKENS), Counts(**facts)


def _examples(
    rows: Iterator[Row | BadRow | Blank], encode: Encode, wanted: Wanted, counts: Counts
) -> Iterator[Example]:
    for row in rows:
        if isinstance(row, Blank):
            counts.blank[row.reason] = counts.blank.get(row.reason, 0) + 1
            continue
        if isinstance(row, BadRow):
            counts.bad.append(row)
            continue
        try:
            examples = encode(row)
        except EmptyRowError as error:
            counts.blank[str(error)] = counts.blank.get(str(error), 0) + 1
            continue
        except RowError as error:
            counts.bad.append(BadRow(origin=row.origin, reason=str(error)))
            continue
        counts.rows += 1
        for example in examples:
            if wanted.sequence is not None and not any(example.trained[1 : wanted.sequence + 1]):
                reason = f"no trained token within data.sequence={wanted.sequence}"
                counts.unlabelled.append(BadRow(origin=row.origin, reason=reason))
                continue
            counts.add(example, wanted.sequence)
            yield example


def listed(rows: Sequence[BadRow], limit: int) -> list[str]:
    """A line a row, and how many more there are."""
    lines = [f"{row.origin}: {row.reason}" for row in rows[:limit]]
    return [*lines, f"... and {len(rows) - limit} more"] if len(rows) > limit else lines


def _refusal(wanted: Wanted, bad: Sequence[BadRow]) -> DataError:
    count = f"{len(bad)} row" + ("s" if len(bad) > 1 else "")
    where = ""
    if len(bad) > _SHOWN:
        whole = wanted.cache / f"{wanted.name}-bad-rows.txt"
        whole.write_text("".join(f"{line}\n" for line in listed(bad, len(bad))))
        where = f" (all are in {whole})"
    head = f"data.{wanted.name}: {count} cannot be used{where}; put them right, or set data.bad_rows=skip:"
    return DataError("\n".join([head, *listed(bad, _SHOWN)]))


def _nothing(wanted: Wanted, counts: Counts) -> DataError:
    why = [f"{number} x {reason}" for reason, number in sorted(counts.blank.items())]
    why += listed([*counts.unlabelled, *counts.bad], _SHOWN)
    head = f"data.{wanted.name}: nothing is left to train on of {', '.join(wanted.patterns)}"
    return DataError("\n".join([f"{head}:" if why else head, *why]))
