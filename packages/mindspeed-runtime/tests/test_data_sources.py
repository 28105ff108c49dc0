"""Reading files: every row with its place, or a reason; nothing lost without a word."""

import gzip
import json
import os

import pytest
from mindspeed_runtime.data.sources import BadRow, Blank, DataError, Row, expand, read_rows

ROWS = [{"text": f"row {n} na\u00efve \u6f22 \u2028 {{"} for n in range(5)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
CLEAN = "\n".join(LINES) + "\n"
CONTAINERS = {
    "clean.jsonl": CLEAN.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + CLEAN.encode(),
    "crlf.jsonl": CLEAN.replace("\n", "\r\n").encode(),
    "no-end.jsonl": CLEAN.rstrip("\n").encode(),
    "blank.jsonl": ("\n \n" + CLEAN.replace("\n", "\n\n")).encode(),
    "array.jsonl": ("[" + ",\n".join(LINES) + "]\n").encode(),
    "one-line.jsonl": ("[" + ", ".join(LINES) + "]").encode(),
    "bom-array.json": b"\xef\xbb\xbf[" + ",".join(LINES).encode() + b"]",
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "pretty-rows.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "lines.json": CLEAN.encode(),
    "plain.jsonl.gz": gzip.compress(CLEAN.encode()),
    "hidden.jsonl": gzip.compress(CLEAN.encode()),
    "members.jsonl.gz": gzip.compress(LINES[0].encode() + b"\n") + gzip.compress("\n".join(LINES[1:]).encode()),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
}


def _read(*patterns):
    return list(read_rows(expand([str(pattern) for pattern in patterns])))


def _kept(*patterns):
    return [row.content for row in _read(*patterns) if isinstance(row, Row)]


def _put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_same_rows_in_another_container_are_the_same_rows(tmp_path, name):
    found = _read(_put(tmp_path / name, CONTAINERS[name]))
    assert [row.content for row in found if isinstance(row, Row)] == ROWS
    assert not [row for row in found if isinstance(row, BadRow)]


@pytest.mark.parametrize(
    "name", ["clean.jsonl", "crlf.jsonl", "blank.jsonl", "array.jsonl", "pretty.json", "lines.json"]
)
def test_a_row_knows_its_line(tmp_path, name):
    path = _put(tmp_path / name, CONTAINERS[name])
    lines = path.read_text().split("\n")
    for row in _read(path):
        if isinstance(row, Row):
            file, number = row.origin.rsplit(":", 1)
            assert file == str(path)
            near = "".join(lines[int(number) - 1 : int(number) + 1])  # a pretty row's text is on its second line
            assert row.content["text"][:5] in near


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-16", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32"), ("utf-32-be", "UTF-32")]
)
def test_other_encodings_are_refused_by_name(tmp_path, encoding, name):
    path = _put(tmp_path / "wide.jsonl", ("\ufeff" * encoding.endswith("be") + CLEAN).encode(encoding))
    with pytest.raises(DataError, match=rf"wide\.jsonl: encoded as {name}; convert it to UTF-8"):
        _read(path)


BAD = {
    '{"text": "cut off': "not JSON: Unterminated string",
    '{"text": "a"} {"text": "b"}': "not JSON: text after the end of the value",
    '{"text": NaN}': "not JSON: NaN is not a JSON value",
    '{"text": [1, -Infinity]}': "not JSON: -Infinity is not a JSON value",
    "text": "not JSON: Expecting value",
    "[" * 100_000: "not JSON: ",
    '{"text": ' + "1" * 5000 + "}": "not JSON: Exceeds the limit",
    b'{"text": "\xff"}': "not UTF-8",
}


@pytest.mark.parametrize("bad", BAD, ids=list(BAD.values()))
@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_malformed_row_is_named_with_its_line_and_the_others_are_read(tmp_path, bad, position):
    line = bad if isinstance(bad, bytes) else bad.encode()
    rows = [text.encode() for text in LINES]
    rows.insert(position, line)
    path = _put(tmp_path / "rows.jsonl", b"\n".join(rows))
    if line.startswith(b"[") and position == 0:
        # An array that is never closed: all that follows would be part of it.
        with pytest.raises(DataError, match=r"rows\.jsonl:1: not JSON"):
            _read(path)
        return
    found = _read(path)
    (fault,) = [row for row in found if isinstance(row, BadRow)]
    assert fault.origin == f"{path}:{position + 1}"
    assert fault.reason.startswith(BAD[bad])
    assert [row.content for row in found if isinstance(row, Row)] == ROWS


def test_lists_on_lines_are_rows_and_not_the_end_of_the_file(tmp_path):
    path = _put(tmp_path / "rows.jsonl", '["a"]\n["b"]\n{"text": "c"}\n')
    assert _kept(path) == [["a"], ["b"], {"text": "c"}]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[{"a": 1},\n{"a": 2}', 2, "the array has no end"),
        ('[{"a": 1},\n{"a": 2', 2, "Expecting"),
        ('[{"a": 1}\n{"a": 2}]', 2, "',' or ']' expected"),
        ('[{"a": 1},\n,{"a": 2}]', 2, "Expecting value"),
        ('[{"a": 1},\n]', 2, "Expecting value"),
        ('[{"a": 1}\n]\n{"a": 2}', 2, "text after the end of the array"),
        ('{\n"a": 1}\n{\n"a": }', 4, "Expecting value"),
    ],
)
def test_a_fault_in_what_does_not_keep_to_lines_is_the_whole_files(tmp_path, text, line, reason):
    path = _put(tmp_path / "rows.json", text)
    with pytest.raises(DataError, match="nothing after this place can be read") as caught:
        _read(path)
    assert str(caught.value).startswith(f"{path}:{line}: not JSON: {reason}")


def test_a_constant_in_an_array_spoils_one_row_only(tmp_path):
    found = _read(_put(tmp_path / "rows.json", '[{"a": 1},\n{"a": NaN},\n{"a": 3}]'))
    assert [type(row) for row in found] == [Row, BadRow, Row]
    assert found[1].origin.endswith(":2")


def test_empty_files_and_blank_lines_are_counted_and_add_nothing(tmp_path):
    _put(tmp_path / "a.jsonl", b"")
    _put(tmp_path / "b.jsonl", b"\n  \n" + LINES[0].encode() + b"\n\n")
    _put(tmp_path / "c.txt", b" \n")
    _put(tmp_path / "d.json", b"[ ]")
    _put(tmp_path / "e.jsonl", b"\xef\xbb\xbf")
    found = _read(tmp_path)
    assert [row.content for row in found if isinstance(row, Row)] == ROWS[:1]
    blanks = [(row.origin.rsplit("/", 1)[1], row.reason) for row in found if isinstance(row, Blank)]
    assert blanks == [
        ("a.jsonl:1", "empty file"),
        ("b.jsonl:1", "blank line"),
        ("b.jsonl:2", "blank line"),
        ("b.jsonl:4", "blank line"),
        ("c.txt:1", "empty file"),
        ("e.jsonl:1", "blank line"),
        ("e.jsonl:1", "empty file"),
    ]


def test_a_text_file_is_one_row(tmp_path):
    path = _put(tmp_path / "book.txt", b"\xef\xbb\xbfone\r\n\r\n  two\r\n")
    assert _kept(path) == ["one\n\n  two"]
    (bad,) = _read(_put(tmp_path / "bad.txt", b"one\n\xff\n"))
    assert bad == BadRow(origin=f"{tmp_path / 'bad.txt'}:2", reason="not UTF-8")


def test_a_gzip_file_that_is_cut_or_damaged_is_an_error_and_no_short_success(tmp_path):
    whole = gzip.compress(os.urandom(3000).hex().encode().replace(b"a", b"\n"))
    for content in (whole[: len(whole) // 2], whole[:-4], whole[:60] + b"\0\0\0\0" + whole[64:], whole + b"junk"):
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz: the gzip data is cut short or damaged"):
            _read(_put(tmp_path / "rows.jsonl.gz", content))


def test_files_come_in_the_order_of_their_paths_each_once(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("b.jsonl", "a.json", "in/c.jsonl.gz", "d.txt"):
        _put(tmp_path / name, b"{}")
    _put(tmp_path / "README.md", b"not data")
    _put(tmp_path / ".b.jsonl", b"{}")
    names = ["a.json", "b.jsonl", "d.txt", "in/c.jsonl.gz"]
    for patterns in ([""], ["in", "*.txt", "b.jsonl", "a.json"], ["**/*.json*", "d.txt", "a.json", "in/../d.txt"]):
        found = expand([str(tmp_path / pattern) for pattern in patterns])
        assert [os.path.relpath(path, tmp_path) for path in found] == names, patterns
        assert expand([str(tmp_path / pattern) for pattern in reversed(patterns)]) == found


def test_a_hidden_folder_above_the_data_hides_nothing(tmp_path):
    (tmp_path / ".cache").mkdir()
    _put(tmp_path / ".cache" / "a.jsonl", b"{}")
    for pattern in (".cache", ".cache/a.jsonl", ".cache/*.jsonl"):
        assert len(expand([str(tmp_path / pattern)])) == 1


def test_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _put(tmp_path / "a.jsonl", b"{}")
    assert [str(path) for path in expand(["*.jsonl", "a.jsonl", "."])] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("absent.jsonl", "absent.jsonl: no such file, folder or match"),
        ("absent*.jsonl", r"absent\*.jsonl: no such file, folder or match"),
        (
            "notes.docx",
            "notes.docx: this kind of file is not read; files end in .jsonl, .json, .txt, plain or with .gz",
        ),
        ("empty", "empty: no data files in this folder"),
        ("mixed", "mixed: b.parquet, c.csv: this kind of file is not read"),
    ],
)
def test_what_is_not_there_or_not_read_is_named(tmp_path, pattern, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for name in ("notes.docx", "mixed/a.jsonl", "mixed/c.csv", "mixed/b.parquet", "empty/README"):
        _put(tmp_path / name, b"{}")
    with pytest.raises(DataError, match=reason):
        expand([str(tmp_path / pattern)])


def test_progress_adds_up_to_the_size_of_the_files(tmp_path):
    for name in ("clean.jsonl", "plain.jsonl.gz", "pretty.json"):
        seen = []
        path = _put(tmp_path / name, CONTAINERS[name])
        list(read_rows([path], seen.append))
        assert sum(seen) == path.stat().st_size
