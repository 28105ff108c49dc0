"""From rows to stored documents: all that is wrong is said at once, all that is left out is counted, nothing half made."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mindspeed_runtime.data.prepare import (
    EmptyRowError,
    Encoder,
    RowError,
    Wanted,
    find,
    is_made,
    lock,
    make,
    open_store,
)
from mindspeed_runtime.data.sources import DataError
from mindspeed_runtime.data.store import Example


def encode(row):
    """One token a character; what stands after a bar is trained."""
    if not isinstance(row.content, dict) or not isinstance(row.content.get("text"), str):
        raise RowError("the text is not a string")
    text = row.content["text"]
    if not text.strip():
        raise EmptyRowError("empty text")
    bar = text.find("|")
    return [Example(tokens=[ord(c) % 200 for c in text], trained=[0 <= bar < n for n in range(len(text))])]


def _encoder(**changes):
    return Encoder(**{"encode": encode, "key": "k", "vocabulary": 200, **changes})


def _wanted(tmp_path, *patterns, **changes):
    given = {"name": "train", "patterns": tuple(map(str, patterns)), "cache": tmp_path / "cache", "sequence": 8}
    return Wanted(**{**given, **changes})


def _made(wanted, encoder=None):
    folder = find(wanted, encoder or _encoder())
    with lock(folder):
        make(wanted, encoder or _encoder(), folder)
    return open_store(folder)


def _put(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def _left_in(cache):
    return sorted(path.name for path in cache.rglob("*") if path.suffix != ".lock" and path.is_file())


GOOD = [{"text": "ab|c"}, {"text": "d|e"}]
BAD = {2: '{"text": "cut', 3: '{"no": 1}', 4: '{"text": null}', 6: '{"text": 3}', 7: '{"text": NaN}'}


def _mixed(path):
    lines = {1: GOOD[0], 5: GOOD[1], **BAD}
    return _put(path, *[lines[n] for n in sorted(lines)])


def test_every_bad_row_is_listed_with_its_place_and_nothing_is_made(tmp_path):
    path = _mixed(tmp_path / "rows.jsonl")
    with pytest.raises(DataError) as caught:
        _made(_wanted(tmp_path, path))
    head, *lines = str(caught.value).splitlines()
    assert head == "data.train: 5 rows cannot be used; put them right, or set data.bad_rows=skip:"
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{number}" for number in BAD]
    assert [line.split(": ", 1)[1][:8] for line in lines] == [
        "not JSON",
        "the text",
        "the text",
        "the text",
        "not JSON",
    ]
    assert _left_in(tmp_path / "cache") == []


def test_bad_rows_are_skipped_on_request_and_the_same_list_is_kept(tmp_path):
    path = _mixed(tmp_path / "rows.jsonl")
    store, counts = _made(_wanted(tmp_path, path, skip_bad=True))
    assert (len(store), counts.rows, counts.documents) == (2, 2, 2)
    assert [row.origin for row in counts.bad] == [f"{path}:{number}" for number in BAD]


def test_more_bad_rows_than_a_message_holds_are_all_in_a_file(tmp_path):
    path = _put(tmp_path / "rows.jsonl", *["x"] * 250, GOOD[0])
    with pytest.raises(DataError, match=r"250 rows cannot be used \(all are in .*train-bad-rows\.txt\)") as caught:
        _made(_wanted(tmp_path, path))
    assert str(caught.value).endswith("... and 150 more")
    listed = (tmp_path / "cache" / "train-bad-rows.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{path}:{n}" for n in range(1, 251)]


def test_what_is_empty_is_counted_by_reason_and_adds_nothing(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    rows = _put(tmp_path / "rows.jsonl", {"text": ""}, {"text": "   "}, "", GOOD[0], "")
    store, counts = _made(_wanted(tmp_path, tmp_path / "none.jsonl", rows, sequence=None))
    assert counts.blank == {"blank line": 1, "empty file": 1, "empty text": 2}
    assert [store.document(n)[0].tolist() for n in range(len(store))] == [[ord(c) for c in "ab|c"]]


def test_nothing_left_at_all_is_an_error_that_says_what_there_was(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    rows = _put(tmp_path / "rows.jsonl", {"text": ""}, {"text": "no bar"}, "x")
    with pytest.raises(DataError) as caught:
        _made(_wanted(tmp_path, tmp_path / "none.jsonl", rows, skip_bad=True))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("data.train: nothing is left to train on of ")
    assert lines[1:3] == ["1 x empty file", "1 x empty text"]
    assert lines[3] == f"{rows}:2: no trained token within data.sequence=8"
    assert lines[4].startswith(f"{rows}:3: not JSON")
    assert _left_in(tmp_path / "cache") == []


def test_rows_without_a_label_inside_the_window_are_left_out_and_named(tmp_path):
    # With 8 tokens a row and the targets shifted by one, a label may stand at place 8 but not at 9.
    texts = ["a|bcdefghijkl", "abcdefg|h", "abcdefgh|i", "abc|"]
    path = _put(tmp_path / "rows.jsonl", *({"text": text} for text in texts))
    store, counts = _made(_wanted(tmp_path, path))
    assert len(store) == 2
    assert [row.origin for row in counts.unlabelled] == [f"{path}:3", f"{path}:4"]
    assert (counts.cut_documents, counts.cut_trained) == (1, 4)
    assert (counts.tokens, counts.trained) == (store.num_tokens, store.num_trained) == (13 + 9, 11 + 1)


def test_text_that_flows_on_is_kept_whole(tmp_path):
    path = _put(tmp_path / "rows.jsonl", {"text": "abcdefghijklmnopqrstuvw|x"}, {"text": "abc"})
    store, counts = _made(_wanted(tmp_path, path, sequence=None))
    assert (len(store), counts.unlabelled, counts.cut_documents) == (2, [], 0)


def test_tokens_are_found_again_by_what_they_are_made_of(tmp_path):
    path = _put(tmp_path / "rows.jsonl", *GOOD)
    wanted = _wanted(tmp_path, path)
    first = find(wanted, _encoder())
    os.utime(path, (1, 1))
    assert find(wanted, _encoder()) == first
    others = [
        find(wanted, _encoder(key="another tokenizer")),
        find(wanted, _encoder(vocabulary=300)),
        find(_wanted(tmp_path, path, sequence=9), _encoder()),
        find(_wanted(tmp_path, path, skip_bad=True), _encoder()),
        find(_wanted(tmp_path, path, name="validation"), _encoder()),
    ]
    stamp = path.stat()
    path.write_text(path.read_text().replace("ab|c", "ab|d"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # an edit that size and time do not show
    others.append(find(wanted, _encoder()))
    _put(tmp_path / "more.jsonl", GOOD[0])
    others.append(find(_wanted(tmp_path, path, tmp_path / "more.jsonl"), _encoder()))
    assert len({first, *others}) == 1 + len(others)


def test_a_move_of_content_between_files_is_seen(tmp_path):
    one, two = _put(tmp_path / "a.jsonl", "1", "2"), _put(tmp_path / "b.jsonl", "3")
    first = find(_wanted(tmp_path, one, two), _encoder())
    one.write_text("1\n")
    two.write_text("23")
    assert find(_wanted(tmp_path, one, two), _encoder()) != first


def test_a_process_that_is_killed_while_it_tokenises_leaves_nothing_that_looks_whole(tmp_path):
    path = _put(tmp_path / "rows.jsonl", *GOOD)
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_data_prepare import Path, Wanted, _encoder, encode, find, lock, make
        def dying(row):
            if "d" in row.content["text"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return encode(row)
        wanted = Wanted(name="train", patterns=({str(path)!r},), cache=Path({str(tmp_path / "cache")!r}), sequence=8)
        folder = find(wanted, _encoder())
        with lock(folder):
            make(wanted, _encoder(encode=dying), folder)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    folder = find(_wanted(tmp_path, path), _encoder())
    assert any((tmp_path / "cache").iterdir())  # it was at work
    assert not folder.exists()
    store, _ = _made(_wanted(tmp_path, path))  # the lock went with it, and the rest is cleared away
    assert len(store) == 2
    assert is_made(folder)
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == [folder.name]
