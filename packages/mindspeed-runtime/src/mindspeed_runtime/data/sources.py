"""Rows of text files: read completely, each with the place that it came from, or refused with all that is wrong."""

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_kernels.errors import UserError

SUFFIXES = (".jsonl", ".json", ".txt")  # each plain or followed by .gz
# Data of kinds that are not read: found in a folder they are named, where a README beside the data is passed over.
_OTHER_DATA = (".parquet", ".arrow", ".feather", ".csv", ".tsv", ".xml", ".zst", ".bz2", ".xz", ".zip", ".tar", ".lz4")
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

OnRead = Callable[[int], None]  # called with the number of bytes of files that were read since the last call


class DataError(UserError):
    """Data that cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, and where it stands."""

    content: Any
    origin: str  # file:line


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used, and why."""

    origin: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A place where a row could be and nothing is: no fault, but counted."""

    origin: str
    reason: str


def expand(patterns: Sequence[str]) -> list[Path]:
    """Files of paths, folders and globs, each once, sorted by path: the order of a listing never matters.

    Hidden files of folders and globs are passed over.
    """
    found: dict[str, Path] = {}
    for pattern in patterns:
        for file in _matches(pattern):
            if _kind(file) is None:
                raise DataError(f"{file}: this kind of file is not read; {_what_is_read()}")
            path = os.path.abspath(file)
            found[path] = min(file, found.get(path, file), key=lambda name: (len(str(name)), str(name)))
    return [found[path] for path in sorted(found)]


def read_rows(files: Sequence[Path], on_read: OnRead | None = None) -> Iterator[Row | BadRow | Blank]:
    """Rows of all files, in order: the values of .jsonl and .json, the whole text of a .txt file.

    DataError for a file that cannot be read to its end.
    """
    for file in files:
        lines = _lines(file, on_read or _ignore)
        if _kind(file) == ".txt":
            yield _whole_text(file, lines)
        else:
            yield from _json_rows(file, lines)


def _matches(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    if path.is_file():
        yield path
        return
    if path.is_dir():
        root, inside = path, [file for file in path.rglob("*") if file.is_file()]
    else:
        root = Path(path.anchor)
        inside = [file for file in root.glob(str(path.relative_to(root))) if file.is_file()]
    wild = len(root.parts) if path.is_dir() else next((i for i, part in enumerate(path.parts) if "*" in part), 0)
    seen = [file for file in inside if not any(part.startswith(".") for part in file.parts[wild:])]
    if path.is_dir():
        other = sorted(file for file in seen if file.suffix in _OTHER_DATA and _kind(file) is None)
        if other:
            names = ", ".join(str(file.relative_to(path)) for file in other[:5]) + (", ..." if len(other) > 5 else "")
            raise DataError(f"{path}: {names}: this kind of file is not read; {_what_is_read()}")
        seen = [file for file in seen if _kind(file) is not None]
        if not seen:
            raise DataError(f"{path}: no data files in this folder; {_what_is_read()}")
    elif not seen:
        raise DataError(f"{pattern}: no such file, folder or match")
    yield from seen


def _what_is_read() -> str:
    return f"files end in {', '.join(SUFFIXES)}, plain or with .gz"


def _kind(file: Path) -> str | None:
    name = file.name.removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _ignore(size: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of a file without its end; ``text`` is None where the bytes are not UTF-8."""

    number: int
    text: str | None

    @property
    def is_blank(self) -> bool:
        return self.text is not None and not self.text.strip()


def _lines(file: Path, on_read: OnRead) -> Iterator[_Line]:
    try:
        with file.open("rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if start[:2] == _GZIP else raw
            reported = 0
            for number, line in enumerate(stream, 1):
                yield _Line(number=number, text=_decoded(file, number, line))
                at = raw.tell()
                on_read(at - reported)
                reported = at
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: the gzip data is cut short or damaged; fetch the file again") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _decoded(file: Path, number: int, line: bytes) -> str | None:
    if number == 1:
        for mark, name in _ENCODINGS.items():
            if line.startswith(mark):
                raise DataError(f"{file}: encoded as {name}; convert it to UTF-8")
        line = line.removeprefix(_BOM)
    try:
        return line.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        return None


def _whole_text(file: Path, lines: Iterator[_Line]) -> Row | BadRow | Blank:
    parts = []
    for line in lines:
        if line.text is None:
            return _not_utf8(file, line)
        parts.append(line.text)
    text = "\n".join(parts)
    if not text.strip():
        return Blank(origin=f"{file}:1", reason="empty file")
    return Row(content=text, origin=f"{file}:1")


def _json_rows(file: Path, lines: Iterator[_Line]) -> Iterator[Row | BadRow | Blank]:
    """One value a line, or one array of them, or values that are spread over lines: told by how the file begins."""
    decoder = _Decoder()
    first = None
    for line in lines:
        if not line.is_blank:
            first = line
            break
        yield Blank(origin=f"{file}:{line.number}", reason="blank line")
    if first is None:
        yield Blank(origin=f"{file}:1", reason="empty file")
        return
    second = next(lines, None)
    rest = itertools.chain([first], [] if second is None else [second], lines)
    text = (first.text or "").strip()
    is_whole = decoder.is_value(text)
    if text.startswith("[") and (second is None or not is_whole):
        yield from _spread_rows(file, rest, decoder, in_array=True)
    elif text == "{" or (text.startswith("{") and _kind(file) == ".json" and not is_whole):
        yield from _spread_rows(file, rest, decoder, in_array=False)
    else:
        yield from _line_rows(file, rest, decoder)


def _line_rows(file: Path, lines: Iterator[_Line], decoder: "_Decoder") -> Iterator[Row | BadRow | Blank]:
    for line in lines:
        if line.text is None:
            yield _not_utf8(file, line)
            continue
        origin = f"{file}:{line.number}"
        if line.is_blank:
            yield Blank(origin=origin, reason="blank line")
            continue
        try:
            content, end = decoder.value(line.text, _skip(line.text, 0))
            if _skip(line.text, end) < len(line.text):
                raise json.JSONDecodeError("text after the end of the value", line.text, end)
        except json.JSONDecodeError as error:
            yield BadRow(origin=origin, reason=f"not JSON: {error.msg}")
        else:
            yield _checked(content, origin, decoder)


def _spread_rows(file: Path, lines: Iterator[_Line], decoder: "_Decoder", *, in_array: bool) -> Iterator[Row | BadRow]:
    """Values that do not keep to lines. What follows a fault cannot be told apart, so a fault is the whole file's."""
    number, text = _joined(file, lines)
    at = counted = 0
    expected = "[" if in_array else ""

    def fault(what: str) -> DataError:
        return DataError(f"{file}:{number}: not JSON: {what}; nothing after this place can be read")

    while True:
        at = _skip(text, at)
        number, counted = number + text.count("\n", counted, at), at
        if in_array and expected == "," and text.startswith("]", at):
            if _skip(text, at + 1) < len(text):
                raise fault("text after the end of the array")
            return
        if not in_array and at == len(text):
            return
        if not text.startswith(expected, at):
            raise fault(f"{expected!r} or ']' expected" if at < len(text) else "the array has no end")
        at = _skip(text, at + len(expected))
        if expected == "[" and text.startswith("]", at):
            expected = ","
            continue
        number, counted = number + text.count("\n", counted, at), at
        try:
            content, at = decoder.value(text, at)
        except json.JSONDecodeError as error:
            number += text.count("\n", counted, error.pos)
            raise fault(error.msg) from error
        yield _checked(content, f"{file}:{number}", decoder)
        expected = "," if in_array else ""


def _joined(file: Path, lines: Iterator[_Line]) -> tuple[int, str]:
    """The number of the first line, and all lines together."""
    found = []
    for line in lines:
        if line.text is None:
            raise DataError(f"{file}:{line.number}: not UTF-8; convert the file")
        found.append(line)
    return found[0].number, "\n".join(line.text or "" for line in found)


class _Decoder:
    """JSON, without the constants that Python's reader adds to it."""

    def __init__(self) -> None:
        self.constants: list[str] = []  # NaN and its like in the last value
        self._decoder = json.JSONDecoder(parse_constant=self.constants.append)

    def value(self, text: str, at: int) -> tuple[Any, int]:
        """The value at a place, and where it ends. JSONDecodeError if there is none."""
        self.constants.clear()
        try:
            return self._decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            raise
        except RecursionError as error:
            raise json.JSONDecodeError("nested too deeply", text, at) from error
        except ValueError as error:  # a number of thousands of digits
            raise json.JSONDecodeError(str(error), text, at) from error

    def is_value(self, text: str) -> bool:
        """Whether ``text`` is one value."""
        try:
            return self.value(text, 0)[1] == len(text)
        except json.JSONDecodeError:
            return False


def _checked(content: Any, origin: str, decoder: _Decoder) -> Row | BadRow:
    if decoder.constants:
        return BadRow(origin=origin, reason=f"not JSON: {decoder.constants[0]} is not a JSON value")
    return Row(content=content, origin=origin)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _not_utf8(file: Path, line: _Line) -> BadRow:
    return BadRow(origin=f"{file}:{line.number}", reason="not UTF-8")
