"""Rows of text files: read completely, each with the place that it came from, or refused with all that is wrong."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_kernels.errors import UserError

_SHOWN = 20  # bad rows that a message lists
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_SUFFIXES = (".jsonl", ".json", ".txt")


class DataError(UserError):
    """Data that cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, and where it stands."""

    content: Any
    origin: str  # file:line


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was not used, and why."""

    origin: str
    reason: str


def expand(patterns: Sequence[str]) -> list[Path]:
    """Files of paths, folders and globs, sorted by path, so that the order of a listing never matters."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            found.add(path)
        elif path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file() and _kind(file)]
            if not inside:
                raise DataError(
                    f"{path}: no data files in this folder; they end in {', '.join(_SUFFIXES)}, plain or .gz"
                )
            found.update(inside)
        else:
            root = Path(path.anchor or ".")
            matches = [
                file for file in root.glob(str(path.relative_to(root) if path.anchor else path)) if file.is_file()
            ]
            if not matches:
                raise DataError(f"{pattern}: no such file, folder or match")
            found.update(matches)
    for file in found:
        if not _kind(file):
            raise DataError(
                f"{file}: this kind of file is not read; it must end in {', '.join(_SUFFIXES)}, plain or .gz"
            )
    return sorted(found)


def read_rows(files: Sequence[Path]) -> Iterator[Row | BadRow]:
    """Rows of all files, in order: parsed JSON of .jsonl and .json, the whole text of a .txt file."""
    for file in files:
        text = _text(file)
        kind = _kind(file)
        if kind == ".txt":
            if text.strip():
                yield Row(content=text, origin=f"{file}:1")
        elif text.lstrip().startswith("["):
            yield from _array(file, text)
        elif kind == ".json":
            yield _parsed(file, 1, text)
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield _parsed(file, number, line)


def stop_on(bad: Sequence[BadRow]) -> None:
    """DataError that lists the bad rows, if there are any."""
    if bad:
        lines = [f"{row.origin}: {row.reason}" for row in bad[:_SHOWN]]
        more = [f"... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        count = f"{len(bad)} row" + ("s" if len(bad) > 1 else "")
        hint = "put them right, or set data.bad_rows=skip"
        raise DataError("\n".join([f"data: {count} cannot be used; {hint}:", *lines, *more]))


def _kind(file: Path) -> str | None:
    name = file.name.removesuffix(".gz")
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _text(file: Path) -> str:
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError) as error:
            raise DataError(f"{file}: the gzip data is cut short or damaged") from error
    if name := _BOMS.get(content[:2]):
        raise DataError(f"{file}: encoded as {name}; convert it to UTF-8")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}:{line}: not UTF-8; convert the file") from error


def _parsed(file: Path, number: int, text: str) -> Row | BadRow:
    origin = f"{file}:{number}"
    try:
        return Row(content=json.loads(text, parse_constant=_constant), origin=origin)
    except ValueError as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return BadRow(origin=origin, reason=f"not JSON: {message}")


def _array(file: Path, text: str) -> Iterator[Row | BadRow]:
    decoder = json.JSONDecoder(parse_constant=_constant)
    at = text.index("[") + 1
    while True:
        at = _skip(text, at)
        line = text.count("\n", 0, at) + 1
        if text[at : at + 1] == "]":
            return
        try:
            content, at = decoder.raw_decode(text, at)
        except ValueError as error:
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            yield BadRow(origin=f"{file}:{line}", reason=f"not JSON: {message}; the rest of this array was not read")
            return
        yield Row(content=content, origin=f"{file}:{line}")


def _skip(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] == ","):
        at += 1
    return at


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")
